"""The scorer `predicted-latency` in the whole core, each rule as the incident that it prevents."""

from collections import Counter, deque
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.tokenpilot.driver import Pilot, only

from tokenfleet import prefix
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.settings import Knobs
from tokenfleet.tokenpilot.state import WARM_TOKENS, Load
from tokenfleet_schemas.outcome import Times
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld, PlacementRequested

KEY = b"k" * 32
POLICY = 'placement = "predicted-latency"'


def pilot(instances: int = 2, **limits: Any) -> Pilot:
    """One core with the scorer in question."""
    limits = {"token_budget": 2048, "kv_tokens": 1_000_000, "max_sequences": 256, "policy": POLICY, **limits}
    return Pilot(instances=instances, **limits)


def chained(tokens: int, seed: int = 0) -> dict[str, Any]:
    """Fields of a request whose prompt has so many tokens and a digest chain."""
    packed, stride = prefix.pack(prefix.digests([seed] * tokens, KEY))
    return {"input_tokens": tokens, "prefix": packed, "prefix_stride": stride}


def complete(p: Pilot, assigned: PlacementAssigned, ttft_ms: float, tpot_ms: float = 20.0, **changes: Any) -> None:
    """Its first token and its end, with times as the gateway measures them."""
    p.start(assigned)
    p.finish(assigned, times=Times(queue_ms=0.0, ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=ttft_ms + 500), **changes)


# --------------------------------------------------------------------------------------------- predictions


def test_every_assignment_carries_both_predictions() -> None:
    """P16: without the prediction beside the outcome nobody can see the predictor's error."""
    p = pilot(1)
    assigned = only(p.request("r", input_tokens=1000, elapsed_ms=40), PlacementAssigned)
    assert assigned.predicted_ttft_ms is not None
    assert 40 + 1000 / 10 < assigned.predicted_ttft_ms < 40 + 1000 / 10 + 100  # 10,000 tokens/s declared
    assert assigned.predicted_tpot_ms is not None
    assert assigned.predicted_tpot_ms > 0


@pytest.mark.parametrize("outcome", ["cancelled", "failed", "failed_midstream", "timed_out", "client_stalled"])
def test_cut_answers_teach_nothing(outcome: str) -> None:
    """P16: cancelled requests trained the predictor; impatient clients made an instance look fast."""
    p = pilot(1)
    for n in range(2):
        assigned = only(p.request(f"r{n}"), PlacementAssigned)
        p.start(assigned)
        times = Times(queue_ms=0.0, ttft_ms=9000.0, tpot_ms=900.0, e2e_ms=9999)
        p.finish(assigned, outcome, output_tokens=3, times=times)
    model = p.core.state.models["b-0"]
    assert (model.samples, model.ttft.samples, model.tpot.samples) == (0, 0, 0)
    assert p.core.state.lengths.find("acme", "", "m") is None


def test_a_degraded_card_is_noticed_and_gets_less() -> None:
    """P16: one card fell to a third of its speed; it kept its share of requests and nobody was told."""
    p, late = pilot(3, token_budget=16_384), Counter[str]()
    for n in range(400):
        assigned = only(p.request(f"r{n}", input_tokens=4000), PlacementAssigned)
        late[assigned.instance] += n >= 300
        slow = 3.0 if assigned.instance == "b-1" and n >= 100 else 1.0
        complete(p, assigned, slow * (15 + 4000 / 10), output_tokens=20)
        p.now_ms += 500
        if n % 10 == 0:
            p.report_all()
    errors = {dict(labels)["instance"]: error for labels, error in p.core.gauges()["prediction_error"].items()}
    assert errors["b-1"] > 3 * max(errors["b-0"], errors["b-2"])
    assert late["b-1"] < 10 < min(late["b-0"], late["b-2"]), late
    last = only(p.request("last", input_tokens=4000), PlacementAssigned)
    terms = {one.name: one.terms for one in last.candidates}
    assert terms["b-1"]["total_ms"] > 1.02 * terms["b-0"]["total_ms"]
    assert last.instance != "b-1"


def test_standbys_learn_what_the_owner_learns() -> None:
    """A standby that took over predicted as on the first day."""
    owner, standby = pilot(2), pilot(2, elected=False)
    for n in range(20):
        said = owner.request(f"r{n}", input_tokens=3000)
        standby.request(f"r{n}", input_tokens=3000)
        for event in said:
            standby.hear(event)
        assigned = only(said, PlacementAssigned)
        for p in (owner, standby):
            complete(p, assigned, 500.0 + 10 * n)
    for name, model in owner.core.state.models.items():
        assert standby.core.state.models[name].ttft.multiples == pytest.approx(model.ttft.multiples)
    standby.core.restore(owner.core.snapshot())
    assert standby.core.state.models == owner.core.state.models


# --------------------------------------------------------------------------------------------- choice


def test_the_queue_moves_on_between_two_signs_of_life() -> None:
    """P04: choices between two reports saw the queue of the last one, as if the engine had stood still."""
    p = pilot(1, token_budget=8192)
    only(p.request("long", input_tokens=8000), PlacementAssigned)
    waits = []
    for n in range(4):
        situation, (candidate,) = p.core._consider(*_peek(p, f"q{n}"), p.now_ms)
        assert situation.able == 1
        waits.append(candidate.terms["wait_ms"])
        p.now_ms += 300.0
    assert waits[0] > 700
    assert waits[0] - waits[1] == pytest.approx(300, rel=0.15)
    assert waits[3] < 50, "800 ms of prefill are over by then"


def _peek(p: Pilot, request_id: str) -> tuple[PlacementRequested, Any]:
    from tests.unit.tokenpilot.driver import ask

    from tokenfleet.tokenpilot.state import Waiting

    request = PlacementRequested(id=request_id, site="b", ask=ask(request_id))
    return request, Waiting(request, p.now_ms)


def test_affinity_ends_where_waiting_costs_more_than_the_prefill_saved() -> None:
    """P07: affinity was dropped at a fixed imbalance, or never: the switch must be where the sums are equal, once."""
    homes = []
    for queued in range(0, 130_000, 4000):
        p = pilot(2, token_budget=1 << 20)
        first = only(p.request("warm", **chained(15_000)), PlacementAssigned)
        p.start(first)
        p.finish(first)
        other = "b-1" if first.instance == "b-0" else "b-0"
        if queued:
            one = only(p.request("queue", input_tokens=queued, excluded=(other,)), PlacementAssigned)
            assert one.instance == first.instance
        last = only(p.request("r", ttft_ms=600_000, **chained(15_016)), PlacementAssigned)
        homes.append(last.instance == first.instance)
    switch = homes.index(False)
    assert all(homes[:switch])
    assert not any(homes[switch:]), "one switch, no way back"
    # Elsewhere 15,000 tokens are 1.5 s of prefill and more of attention, of which each second costs 1 + mu.
    assert 40_000 <= 4000 * switch <= 90_000


def test_a_hot_prefix_spreads_before_it_queues_for_long() -> None:
    """P07: one prompt at three times an instance's capacity; the router kept sending it to the same one."""
    p = pilot(4, token_budget=8192)
    got: Counter[str] = Counter()
    waiting: list[tuple[float, PlacementAssigned]] = []
    free: dict[str, float] = {}
    asked: dict[str, float] = {}
    took: dict[str, float] = {}
    for n in range(450):  # for 30 s: 15 requests/s of 2,000 tokens beyond a shared 30,000
        p.now_ms += 1000 / 15
        asked[f"r{n}"] = p.now_ms
        for at, done in [w for w in waiting if w[0] <= p.now_ms]:
            waiting.remove((at, done))
            took[done.request_id] = at - asked[done.request_id]
            for event in [*complete_all(p, done), *p.wake()]:
                enqueue(p, event, waiting, free, got)
        for event in p.request(f"r{n}", ttft_ms=5000, patience_ms=60_000, **hot(n)):
            enqueue(p, event, waiting, free, got)
        if n % 20 == 0:
            p.report_all()
            p.lease(n, *(f"r{k}" for k in range(n + 1)))
    assert len([name for name, count in got.items() if count >= 10]) >= 3, got
    so_far = sorted(took.get(name, p.now_ms - at) for name, at in asked.items())
    assert so_far[int(0.95 * len(so_far))] < 5000, "what its class is promised"


def hot(n: int) -> dict[str, Any]:
    """30,016 shared tokens and 1,984 of its own."""
    packed, stride = prefix.pack(prefix.digests([7] * 30_016 + [n] * 1984, KEY))
    return {"input_tokens": 32_000, "prefix": packed, "prefix_stride": stride}


def complete_all(p: Pilot, assigned: PlacementAssigned) -> list[Any]:
    """What is said when it completes."""
    said = p.start(assigned)
    return said + p.finish(assigned)


def enqueue(
    p: Pilot, event: Any, waiting: list[tuple[float, PlacementAssigned]], free: dict[str, float], got: Counter[str]
) -> None:
    """An engine that prefills 10,000 tokens/s one after the other."""
    if isinstance(event, PlacementAssigned) and event.request_id not in free:  # it may be said again
        free[event.request_id] = 0.0
        got[event.instance] += 1
        at = max(free.get(event.instance, 0.0), p.now_ms) + event.work.prefill_tokens / 10.0
        free[event.instance] = at
        waiting.append((at, event))


def test_a_hold_for_its_prefix_waits_for_its_home_and_closes_no_other() -> None:
    """Everybody held waited for any room, so at load each lost its cache, and the load grew by what was lost."""
    p = pilot(2, token_budget=8192)
    first = only(p.request("warm", **chained(30_016)), PlacementAssigned)
    p.start(first)
    p.finish(first)
    home, other = first.instance, "b-1" if first.instance == "b-0" else "b-0"
    p.report_all()
    only(p.request("busy", input_tokens=16_000, excluded=(other,)), PlacementAssigned)
    held = only(p.request("again", ttft_ms=60_000, **chained(32_000)), PlacementHeld)
    assert held.bound
    assert held.home_instance == home
    newcomer = only(p.request("new", input_tokens=500), PlacementAssigned)
    assert newcomer.instance == other
    for _ in range(10):
        p.now_ms += 1100
        said = [*p.report(home, ready=False), *p.report(other), *p.wake()]
        again = [e for e in said if isinstance(e, PlacementHeld) and e.request_id == "again"]
        if again:
            assert again[0].home_instance == other
            assert again[0].turn > held.turn
            assert again[0].id != held.id
            break
    else:
        pytest.fail("bound for ever to an instance that is gone")


def test_a_restarted_instance_is_started_slowly() -> None:
    """A cold instance with an empty queue drew every newcomer, and each of them paid for its empty cache."""
    p = pilot(10, token_budget=8192)
    for name in p.engines:
        p.core.state.load(name).first_tokens = 100
    p.engines["b-3"].incarnation = "2"
    p.report("b-3")
    got: Counter[str] = Counter()
    for n in range(60):
        assigned = only(p.request(f"r{n}", input_tokens=100), PlacementAssigned)
        got[assigned.instance] += 1
        p.finish(assigned, "cancelled")
    assert got["b-3"] <= 4, got
    for n in range(WARM_TOKENS):
        p.request(f"w{n}", input_tokens=100, excluded=tuple(i for i in p.engines if i != "b-3"))
        complete(p, only(p.said[-1:], PlacementAssigned), 30.0)
    assert p.core.state.load("b-3").warmth(p.now_ms) == 1.0


def test_look_ahead_grows_where_the_engine_runs_dry_and_shrinks_again() -> None:
    """A fixed look-ahead was too little for a far gateway and too much for a near one."""
    load, knobs, now_ms = Load(), Knobs(), 0.0

    def feed(count: int, every_ms: float, *, starved: bool) -> float:
        nonlocal now_ms
        for _ in range(count):
            now_ms += every_ms
            load.feed(starved, now_ms, knobs)
        return load.lookahead(knobs)

    assert feed(100, 2000.0, starved=True) == 1.0, "40 ms lost of 2 s: not worth a queue that nobody can reorder"
    assert feed(30, 200.0, starved=True) > 1.0, "a fifth of the time is"
    assert feed(200, 200.0, starved=True) == knobs.lookahead_max
    assert feed(50 * knobs.lookahead_patience, 200.0, starved=False) == 1.0


# ------------------------------------------------------------------------------------------- many at a slow pace


def test_kv_that_sessions_share_holds_nobody_back() -> None:
    """Agents began alike for 24,000 of 30,000 tokens; requests were held for KV that no engine was short of."""
    p = pilot(1, kv_tokens=20_000)
    for n in range(60):
        p.start(only(p.request(f"r{n}", output_budget_tokens=20), PlacementAssigned))
        p.report("b-0", running=n + 1, waiting=0, kv_usage=(800 + 100 * n) / 20_000)
    load = p.core.state.load("b-0")
    assert load.kv_tokens > 3 * 20_000, "as if each had all of its own"
    assert load.kv_tokens_expected < 10_000


def test_kv_that_is_not_shared_any_more_is_believed_at_once() -> None:
    """What sessions share was learned over minutes; unlearned as slowly, an engine is filled until it recomputes."""
    p = pilot(1, kv_tokens=20_000)
    for n in range(16):
        p.start(only(p.request(f"r{n}", output_budget_tokens=20), PlacementAssigned))
        p.report("b-0", running=n + 1, waiting=0, kv_usage=(800 + 100 * n) / 20_000)
    shared = p.core.state.load("b-0").kv_share
    p.report("b-0", running=16, waiting=0, kv_usage=0.8)
    load = p.core.state.load("b-0")
    assert shared < 0.5
    assert load.kv_tokens_expected >= 16_000
    only(p.request("more", input_tokens=4_500, output_budget_tokens=20), PlacementHeld)


def test_who_shares_is_not_known_of_those_that_have_not_begun() -> None:
    """A hundred sessions share their beginning; a burst of prompts that share nothing was booked as if it did."""
    p = pilot(1, kv_tokens=20_000, token_budget=1 << 20)
    for n in range(16):
        p.start(only(p.request(f"r{n}", output_budget_tokens=20), PlacementAssigned))
        p.report("b-0", running=n + 1, waiting=0, kv_usage=(800 + 100 * n) / 20_000)
    before = p.core.state.load("b-0").kv_tokens_expected
    only(p.request("burst", input_tokens=10_000, output_budget_tokens=20), PlacementAssigned)
    assert p.core.state.load("b-0").kv_tokens_expected >= before + 0.6 * 10_000


def remembered(p: Pilot, name: str, tokens: int, seed: int) -> None:
    """A prompt that only one instance has computed."""
    others = tuple(other for other in p.engines if other != name)
    first = only(p.request(f"warm {name}", excluded=others, **chained(tokens, seed)), PlacementAssigned)
    p.start(first)
    p.finish(first)


def test_the_pace_is_what_it_will_be_when_all_have_begun() -> None:
    """Only decoding sequences counted: the next ones all went where few decoded and twenty were about to."""
    p = pilot(2, token_budget=1 << 16)
    for name, seed in (("b-0", 1), ("b-1", 2)):
        remembered(p, name, 15_008, seed)
    for n in range(20):
        assert only(p.request(f"soon{n}", **chained(15_024, 1)), PlacementAssigned).instance == "b-0"
    for n in range(6):
        one = only(p.request(f"runs{n}", **chained(15_024, 2)), PlacementAssigned)
        assert one.instance == "b-1"
        p.start(one)
    request, waiting = _peek(p, "next")
    request = msgspec.structs.replace(request, ask=msgspec.structs.replace(request.ask, tpot_ms=45, input_tokens=20))
    terms = {one.name: one.terms for one in p.core._consider(request, waiting, p.now_ms)[1]}
    assert terms["b-0"]["tpot_ms"] > 60 > 45 > terms["b-1"]["tpot_ms"] > 35
    assert terms["b-0"]["cost_ms"] > terms["b-1"]["cost_ms"]


def test_those_that_wait_for_an_instance_are_in_its_batch() -> None:
    """Sixteen waited for the instance with the fewest decodes, each as if it were the only one; others stood idle."""
    p = pilot(2, token_budget=2048)
    remembered(p, "b-0", 15_008, 1)
    for name in p.engines:
        others = tuple(other for other in p.engines if other != name)
        only(p.request(f"busy {name}", input_tokens=6_000, excluded=others), PlacementAssigned)
    paces = []
    for n in range(6):
        held = only(p.request(f"r{n}", ttft_ms=60_000, tpot_ms=200, **chained(16_016, 1)), PlacementHeld)
        assert held.bound
        assert held.home_instance == "b-0"
        candidates = p.core._consider(*_peek(p, "next"), p.now_ms)[1]
        paces.append({one.name: one.terms["tpot_ms"] for one in candidates})
    assert [one["b-1"] for one in paces] == pytest.approx([paces[0]["b-1"]] * 6)
    steps = np.diff([one["b-0"] for one in paces])
    assert steps == pytest.approx([steps[0]] * 5)
    assert steps[0] > 0.2, "0.1 ms for the sequence and 0.15 ms for its thousand tokens"


def test_where_all_are_slow_nobody_waits_for_the_least_slow() -> None:
    """Each answer cost what it came too slowly, without end: 5 ms a token outweighed seconds of waiting elsewhere."""
    p = pilot(2, token_budget=1 << 16)
    for n in range(40):
        for name, tokens in (("b-0", 5_000), ("b-1", 1_500)):
            others = tuple(other for other in p.engines if other != name)
            p.start(only(p.request(f"{name} {n}", input_tokens=tokens, excluded=others), PlacementAssigned))
    only(p.request("queue", input_tokens=14_000, excluded=("b-0",)), PlacementAssigned)
    request, waiting = _peek(p, "next")
    request = msgspec.structs.replace(request, ask=msgspec.structs.replace(request.ask, tpot_ms=20, ttft_ms=60_000))
    terms = {one.name: one.terms for one in p.core._consider(request, waiting, p.now_ms)[1]}
    assert terms["b-0"]["tpot_ms"] - 4 > terms["b-1"]["tpot_ms"] > 2 * 20, "both are, one less so"
    assert terms["b-1"]["wait_ms"] > 1000 > terms["b-0"]["wait_ms"]
    assert terms["b-0"]["cost_ms"] < terms["b-1"]["cost_ms"]


# --------------------------------------------------------------------------------------------- columns


def test_columns_say_what_rows_say() -> None:
    """Two ways to reckon the same room: sooner or later they differ, and requests bounce between them."""
    dice = np.random.default_rng(7)
    p = pilot(12, max_sequences=6, kv_tokens=60_000)
    p.core.state.load("b-4").breaker.opened_ms = p.now_ms
    running: list[PlacementAssigned] = []
    for n in range(150):
        said = p.request(f"r{n}", input_tokens=int(dice.integers(10, 6000)), output_budget_tokens=200)
        running += [e for e in said if isinstance(e, PlacementAssigned)]
        if running and n % 2:
            one = running.pop(int(dice.integers(len(running))))
            p.start(one)
            if n % 3:
                p.finish(one)
        p.now_ms += float(dice.integers(0, 60))
        if n % 9 == 0:
            p.report(f"b-{n % 12}", running=int(dice.integers(0, 7)), kv_usage=float(dice.random()))
        situation, candidates = p.core._consider(*_peek(p, f"q{n}"), p.now_ms)
        assert situation.board is not None
        for candidate in candidates:
            if not candidate.out:
                assert candidate.lacks == p.core._room(candidate.name, p.now_ms).lacks(candidate.work), candidate.name
        assert [c.out for c in candidates if c.name == "b-4"] == ["breaker"] or p.core.state.load(
            "b-4"
        ).breaker.opened_ms


def test_a_newcomer_is_at_once_taken_for_what_its_equals_were_found_to_be() -> None:
    """What one instance taught of its kind was in no column of the others before somebody touched them."""
    p = pilot(3)
    p.request("first")  # columns are made
    teacher = only(p.request("r", input_tokens=1500), PlacementAssigned)
    complete(p, teacher, 600.0)
    others = [name for name in p.engines if name != teacher.instance]
    board = p.core._boards["m"]
    assert not board.dirty, "the next request would wait for it"
    for name in others:
        assert board.token_ms[board.row[name]] == p.core.state.models[teacher.instance].ttft.coefficients()[1]


def test_a_large_pool_names_the_cheapest_only_and_chooses_as_if_it_named_all() -> None:
    """A thousand candidates in every decision: 200 kB a message."""
    p = pilot(60, token_budget=4096)
    for n in range(100):
        p.request(f"r{n}", input_tokens=100 + 37 * n)
    request, waiting = _peek(p, "q")
    request = msgspec.structs.replace(request, excluded=("b-7",))
    situation, some = p.core._consider(request, waiting, p.now_ms, only="b-7")
    assert len(some) <= p.core.knobs.shortlist + 1
    assert [c.out for c in some if c.name == "b-7"] == ["excluded"]
    p.core._everybody = True
    everybody = p.core._consider(request, waiting, p.now_ms)[1]
    assert len(everybody) == 60
    able = [c for c in everybody if not c.out]
    chosen = policy.home_or_room(situation, [c for c in some if not c.out])
    assert chosen is not None
    assert chosen.name == min((c for c in able if not c.lacks), key=policy.preference).name


# --------------------------------------------------------------------------------------------- taking over


def test_a_standby_takes_over_in_a_burst_with_the_same_view() -> None:
    """P05: a replica with a view of its own chose blind to the others' choices, and all of them chose the same."""
    owner, standby = pilot(6, token_budget=65_536), pilot(6, token_budget=65_536, elected=False)
    answered: dict[str, str] = {}
    for n in range(300):
        name, tokens = f"r{n}", 500 + 37 * (n % 50)
        for p in (owner, standby):
            p.now_ms += 500 / 300
        said = owner.request(name, input_tokens=tokens) if n < 150 else []
        said += standby.request(name, input_tokens=tokens)
        if n == 170:  # twenty requests have come since the owner died
            said += standby.take_office(2)
        for event in said:
            assert isinstance(event, PlacementAssigned)
            assert event.request_id not in answered
            answered[event.request_id] = event.instance
            if n < 150:
                standby.hear(event)
        if n == 149:
            assert standby.core.gauges() == owner.core.gauges()
    assert len(answered) == 300
    sequences = [standby.core.state.load(name).sequences for name in standby.engines]
    tokens_of = [standby.core.state.load(name).prefill_tokens for name in standby.engines]
    assert sum(sequences) == 300
    assert max(sequences) / (sum(sequences) / 6) < 1.4, sequences
    assert max(tokens_of) / (sum(tokens_of) / 6) < 1.4, tokens_of


def throttled(requests: int, slow: range) -> tuple[Pilot, list[str]]:
    """Three cards, of which the second is three times as slow for some requests; and where each request went."""
    p, went, open_ = pilot(3, token_budget=16_384), [], deque[PlacementAssigned]()
    for n in range(requests):
        open_.append(only(p.request(f"r{n}", input_tokens=4000, ttft_ms=5000), PlacementAssigned))
        went.append(open_[-1].instance)
        if len(open_) > 2:
            done = open_.popleft()
            factor = 3.0 if done.instance == "b-1" and n in slow else 1.0
            complete(p, done, factor * (15 + 4000 / 10), output_tokens=20)
        p.now_ms += 300
        if n % 10 == 0:
            p.report_all()
    return p, went


def test_a_card_that_has_recovered_is_tried_again() -> None:
    """A card throttled for a minute was never asked again: its prediction could not be refuted without a request."""
    _, went = throttled(1200, range(200, 400))
    before, throttled_, after = went[:200].count("b-1"), went[200:400].count("b-1"), went[1000:].count("b-1")
    assert throttled_ < 0.6 * before
    assert after > 0.8 * before, (before, throttled_, after)


def test_no_request_is_late_for_the_sake_of_a_trial() -> None:
    """A trial must not cost anybody its objective: only who would be in time on the slow card as it was goes there."""
    p, _ = throttled(500, range(100, 500))
    model = p.core.state.models["b-1"]
    assert model.slowness > 1.5 * p.core.state.models["b-0"].slowness, "else there is nothing to fear"
    p.now_ms += 2 * p.core.knobs.retry_ms
    p.report_all()
    for n in range(12):
        tight = only(p.request(f"tight{n}", input_tokens=4000, ttft_ms=600), PlacementAssigned)
        assert tight.instance != "b-1"
        complete(p, tight, 415)
    easy = [only(p.request(f"easy{n}", input_tokens=4000, ttft_ms=9000), PlacementAssigned) for n in range(6)]
    assert "b-1" in {one.instance for one in easy}
