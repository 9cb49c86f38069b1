"""The prefix index: who still has a prompt's beginning."""

import os
import random

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
    index.clear("never heard of", gone=True)
    assert len(index) == 0
    assert not len(index._postings)
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


class Plain:
    """The same in dicts: digest → chunks, least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.known = limit, dict[int, int]()

    def add(self, chain: Chain, stride: int) -> None:
        for digest in chain[: max(1, self.limit // stride)][::-1].tolist():
            self.known.pop(digest, None)
            self.known[digest] = stride
        while sum(self.known.values()) > self.limit:
            del self.known[next(iter(self.known))]

    def remove(self, digests: list[int]) -> None:
        for digest in digests:
            self.known.pop(digest, None)


def test_the_dense_index_forgets_what_plain_dicts_would() -> None:
    """Uses, removals, clears and strides in any order: the same digests are held, and the same chunks counted."""
    dice, index, plain = random.Random(7), PrefixIndex(100_000), {n: Plain(300) for n in "abc"}
    for name in plain:
        index.limit(name, 300 * prefix.CHUNK_TOKENS)
    chains = [chain(dice.randint(1, 120)) for _ in range(25)]
    for step in range(1500):
        name, one, stride = dice.choice("abc"), dice.choice(chains), dice.choice((1, 1, 1, 2, 8))
        what = dice.random()
        if what < 0.75:
            index.add(name, one, stride)
            plain[name].add(one, stride)
        elif what < 0.95:
            some = dice.sample(one.tolist(), dice.randint(0, len(one)))
            index.remove(name, some + some[:2])
            plain[name].remove(some)
        elif what < 0.96:
            index.clear(name)
            plain[name].known.clear()
        use = index._uses.get(name)
        held = {} if use is None else dict(zip(*(array.tolist() for array in use.last.entries()), strict=True))
        assert set(held) == set(plain[name].known), step
        assert (use.chunks if use is not None else 0) == sum(plain[name].known.values()), step
    everything = set().union(*(one.known for one in plain.values()))
    assert len(index._postings) == len(everything)
    for digest in everything:
        bits = index._sets[index._postings.get(digest)]
        assert bits == sum(1 << index.number(name) for name, one in plain.items() if digest in one.known)


def test_sets_without_a_digest_are_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of instances that ever held something was remembered for good."""
    monkeypatch.setattr("tokenfleet.tokenpilot.prefix_index._SETS_MAX", 50)
    index, dice = PrefixIndex(100), random.Random(3)
    index._sets_max = 50
    chains = [chain(4) for _ in range(30)]
    for _ in range(2000):
        index.add(f"i{dice.randrange(40)}", dice.choice(chains))
        index.remove(f"i{dice.randrange(40)}", dice.choice(chains).tolist())
    assert len(index._sets) <= 2 * 120 + 50
    for one in chains:
        for name in [f"i{n}" for n in range(40)]:
            use = index._uses.get(name)
            held = use is not None and use.last.get(one.item(0)) > 0
            assert (index.hit_tokens(name, one, 1) > 0) == held


def test_batches_are_numbered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2^28 prompts the order of use began at nought, and the newest were forgotten first."""
    monkeypatch.setattr("tokenfleet.tokenpilot.prefix_index._NUMBER_MAX", 20)
    index, plain = PrefixIndex(10_000), Plain(2000)
    index.limit("a", 2000 * prefix.CHUNK_TOKENS)
    for _ in range(200):
        one = chain(400)
        index.add("a", one)
        plain.add(one, 1)
    assert set(index._uses["a"].last.entries()[0].tolist()) == set(plain.known)


@pytest.mark.parametrize("few", [1, 7, 1000])
def test_memory_per_digest_is_bounded(few: int) -> None:
    """P11: an event-fed index reached hundreds of gigabytes. Growing, and replacing what engines drop."""
    index, worst = PrefixIndex(1 << 20), 0.0
    told: list[Chain] = []
    for n in range(60_000 // few if few > 1 else 8000):
        told.append(chain(few))
        index.store("a", told[-1].tolist())
        if n * few > 40_000 or (few == 1 and n > 6000):
            index.remove("a", told.pop(0).tolist())
        if len(index) > 4000:
            batches = sum(200 for use in index._uses.values() for _ in use.batches)
            worst = max(worst, (index.nbytes + batches) / len(index))
    assert worst <= 100


@pytest.mark.parametrize("data", [b"", bytes(8), bytes(16)])
def test_whole_digests_only(data: bytes) -> None:
    """A cut message must not become a wrong prefix."""
    assert len(chain_of(data)) == len(data) // 8
    with pytest.raises(prefix.PrefixError):
        chain_of(data + b"x")
