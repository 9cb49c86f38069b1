"""What operators reported of routers, at the size that they reported it: bursts, aborts, restarts, days of churn."""

import random
import statistics
import time
from collections import Counter

import msgspec
import numpy as np
import pytest
from tests.unit.tokenpilot.driver import Pilot, only
from tests.unit.tokenpilot.test_predicted_latency import chained

from tokenfleet import prefix
from tokenfleet.tokenpilot import fold
from tokenfleet.tokenpilot.prefix_index import PrefixIndex, chain_of
from tokenfleet_schemas.outcome import Times
from tokenfleet_schemas.placement import PlacementAssigned

PLACEMENTS = pytest.mark.parametrize("placement", ["predicted-latency", "least-work"])


def pilot(instances: int, placement: str, **limits: object) -> Pilot:
    """One core with room for everything."""
    roomy = {"token_budget": 1 << 20, "kv_tokens": 100_000_000, "max_sequences": 4096}
    return Pilot(instances=instances, policy=f'placement = "{placement}"', **{**roomy, **limits})


def as_predicted(one: PlacementAssigned) -> Times:
    """The times of an engine that does what was said of it."""
    assert one.predicted_ttft_ms is not None
    return Times(queue_ms=0.0, ttft_ms=one.predicted_ttft_ms, tpot_ms=20.0, e2e_ms=one.predicted_ttft_ms + 400.0)


@PLACEMENTS
def test_aborts_leak_nothing_and_a_restarted_engine_gets_its_part(placement: str) -> None:
    """P01: 400 counts a day leaked from aborted streams; the worker that restarted with zero got every new prefix."""
    dice = random.Random(1)
    p = pilot(10, placement)
    running: list[PlacementAssigned] = []
    for n in range(1500):
        p.now_ms += 20
        running.append(only(p.request(f"r{n}", input_tokens=100 + n % 700), PlacementAssigned))
        if len(running) > 30:
            one = running.pop(dice.randrange(len(running)))
            moment = dice.choice(("before headers", "mid stream", "after the last token"))
            if moment != "before headers":
                p.start(one)
            outcome = "cancelled" if dice.random() < 0.4 or moment == "before headers" else "completed"
            p.finish(one, outcome, times=as_predicted(one))
        if n % 50 == 0:
            p.report_all()
    for one in running:
        p.finish(one, "cancelled")
    p.quiet()
    p.engines["b-3"].incarnation = "2"
    p.report_all()
    got: Counter[str] = Counter()
    for n in range(1000):
        p.now_ms += 20
        one = only(p.request(f"s{n}", **chained(128, seed=n)), PlacementAssigned)
        got[one.instance] += 1
        p.start(one)
        p.finish(one, times=as_predicted(one))
        if n % 50 == 0:
            p.report_all()
    assert 60 <= got["b-3"] <= 140, got
    p.quiet()


@PLACEMENTS
def test_a_second_of_long_prompts_with_one_token_each_is_spread_as_it_comes(placement: str) -> None:
    """P03: 64 prompts of 5 s of prefill in one second all went to one worker: load rose with the first byte only."""
    p = pilot(4, placement)
    got: Counter[str] = Counter()
    for n in range(64):
        p.now_ms += 1000 / 64
        one = only(p.request(f"r{n}", input_tokens=50_000, output_budget_tokens=1, ttft_ms=None), PlacementAssigned)
        got[one.instance] += 1
        assert p.core.state.load(one.instance).sequences == got[one.instance], "booked when it was decided"
    assert all(13 <= got[name] <= 19 for name in p.engines), got


@PLACEMENTS
def test_a_burst_between_two_samples_does_not_follow_the_old_sample(placement: str) -> None:
    """P04: eight at once all saw the same scraped load; a hundred in one scrape period went where one was free."""
    p = pilot(5, placement)
    got = Counter(only(p.request(f"r{n}", input_tokens=500), PlacementAssigned).instance for n in range(100))
    assert all(15 <= got[name] <= 25 for name in p.engines), got
    for _ in range(4):  # newer samples include them: nothing is counted twice
        for name in p.engines:
            p.report(name, running=got[name])
    for name in p.engines:
        load = p.core.state.load(name)
        assert load.sequences + load.foreign_sequences == got[name]


def test_a_third_of_ten_thousand_failing_leaves_no_bookkeeping() -> None:
    """P08: a failure in prefill took from the decode count, and maps per request were never cleared."""
    dice = random.Random(2)
    p = pilot(3, "predicted-latency")
    sizes: list[int] = []
    for n in range(3000):
        p.now_ms += 100
        one = only(p.request(f"r{n}", input_tokens=200), PlacementAssigned)
        where = dice.choice(("connect", "headers", "prefill", "decode", "closing")) if dice.random() < 0.3 else ""
        if where in ("", "decode", "closing"):
            p.start(one)
        outcomes = {"": "completed", "decode": "failed_midstream", "closing": "cancelled"}
        p.finish(one, outcomes.get(where, "failed"))
        for load in p.core.state.loads.values():
            load.breaker.reset()  # failures are the point here, not their instance
            assert min(load.sequences, load.prefill_tokens, load.decoding, load.kv_tokens) >= 0
        if n % 20 == 0:
            p.report_all()
            p.wake()
        if n % 500 == 499:
            sizes.append(len(p.core.snapshot()))
    p.quiet()
    assert max(sizes[3:]) < 1.03 * sizes[2], sizes


def test_instances_that_come_and_go_for_days_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: with a thousand adapters and workers coming and going, index and tasks grew until the process was killed."""
    monkeypatch.setattr(fold, "FORGET_MS", 60_000.0)
    p = pilot(2, "predicted-latency")
    for n in range(300):
        name = f"guest-{n}"
        p.engines[name] = p.engines["b-0"]
        p.revision += 1
        known = p.core.state.view.instances("b")["b-0"].report
        p.hear(msgspec.structs.replace(known, id=f"{name}:{p.revision}", instance=name))
        for k in range(2):
            one = only(p.request(f"r{n}.{k}", **chained(640, seed=2 * n + k)), PlacementAssigned)
            p.start(one)
            p.finish(one)
        del p.engines[name]
        p.now_ms += 3000.0  # longer, and it would be we who were deaf
        p.report_all()
        p.wake()
    core = p.core
    present = set(core.state.view.instances("b"))
    assert 2 < len(present) < 30, "the last of them are not forgotten yet"
    for kept in (core.state.loads, core.state.models, core._offers, core.index._uses, core.index._limits):
        assert set(kept) <= present, kept.keys() - present
    assert core.index.numbers < 40, "bits of the gone are used again"
    assert all(set(board.names) <= present for board in core._boards.values())
    p.quiet()


def test_at_its_cap_the_index_is_bounded_and_quick() -> None:
    """P11: hundreds of GB after a day of 10 req/s with 20,000-token prompts on eight instances, and late answers."""
    dice = np.random.default_rng(3)
    cap, names = 4096, [f"i{n}" for n in range(8)]
    index = PrefixIndex(cap)
    for name in names:
        index.limit(name, None)
    openings = [dice.bytes(8 * 150) for _ in range(40)]
    took = []
    for n in range(1500):  # each prompt half shared; more than ten times what the cap holds goes through
        chain = chain_of(openings[int(dice.integers(40))] + dice.bytes(8 * 162))
        began = time.perf_counter()
        index.hit_column(chain, 1)
        took.append(time.perf_counter() - began)
        index.add(names[n % 8], chain)
        if n == 700:
            half = index.nbytes
    assert len(index) <= 8 * cap
    assert index.nbytes <= 1.2 * half
    assert index.nbytes <= 100 * 8 * cap
    assert statistics.quantiles(took, n=100)[98] < 0.005


def test_another_tenants_salt_makes_another_prompt_of_the_same_words() -> None:
    """P13: keys lacked the salt, so one tenant was sent after another's cache, which the engine does not share."""
    p = pilot(4, "predicted-latency")
    tokens = list(range(4096))

    def ask(name: str, tenant: str) -> PlacementAssigned:
        packed, stride = prefix.pack(prefix.digests(tokens, prefix.tenant_key("a fleet's secret", tenant)))
        one = only(p.request(name, input_tokens=4096, prefix=packed, prefix_stride=stride), PlacementAssigned)
        p.start(one)
        p.finish(one, cached_tokens=one.prefix_hit_tokens)
        return one

    first = ask("a1", "acme")
    again = ask("a2", "acme")
    other = ask("b1", "zeta")
    assert first.prefix_hit_tokens == 0
    assert again.prefix_hit_tokens >= 0.95 * 4096
    assert again.instance == first.instance
    assert other.prefix_hit_tokens == 0
