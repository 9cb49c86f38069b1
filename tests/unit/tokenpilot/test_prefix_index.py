"""The prefix index: who still has a prompt's beginning."""

import os
import random
import sys

import numpy as np
import pytest

from tokenfleet import prefix
from tokenfleet.tokenpilot.prefix_index import Chain, PrefixIndex, chain_of


def chain(count: int, after: Chain | None = None) -> Chain:
    """So many new digests, after those of another chain."""
    new = chain_of(os.urandom(8 * count))
    return new if after is None else np.concatenate([after, new])


def shared(a: Chain, b: Chain) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def test_everybody_gets_the_length_of_its_own_part() -> None:
    """One lookup per instance cost a router its latency at a hundred of them."""
    index, base = PrefixIndex(10_000), chain(100)
    index.add("a", base)
    index.add("b", base[:40])
    index.add("c", base[:40])
    index.add("d", chain(100))
    hits = index.hit_column(base, 1)
    at = {name: int(hits[index.number(name)]) for name in "abcd"}
    assert at == {"a": 6400, "b": 2560, "c": 2560, "d": 0}
    assert index.hit_tokens("b", chain(5, base), 1) == 2560
    assert index.hits(chain(10), 1) == []


def test_what_the_kv_cache_cannot_hold_is_forgotten_oldest_first() -> None:
    """A view that never forgets sent requests after prefixes that had been evicted an hour before."""
    index, old, new = PrefixIndex(100_000), chain(60), chain(60)
    index.limit("a", 100 * prefix.CHUNK_TOKENS)
    index.add("a", old)
    index.add("a", new)
    assert index.hit_tokens("a", new, 1) == 60 * 64
    assert index.hit_tokens("a", old, 1) == 40 * 64, "the end is forgotten first, as engines do"
    assert len(index) == 100
    index.add("a", old[:20])  # used again: now the newest
    index.add("a", chain(50))
    assert index.hit_tokens("a", old, 1) >= 20 * 64


def test_a_strided_chain_takes_the_room_of_what_it_stands_for() -> None:
    """Million-token prompts send every 8th digest; counted one each they seemed to fit eight times."""
    index, first, second = PrefixIndex(100_000), chain(60), chain(60)
    index.limit("a", 800 * prefix.CHUNK_TOKENS)
    index.add("a", first, 8)
    index.add("a", second, 8)
    assert index.hit_tokens("a", second, 8) == 60 * 8 * 64
    assert index.hit_tokens("a", first, 8) == 40 * 8 * 64


def test_what_engines_say_is_followed_and_a_gone_instance_leaves_nothing() -> None:
    """P11: instances came and went and the index only grew."""
    index, base = PrefixIndex(1000), chain(20)
    index.store("a", base.tolist())
    index.store("b", base.tolist())
    index.remove("a", base[10:].tolist())
    index.remove("a", base[10:].tolist())  # told twice
    assert index.hit_tokens("a", base, 1) == 640
    assert index.hit_tokens("b", base, 1) == 1280
    for n in range(500):
        index.add(f"x{n}", chain(30))
        index.clear(f"x{n}", gone=True)
    index.clear("a")
    index.clear("b", gone=True)
    assert len(index) == 0
    assert not index._postings
    assert index.numbers <= 3


def test_another_tenants_chain_is_another_chain() -> None:
    """P13: keys lacked the salt, so tenants falsely matched."""
    index, tokens = PrefixIndex(1000), list(range(4096))
    acme = chain_of(prefix.digests(tokens, prefix.tenant_key("s", "acme")))
    other = chain_of(prefix.digests(tokens, prefix.tenant_key("s", "other")))
    index.add("a", acme)
    assert index.hit_tokens("a", other, 1) == 0
    assert index.hit_tokens("a", acme, 1) == 4096


def test_random_histories_agree_with_sets() -> None:
    """The postings against the plain definition: the longest beginning that is all there."""
    dice, index = random.Random(5), PrefixIndex(10_000)
    roots = [chain(30) for _ in range(4)]
    chains = [chain(20, root[: dice.randint(1, 30)]) for root in roots for _ in range(5)]
    sent: dict[str, list[Chain]] = {}
    for _ in range(120):
        name, one = f"i{dice.randrange(70)}", dice.choice(chains)
        index.add(name, one)
        sent.setdefault(name, []).append(one)
        probe = dice.choice(chains)
        for who, theirs in sent.items():
            best = max(shared(one, probe) for one in theirs)
            assert index.hit_tokens(who, probe, 1) == best * 64


def test_memory_per_cached_block_is_bounded() -> None:
    """P11: an event-fed index reached hundreds of gigabytes."""
    index = PrefixIndex(1 << 20)
    count = 0
    for _ in range(40):
        one = chain(1000)
        index.add("a", one)
        count += len(one)
    size = sys.getsizeof(index._postings) + sys.getsizeof(index._known["a"]) + count * sys.getsizeof(1 << 63)
    # 64 tokens a digest: four of vLLM's blocks of 16 tokens.
    assert size / (4 * count) <= 100
    assert size / count <= 200


@pytest.mark.parametrize("data", [b"", bytes(8), bytes(16)])
def test_whole_digests_only(data: bytes) -> None:
    """A cut message must not become a wrong prefix."""
    assert len(chain_of(data)) == len(data) // 8
    with pytest.raises(prefix.PrefixError):
        chain_of(data + b"x")
