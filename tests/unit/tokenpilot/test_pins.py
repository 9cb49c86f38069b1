"""KV that sequences hold in common: counted once, whoever comes and goes first."""

import random

import msgspec
import numpy as np
import pytest
from tests.unit.tokenpilot.driver import Pilot, only
from tests.unit.tokenpilot.test_predicted_latency import _peek, chained, pilot

from tokenfleet import prefix
from tokenfleet.tokenpilot.pins import Pins
from tokenfleet.tokenpilot.prefix_index import PrefixIndex, chain_of
from tokenfleet_schemas.placement import PlacementAssigned

KEY = b"k" * 32


def chain(tokens: int, seed: int = 0, branch: int = 0) -> tuple[np.ndarray, int]:
    """Digests and stride of a prompt; prompts of one seed begin alike, up to their last 640 tokens if of branches."""
    content = [seed] * (tokens - 640) + [seed + 1000 * branch] * 640
    packed, stride = prefix.pack(prefix.digests(content, KEY))
    found = Pilot().core._chain(
        msgspec.structs.replace(_peek(Pilot(), "r")[0].ask, prefix=packed, prefix_stride=stride)
    )
    return found, stride


def test_what_two_hold_in_common_counts_once_until_the_last_of_them_ends() -> None:
    """The first turn ended while the second was decoding: its blocks stay where the second refers to them."""
    pins = Pins(PrefixIndex(1000))
    first, stride = chain(6400)
    second, stride2 = chain(6400, branch=1)
    assert stride == stride2 == 1
    pins.pin("a", "i", first, stride)
    assert pins.shared_tokens("i") == 0
    pins.pin("b", "i", second, stride)
    assert pins.shared_tokens("i") == 6400 - 640
    found = pins.column(second, stride)
    assert found is not None
    assert found.tolist() == [6400.0]
    pins.unpin("a")
    assert pins.shared_tokens("i") == 0, "one is left: nothing is there twice"
    found = pins.column(first, stride)
    assert found is not None
    assert found.tolist() == [6400.0 - 640]
    pins.unpin("b")
    pins.unpin("b")
    assert pins.column(first, stride) is None
    assert len(pins) == 0


def test_sums_are_those_of_a_look_at_every_digest_in_any_order() -> None:
    """Counts that go up and down in another order drift: after a day an instance seemed to have KV for nobody."""
    dice = random.Random(3)
    pins = Pins(PrefixIndex(100_000))
    chains = {}
    for seed in range(4):
        for branch in range(3):
            chains[seed, branch] = chain(1280 + 640 * seed, seed, branch)[0]
    open_: dict[str, tuple[str, np.ndarray]] = {}
    for n in range(600):
        if open_ and dice.random() < 0.5:
            name = dice.choice(sorted(open_))
            pins.unpin(name)
            del open_[name]
        else:
            open_[f"r{n}"] = dice.choice("ij"), chains[dice.choice(sorted(chains))]
            pins.pin(f"r{n}", *open_[f"r{n}"], 1)
        for instance in "ij":
            held = [digests for where, digests in open_.values() if where == instance]
            total = sum(len(digests) for digests in held)
            distinct = len({digest for digests in held for digest in digests.tolist()})
            assert pins.shared_tokens(instance) == 64 * (total - distinct)
    for name in list(open_):
        pins.unpin(name)
    assert pins.shared_tokens("i") == pins.shared_tokens("j") == len(pins) == 0
    assert not pins._held
    assert pins._index.known == 0


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_strides_may_differ(order: tuple[int, int]) -> None:
    """A prompt grew, its digests stand for twice as many tokens: never more in common than there is."""
    pins = Pins(PrefixIndex(100_000))
    fine = chain(6400)[0]
    of = {1: fine, 2: fine[1::2]}
    for n, stride in enumerate(order):
        pins.pin(f"r{n}", "i", of[stride], stride)
    assert 0 <= pins.shared_tokens("i") <= 6400
    found = pins.column(of[2], 2)
    assert found is not None
    assert found.tolist() == [6400.0]
    pins.unpin("r0")
    assert pins.shared_tokens("i") == 0
    pins.unpin("r1")
    assert pins.column(fine, 1) is None


def test_a_prompt_that_says_a_digest_twice_holds_it_once() -> None:
    """A foreign publisher repeated a digest; the second count was never taken back."""
    pins = Pins(PrefixIndex(1000))
    digests = chain_of(np.array([5, 6, 5, 7], np.uint64).tobytes())
    pins.pin("a", "i", digests, 1)
    pins.pin("a", "i", digests, 1)
    assert pins.shared_tokens("i") == 0
    pins.unpin("a")
    assert pins._index.known == len(pins) == 0


def test_the_next_turn_fits_where_the_last_one_is_still_decoding() -> None:
    """A conversation's next turn came while its last was being answered: 80,000 tokens, all there, found no room for
    themselves a second time; they were computed anew elsewhere. Two thirds of the hits of a day were lost so."""
    p = pilot(2, kv_tokens=100_000, token_budget=1 << 17)
    first = only(p.request("turn 1", output_budget_tokens=200, **chained(80_000)), PlacementAssigned)
    p.start(first)
    again = only(p.request("turn 2", output_budget_tokens=200, **chained(80_064)), PlacementAssigned)
    assert again.instance == first.instance
    assert again.work.kv_tokens > 80_000
    assert again.work.own_kv_tokens < 1_000
    assert p.core.state.load(first.instance).kv_tokens_expected < 82_000
    p.start(again)
    p.finish(first)
    load = p.core.state.load(first.instance)
    assert 80_000 < load.kv_tokens_expected < 82_000, "what the first brought is the second's now"
    p.finish(again)
    assert load.kv_tokens_expected == load.shared_kv_tokens == load.unstarted_shared == len(p.core.pins) == 0


def test_what_is_cached_but_not_used_needs_room() -> None:
    """Blocks that nobody refers to are free room: who hits them occupies them."""
    p = pilot(1, kv_tokens=100_000, token_budget=1 << 17)
    first = only(p.request("turn 1", output_budget_tokens=200, **chained(80_000)), PlacementAssigned)
    p.start(first)
    p.finish(first)
    again = only(p.request("turn 2", output_budget_tokens=200, **chained(80_064)), PlacementAssigned)
    assert again.prefix_hit_tokens > 79_000
    assert again.work.shared_kv_tokens == 0


def test_a_standby_and_a_core_that_was_restored_count_alike() -> None:
    """A standby had not seen what its owner shares; a restored one sees it of what comes after."""
    owner, standby = pilot(2, kv_tokens=100_000), pilot(2, kv_tokens=100_000, elected=False)
    for n in range(4):
        said = owner.request(f"r{n}", output_budget_tokens=200, ttft_ms=60_000, **chained(1_000 + 64 * n))
        standby.request(f"r{n}", output_budget_tokens=200, ttft_ms=60_000, **chained(1_000 + 64 * n))
        for event in said:
            standby.hear(event)
        for p in (owner, standby):
            p.start(only(said, PlacementAssigned))
    for name in owner.engines:
        assert standby.core.state.load(name).shared_kv_tokens == owner.core.state.load(name).shared_kv_tokens
    assert sum(load.shared_kv_tokens for load in owner.core.state.loads.values()) > 2_000
    standby.core.restore(owner.core.snapshot())
    assert not any(load.shared_kv_tokens for load in standby.core.state.loads.values())
    for event in [e for e in owner.said if isinstance(e, PlacementAssigned)]:
        owner.finish(event)
        standby.finish(event)
    for p in (owner, standby):
        assert len(p.core.pins) == 0
        assert not any(load.kv_tokens_expected for load in p.core.state.loads.values())
