"""Engines' KV events as digests of the fleet's chain: block sizes, copies, salts, gaps, restarts."""

import json
import os
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet import fleet as fleets
from tokenfleet import prefix
from tokenfleet.siteagent.kv_events import Batch, Blocks, Content, Feed, Gap, Keys, KvEventError, decode, number

SECRET = "s" * 32
FLEET = fleets.parse(
    b"""
[fleet]
name = "f"
default_class = "chat"
[sites.b]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 100000
[classes.chat]
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
[tenants.other]
zones = ["eu"]
classes = ["chat"]
[tenants.one]
zones = ["eu"]
classes = ["chat"]
share_prefix = true
[tenants.two]
zones = ["eu"]
classes = ["chat"]
share_prefix = true
"""
)
SINGLE = fleets.parse(
    b"""
[fleet]
name = "f"
default_class = "chat"
[sites.b]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 100000
[classes.chat]
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
"""
)
SALT = prefix.cache_salt(SECRET, "acme")
KEY = prefix.tenant_key(SECRET, "acme")
CAPTURES = Path(os.environ.get("TOKENFLEET_SHARED", Path(__file__).parents[4] / "shared")) / "engines" / "captures"


class Engine:
    """Names blocks as an engine does, by a hash of everything before them, and tells of them."""

    def __init__(self, block_tokens: int, *, form: str = "unsigned") -> None:
        self.block_tokens = block_tokens
        self.form = form

    def names(self, tokens: list[int], salt: str = SALT) -> list[Any]:
        """Hashes of the full blocks."""
        size = self.block_tokens
        found: list[Any] = []
        for end in range(size, len(tokens) + 1, size):
            value = hash((salt, tuple(tokens[:end]))) & (2**64 - 1)
            if self.form == "signed":
                value = value - 2**64 if value >= 2**63 else value
            found.append(value.to_bytes(32, "big") if self.form == "bytes" else value)
        return found

    def stored(self, tokens: list[int], first: int = 0, last: int | None = None, salt: str = SALT) -> dict[str, Any]:
        """BlockStored of blocks `first` to `last`, as vLLM 0.32 sends it."""
        names = self.names(tokens, salt)
        last = len(names) if last is None else last
        size = self.block_tokens
        extra: list[Any] = [None] * (last - first)
        if first == 0 and extra and salt:
            extra[0] = [salt]
        return {
            "type": "BlockStored",
            "block_hashes": names[first:last],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": tokens[first * size : last * size],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    @staticmethod
    def removed(names: Iterable[Any]) -> dict[str, Any]:
        """BlockRemoved."""
        return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0}


def payload(*events: Any, unix_s: float = 1.0) -> bytes:
    """One ZMQ payload."""
    return msgspec.msgpack.encode([unix_s, list(events), 0])


def batch(*events: Any) -> Batch:
    """The same, decoded."""
    return decode(payload(*events))


def blocks(fleet: fleets.Fleet = FLEET, **options: Any) -> tuple[Blocks, Content]:
    """An empty fold."""
    content = Content()
    return Blocks(content, Keys(fleet, SECRET), **options), content


def prompt(seed: int, length: int) -> list[int]:
    """Token ids of an arbitrary text."""
    return random.Random(seed).choices(range(150_000), k=length)


def chain(tokens: list[int], key: bytes = KEY) -> set[bytes]:
    """What a gateway would send of it, as digests."""
    told = prefix.digests(tokens, key)
    return {told[at : at + 8] for at in range(0, len(told), 8)}


def held(content: Content) -> set[bytes]:
    """Everything in a content."""
    told = content.snapshot()
    return {told[at : at + 8] for at in range(0, len(told), 8)}


# --- re-chunking ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    block_tokens=st.sampled_from([1, 3, 10, 16, 32, 48, 64, 65, 100, 128, 256]),
    length=st.integers(1, 700),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    form=st.sampled_from(["unsigned", "signed", "bytes"]),
)
def test_blocks_of_any_size_and_in_any_portions_give_the_gateways_digests(
    block_tokens: int, length: int, cuts: list[int], form: str
) -> None:
    """Engines chose block sizes that do not divide 64; every prompt then missed the index entirely."""
    engine, tokens = Engine(block_tokens, form=form), prompt(7, length)
    count = len(engine.names(tokens))
    fold, content = blocks()
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    for first, last in pairwise(edges):
        fold.fold(batch(engine.stored(tokens, first, last)))
    whole = length // block_tokens * block_tokens
    assert held(content) == chain(tokens[:whole])
    assert not fold.skipped


@settings(max_examples=40, deadline=None)
@given(block_tokens=st.sampled_from([1, 16, 24, 32, 64, 96, 128]), seed=st.integers(0, 10_000))
def test_after_any_removals_exactly_the_whole_chunks_are_held(block_tokens: int, seed: int) -> None:
    """A block thrown out of the middle of a chunk makes the chunk useless, whichever block told of it."""
    dice = random.Random(seed)
    engine, fold_content = Engine(block_tokens), blocks()
    fold, content = fold_content
    trunk = prompt(seed, 200)
    prompts = [trunk + prompt(seed + n, dice.randrange(300)) for n in range(1, 4)]
    copies: dict[Any, int] = {}
    for tokens in prompts:
        names = engine.names(tokens)
        # what an engine finds it does not store again; sometimes two prefills at once store it twice
        first = next((at for at, name in enumerate(names) if not copies.get(name)), len(names))
        first = 0 if dice.random() < 0.3 else first
        if first < len(names):
            fold.fold(batch(engine.stored(tokens, first)))
            for name in names[first:]:
                copies[name] = copies.get(name, 0) + 1
    for _ in range(dice.randrange(30)):
        alive = [name for name, left in copies.items() if left]
        if alive:
            gone = dice.choice(alive)
            copies[gone] -= 1
            fold.fold(batch(engine.removed([gone])))
    expected: set[bytes] = set()
    for tokens in prompts:
        told = prefix.digests(tokens, KEY)
        for at in range(len(told) // 8):
            first, last = at * 64 // block_tokens, ((at + 1) * 64 - 1) // block_tokens
            names = engine.names(tokens)[first : last + 1]
            if len(names) == last + 1 - first and all(copies.get(name) for name in names):
                expected.add(told[at * 8 : at * 8 + 8])
    assert held(content) == expected
    # everything computed once more: whole again
    for tokens in prompts:
        fold.fold(batch(engine.stored(tokens)))
    whole = [tokens[: len(tokens) // block_tokens * block_tokens] for tokens in prompts]
    assert held(content) == set().union(*map(chain, whole))


def test_a_hash_stored_twice_is_held_until_removed_twice() -> None:
    """Two prompts computed the same prefix at once; the first eviction took it from the index though a copy stayed."""
    engine, tokens = Engine(16), prompt(1, 128)
    fold, content = blocks()
    fold.fold(batch(engine.stored(tokens)))
    fold.fold(batch(engine.stored(tokens)))
    fold.fold(batch(engine.removed(engine.names(tokens))))
    assert held(content) == chain(tokens)
    fold.fold(batch(engine.removed(engine.names(tokens))))
    assert held(content) == set()
    assert len(fold) == 0


def test_what_came_and_went_between_two_tellings_is_not_told() -> None:
    """A block can come and go within a flush; told in the wrong order it would stay for ever."""
    engine, tokens, other = Engine(16), prompt(1, 64), prompt(2, 64)
    fold, content = blocks()
    fold.fold(batch(engine.stored(tokens), engine.removed(engine.names(tokens)), engine.stored(other)))
    changes = content.take()
    assert (changes.stored, changes.removed) == (prefix.digests(other, KEY), b"")
    fold.fold(batch(engine.removed(engine.names(other)), engine.stored(other)))
    assert content.changed == 0


# --- salts, adapters, other content ---------------------------------------------------------------------------


def test_one_prompt_under_two_salts_is_two_tenants_content() -> None:
    """P13: the router's key ignored the salt: overlap was always 0 on one path, on another tenants matched."""
    engine, tokens = Engine(16), prompt(1, 4096)
    fold, content = blocks()
    fold.fold(batch(engine.stored(tokens)))
    assert held(content) == chain(tokens)
    assert not held(content) & chain(tokens, prefix.tenant_key(SECRET, "other"))
    fold.fold(batch(engine.stored(tokens, salt=prefix.cache_salt(SECRET, "one", share=True))))
    assert chain(tokens, prefix.tenant_key(SECRET, "two", share=True)) <= held(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra_keys": [["a stranger's salt"], None, None, None]}, "salt_unknown"),
        ({"extra_keys": [None] * 4}, "unsalted"),
        ({"extra_keys": None}, "unsalted"),
        ({"extra_keys": [["f3a9-image", SALT], None, None, None]}, "multimodal"),
        ({"lora_id": 3}, "adapter_unnamed"),
        ({"medium": "CPU"}, "not_on_gpu"),
        ({"kv_cache_spec_kind": "sliding_window"}, "not_whole_prefix"),
        ({"block_size": 15}, "size_mismatch"),
        ({"parent_block_hash": 99, "extra_keys": [None] * 4}, "parent_unknown"),
        ({"token_ids": [2**40] * 64}, "tokens_unusable"),
    ],
)
def test_what_cannot_be_told_exactly_is_counted_not_guessed(change: dict[str, Any], reason: str) -> None:
    """Blocks of other users, other media and images looked like a tenant's prompt and drew requests to no hit."""
    fold, content = blocks()
    fold.fold(batch(Engine(16).stored(prompt(1, 64)) | change))
    assert len(content) == 0
    assert fold.skipped == {reason: 4}


def test_an_image_in_the_middle_ends_what_is_known_of_a_prompt() -> None:
    """Placeholder tokens are alike for all images: digests behind one would match another image's prompt."""
    tokens = prompt(1, 256)
    event = Engine(64).stored(tokens)
    event["extra_keys"] = [[SALT], None, [["f3a9-image", 4]], None]
    fold, content = blocks()
    fold.fold(batch(event))
    assert held(content) == chain(tokens[:128])
    assert fold.skipped == {"multimodal": 2}


def test_an_adapters_blocks_are_another_content() -> None:
    """KV under an adapter is other KV; sent to the base model's prompt it is no hit."""
    engine, tokens = Engine(16), prompt(1, 128)
    event = engine.stored(tokens) | {"lora_id": 1, "lora_name": "law", "extra_keys": [["law", SALT]] + [["law"]] * 7}
    fold, content = blocks()
    fold.fold(batch(event))
    assert held(content) == chain(tokens, prefix.tenant_key(SECRET, "acme", adapter="law"))


def test_an_engine_that_names_no_salt_is_known_only_where_there_is_one() -> None:
    """SGLang's events carry no extra keys: with several tenants nobody can say whose prompt a block is."""
    event = Engine(16, form="signed").stored(prompt(1, 64))
    for name in ("extra_keys", "group_idx", "kv_cache_spec_kind", "lora_name"):
        del event[name]
    fold, content = blocks(SINGLE)
    fold.fold(batch(event))
    assert held(content) == chain(prompt(1, 64))
    fold, content = blocks(FLEET)
    fold.fold(batch(event))
    assert (len(content), fold.skipped) == (0, {"salt_unsaid": 4})


# --- the wire -------------------------------------------------------------------------------------------------


def test_hashes_of_all_forms_mean_the_same() -> None:
    """An engine switched from 32-byte to integer hashes, and removals no longer met what they removed."""
    value = 0xFEDC_BA98_7654_3210
    assert number(value) == number(value - 2**64) == number(b"\x11" * 24 + value.to_bytes(8, "big"))


def test_older_engines_send_events_as_arrays() -> None:
    """Before the maps vLLM sent tagged arrays, with trailing defaults left out."""
    tokens, engine = prompt(1, 64), Engine(16)
    rows = [
        ["BlockStored", engine.names(tokens), None, tokens, 16, None],
        ["BlockRemoved", engine.names(tokens)[3:]],
        ["AllBlocksCleared"],
    ]
    fold, content = blocks(SINGLE)
    fold.fold(batch(rows[0]))
    assert held(content) == chain(tokens)
    fold.fold(batch(rows[1]))
    assert held(content) == set()
    fold.fold(batch(*rows))
    assert len(fold) == 0


def test_an_unknown_event_does_not_hide_its_neighbours() -> None:
    """A newer engine adds an event; everything beside it in the batch was thrown away with it."""
    tokens = prompt(1, 64)
    fold, content = blocks()
    fold.fold(batch({"type": "BlockPinned", "x": 1}, Engine(16).stored(tokens), 17))
    assert held(content) == chain(tokens)
    assert fold.skipped == {"event_unknown": 2}
    with pytest.raises(KvEventError):
        decode(b"\x00not a batch")


# --- clearing, restarts, gaps ---------------------------------------------------------------------------------


def test_all_blocks_cleared_empties_at_once() -> None:
    """S10: AllBlocksCleared was only logged."""
    fold, content = blocks()
    fold.fold(batch(Engine(16).stored(prompt(1, 640))))
    content.take()
    fold.fold(batch({"type": "AllBlocksCleared"}))
    assert len(content) == 0
    changes = content.take()
    assert (changes.cleared, changes.stored, changes.removed) == (True, b"", b"")


def test_another_block_size_is_another_cache() -> None:
    """An engine was reconfigured in place; blocks of two sizes described one cache."""
    fold, content = blocks()
    fold.fold(batch(Engine(16).stored(prompt(1, 640))))
    fold.fold(batch(Engine(32).stored(prompt(2, 640))))
    assert held(content) == chain(prompt(2, 640))
    assert fold.skipped == {"block_size_changed": 40}


def messages(count: int, unix_s: float = 100.0) -> tuple[list[bytes], set[bytes]]:
    """A publisher's messages, one prompt each, every third removing one again; and what is held in the end."""
    engine, found, oracle = Engine(16), [], set()
    for n in range(count):
        events = [engine.stored(prompt(n, 64))]
        oracle |= chain(prompt(n, 64))
        if n % 3 == 2:
            events.append(engine.removed(engine.names(prompt(n - 2, 64))))
            oracle -= chain(prompt(n - 2, 64))
        found.append(payload(*events, unix_s=unix_s + n))
    return found, oracle


def test_a_gap_is_noticed_and_filled_before_what_follows_it() -> None:
    """S08: batches 100-120 of 1,000 were dropped and nobody looked at the sequence: wrong for ever."""
    sent, oracle = messages(1000)
    fold, content = blocks()
    feed = Feed(fold)
    for sequence in [*range(100), *range(121, 1000)]:
        gap = feed.offer(sequence, sent[sequence])
        if gap is not None:
            assert (gap, sequence) == (Gap(100, 121), 121)
            # the engine's buffer also holds what came meanwhile
            assert feed.replayed(gap, {n: sent[n] for n in range(100, 125)})
            assert feed.offer(121, sent[121]) is None
    assert held(content) == oracle
    assert (feed.gaps, feed.gaps_unrecovered) == (1, 0)
    # a batch that comes twice changes nothing
    for sequence in (998, 999, 100):
        assert feed.offer(sequence, sent[sequence]) is None
    assert held(content) == oracle
    assert feed.restarts == 0


def test_a_gap_that_cannot_be_filled_leaves_nothing_stale() -> None:
    """S08: the replay was refused or cut short (buffer of 10,000): a removal may be among the lost."""
    sent, _ = messages(30)
    for had in ({}, {n: sent[n] for n in range(15, 20)}, {n: sent[n] for n in range(10, 15)}):
        fold, content = blocks()
        feed = Feed(fold)
        for n in range(10):
            feed.offer(n, sent[n])
        gap = feed.offer(20, sent[20])
        assert gap == Gap(10, 20)
        assert not feed.replayed(gap, had)
        assert feed.gaps_unrecovered == 1
        kept = held(content)
        assert not kept & set().union(*(chain(prompt(n, 64)) for n in range(15)))
        assert feed.offer(20, sent[20]) is None
        assert chain(prompt(20, 64)) <= held(content)


def test_a_late_joiner_asks_for_everything() -> None:
    """An agent that was restarted knew nothing of what engines had cached before."""
    sent, oracle = messages(30)
    fold, content = blocks()
    feed = Feed(fold)
    gap = feed.offer(29, sent[29])
    assert gap == Gap(0, 29)
    assert feed.replayed(gap, dict(enumerate(sent)))
    assert held(content) == oracle
    assert feed.offer(29, sent[29]) is None
    assert (held(content), feed.gaps) == (oracle, 0)


@pytest.mark.parametrize("first", [0, 3])
def test_a_restart_in_place_forgets_before_the_first_event(first: int) -> None:
    """S09: 5,000 blocks of the old process stayed in the index; requests chased hits that could not exist."""
    fold, content = blocks()
    feed = Feed(fold)
    old, _ = messages(40)
    for n, message in enumerate(old):
        feed.offer(n, message)
    new = [payload(Engine(16).stored(prompt(1000 + n, 64)), unix_s=500.0 + n) for n in range(5)]
    gap = feed.offer(first, new[first])
    if first:
        assert gap == Gap(0, 3)
        assert len(content) == 0
        feed.replayed(gap, dict(enumerate(new[:first])))
        feed.offer(first, new[first])
    assert held(content) == set().union(*(chain(prompt(1000 + n, 64)) for n in range(first + 1)))
    assert feed.restarts == 1
    # the same restart, seen by a scrape: not another one
    assert not feed.begin(499.5)
    assert len(content) == first + 1
    # the next one, seen by the scrape first
    assert feed.begin(900.0)
    assert len(content) == 0


def test_an_undecodable_message_is_a_loss() -> None:
    """What it said is unknown, and may have been a removal."""
    sent, _ = messages(5)
    fold, content = blocks()
    feed = Feed(fold)
    feed.offer(0, sent[0])
    assert feed.offer(1, b"\xc1") is None
    assert (len(content), feed.undecodable, feed.next) == (0, 1, 2)


# --- bounds ---------------------------------------------------------------------------------------------------


def test_books_are_bounded_and_chains_keep_their_beginnings() -> None:
    """P11: the event-based index grew to hundreds of GB."""
    fold, content = blocks(blocks_max=1000)
    engine = Engine(16)
    for n in range(60):
        fold.fold(batch(engine.stored(prompt(n, 64 * 16))))
        assert len(fold) <= 1000
    assert len(content) <= 250
    left = held(content)
    assert chain(prompt(59, 64 * 16)) <= left
    for n in range(60):
        told = prefix.digests(prompt(n, 64 * 16), KEY)
        known = [told[at : at + 8] in left for at in range(0, len(told), 8)]
        assert known == sorted(known, reverse=True)  # only ends are forgotten
    fold.fold(batch(engine.stored(prompt(99, 16 * 1100))))
    assert len(fold) <= 1000


def test_two_publishers_of_one_instance_share_a_content() -> None:
    """With data parallelism each rank publishes: one rank's clearing must not take the other's blocks away."""
    content = Content()
    one, other = (Blocks(content, Keys(FLEET, SECRET), alone=False) for _ in range(2))
    tokens = prompt(1, 128)
    one.fold(batch(Engine(16).stored(tokens)))
    other.fold(batch(Engine(16).stored(tokens)))
    one.fold(batch({"type": "AllBlocksCleared"}))
    assert held(content) == chain(tokens)
    other.clear()
    assert held(content) == set()


# --- golden captures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "kv-events-8101.jsonl",
        "kv-events-8102.jsonl",
        "kv-events-8102-bytes-cbor.jsonl",
        "kv-events-basic.jsonl",
        "kv-events-restart.jsonl",
        "sglang/kv-events.jsonl",
    ],
)
def test_what_real_engines_sent_is_understood(name: str) -> None:
    """Golden messages of vLLM 0.32.0 and SGLang 0.5.23: every stored prompt becomes its digests."""
    path = CAPTURES / name
    if not path.is_file():
        pytest.skip(f"no captures of real engines at {CAPTURES} (TOKENFLEET_SHARED)")
    fold, content = blocks(SINGLE)
    feed = Feed(fold)
    prompts: dict[Any, list[int]] = {}
    expected: set[bytes] = set()
    for line in path.read_text().splitlines():
        said = json.loads(line)
        events = said["decoded"][1]
        for event in events:
            if event["type"] == "AllBlocksCleared":
                prompts, expected = {}, set()
                continue
            event["block_hashes"] = [
                bytes.fromhex(h["bytes"]) if isinstance(h, dict) else h for h in event["block_hashes"]
            ]
            parent = event["parent_block_hash"]
            parent = event["parent_block_hash"] = bytes.fromhex(parent["bytes"]) if isinstance(parent, dict) else parent
            if event.get("extra_keys") and parent is None:
                event["extra_keys"][0] = [SALT]  # the captures were made without salts
            size, tokens = event["block_size"], [] if parent is None else prompts[parent]
            for at, hash_ in enumerate(event["block_hashes"]):
                prompts[hash_] = tokens = tokens + event["token_ids"][at * size : (at + 1) * size]
            expected |= chain(tokens)
        raw = msgspec.msgpack.encode(said["decoded"])
        if not said["payload_hex"].endswith("..."):
            whole = decode(bytes.fromhex(said["payload_hex"]))
            assert len(whole.events) == len(events)
            assert not whole.unknown
        if feed.next is not None and said["seq"] < feed.next:
            expected = set().union(*(chain(prompts[h]) for event in events for h in event["block_hashes"]))
        gap = feed.offer(said["seq"], raw)
        if gap is not None:
            assert feed.restarts == feed.gaps == 0
            feed.replayed(gap, {})  # SGLang's capture begins at 1
            feed.offer(said["seq"], raw)
    assert feed.blocks.folded
    assert held(content) == expected
    assert set(fold.skipped) <= {"block_size_changed"}
