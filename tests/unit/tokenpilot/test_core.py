"""TokenPilot's rules, each as the incident that it prevents."""

from collections import Counter

import msgspec
import pytest
from tests.simulation.harness import small_fleet
from tests.unit.tokenpilot.driver import KNOBS, SCOPE, Pilot, ask, none_of, only

from tokenfleet import prefix
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementHeld,
    PlacementOwned,
    PlacementRefused,
    PlacementRequested,
)
from tokenfleet_schemas.room import RoomDeclined, RoomOffered


def fill(pilot: Pilot, count: int = 4, tokens: int = 2048) -> list[PlacementAssigned]:
    """Occupy the look-ahead of every instance (two budgets each)."""
    found = [only(pilot.request(f"fill{n}", input_tokens=tokens), PlacementAssigned) for n in range(count)]
    assert {a.how for a in found} == {"room"}
    return found


def held(pilot: Pilot, name: str, **changes: object) -> PlacementHeld:
    return only(pilot.request(name, **changes), PlacementHeld)


def offers(events: list[object]) -> list[RoomOffered]:
    return [event for event in events if isinstance(event, RoomOffered)]


# --------------------------------------------------------------------------------------------- booking


def test_work_is_booked_at_the_decision_moved_at_the_first_token_and_released_at_the_end() -> None:
    """P03: load counted only from the first byte, so a burst of long prompts all went to one worker."""
    pilot = Pilot(instances=1)
    assigned = only(pilot.request("r", input_tokens=1000, output_budget_tokens=50), PlacementAssigned)
    assert (assigned.work.prefill_tokens, assigned.work.decode_tokens, assigned.work.kv_tokens) == (1000, 50, 1050)
    assert pilot.load() == (1, 1000, 1050, 0)
    pilot.start(assigned)
    assert pilot.load() == (1, 0, 1050, 1)
    pilot.start(assigned)  # told twice
    assert pilot.load() == (1, 0, 1050, 1)
    pilot.finish(assigned)
    pilot.finish(assigned)
    assert pilot.load() == (0, 0, 0, 0)
    pilot.quiet()


def test_a_burst_spreads_evenly_and_ties_do_not_go_to_the_first_name() -> None:
    """P03: 64 long prompts in a second; the counter rose late and ties always went to index 0."""
    pilot = Pilot(instances=4, policy='placement = "least-work"', token_budget=65_536, kv_tokens=10_000_000)
    got = Counter(only(pilot.request(f"r{n}", input_tokens=2000), PlacementAssigned).instance for n in range(64))
    assert all(13 <= got[f"b-{n}"] <= 19 for n in range(4)), got
    first = Counter()
    for n in range(200):
        one = Pilot(instances=4)
        first[only(one.request(f"s{n}"), PlacementAssigned).instance] += 1
    assert min(first.values()) > 25, first


def test_eight_requests_at_once_do_not_all_see_the_same_old_sample() -> None:
    """P04: choices used either the scraped load or the local count, so eight at once went to one node."""
    pilot = Pilot(instances=2, token_budget=65_536)
    for _ in range(3):
        pilot.report("b-0", running=0)
        pilot.report("b-1", running=1)
    got = Counter(only(pilot.request(f"r{n}", input_tokens=100), PlacementAssigned).instance for n in range(8))
    assert 3 <= got["b-0"] <= 5, got
    pilot.report("b-0", running=got["b-0"])
    pilot.report("b-1", running=1 + got["b-1"])
    load = pilot.core.state.load("b-0")
    assert load.sequences + load.foreign_sequences == got["b-0"], "a sample that shows ours is not added to ours"
    load = pilot.core.state.load("b-1")
    assert load.sequences + load.foreign_sequences == got["b-1"] + 1


def test_a_hundred_requests_between_two_reports_spread() -> None:
    """P04: bursts were noticed one scrape late."""
    pilot = Pilot(instances=5, token_budget=65_536, max_sequences=256)
    got = Counter(only(pilot.request(f"r{n}", input_tokens=100), PlacementAssigned).instance for n in range(100))
    assert all(15 <= got[f"b-{n}"] <= 25 for n in range(5)), got


def test_a_restarted_engine_does_not_draw_every_newcomer() -> None:
    """P01: leaked counts made a worker that restarted with an honest zero look empty; all new prefixes went there."""
    pilot = Pilot(instances=10, token_budget=8192, max_sequences=256)
    for n in range(500):
        assigned = only(pilot.request(f"r{n}", input_tokens=100), PlacementAssigned)
        if n % 5 < 2:  # aborted: before the headers, in the stream, after the last token
            if n % 3:
                pilot.start(assigned)
            pilot.finish(assigned, "cancelled")
        else:
            pilot.start(assigned)
            pilot.finish(assigned)
    pilot.quiet()
    pilot.engines["b-3"].incarnation = "2"
    pilot.report("b-3")
    got: Counter[str] = Counter()
    for n in range(1000):
        assigned = only(pilot.request(f"s{n}", input_tokens=100), PlacementAssigned)
        got[assigned.instance] += 1
        pilot.finish(assigned)
    assert 60 <= got["b-3"] <= 140, got
    pilot.quiet()


def test_a_restarted_engine_keeps_what_was_booked_there() -> None:
    """An incarnation clears the engine's gauges, never our bookings: they end by their own outcomes."""
    pilot = Pilot(instances=1)
    assigned = only(pilot.request("r"), PlacementAssigned)
    pilot.report("b-0", running=40, waiting=3)
    assert pilot.core.state.load("b-0").foreign_sequences == 0, "one sample may be older than the bookings"
    for _ in range(2):
        pilot.report("b-0", running=40, waiting=3)
    assert pilot.core.state.load("b-0").foreign_sequences == 42
    pilot.engines["b-0"].incarnation = "2"
    pilot.report("b-0", running=0)
    assert pilot.core.state.load("b-0").foreign_sequences == 0
    assert pilot.load()[0] == 1
    pilot.finish(assigned, "failed", final=False)
    assert pilot.load()[0] == 0


@pytest.mark.parametrize("outcome", ["failed", "failed_midstream", "timed_out", "cancelled", "rejected"])
@pytest.mark.parametrize("started", [False, True])
def test_failures_in_every_phase_give_back_the_right_phase(outcome: str, started: bool) -> None:
    """P08: completion ran only on success, and a failure in prefill took from the decode count."""
    pilot = Pilot(instances=1, token_budget=65_536)
    other = only(pilot.request("other", input_tokens=700), PlacementAssigned)
    pilot.start(other)
    assigned = only(pilot.request("r", input_tokens=300), PlacementAssigned)
    if started:
        pilot.start(assigned)
    pilot.finish(assigned, outcome, final=outcome != "failed")
    assert pilot.load() == (1, 0, other.work.kv_tokens, 1)
    pilot.finish(other)
    pilot.quiet()


def test_an_end_before_its_beginning_books_nothing() -> None:
    """Streams overtake each other: `finished` came before our own `assigned` came back, and the booking stayed."""
    pilot = Pilot(instances=1, elected=False)
    owner = Pilot(pilot.fleet)
    assigned = only(owner.request("r"), PlacementAssigned)
    pilot.request("r")
    pilot.finish(assigned)
    pilot.start(assigned)
    pilot.hear(assigned)
    pilot.quiet()


def test_a_start_without_a_booking_books() -> None:
    """The assignment was lost to us; the engine works all the same, and must not look empty."""
    pilot = Pilot(instances=1)
    lost = only(Pilot(pilot.fleet).request("r"), PlacementAssigned)
    pilot.start(lost, kv_tokens=1300)
    assert pilot.load() == (1, 0, 1300, 1)
    pilot.hear(lost)  # it comes late: the same booking
    assert pilot.load() == (1, 0, 1300, 1)
    pilot.finish(lost)
    pilot.quiet()


def test_a_fallback_start_without_any_id_is_booked_and_ended() -> None:
    """A gateway in fallback dispatches without us: booked under its request and attempt."""
    pilot = Pilot(instances=1)
    foreign = only(Pilot(pilot.fleet).request("r"), PlacementAssigned)
    pilot.start(foreign, booking="")
    assert pilot.load()[0] == 1
    pilot.finish(foreign, booking="")
    pilot.quiet()


def test_outcomes_of_other_sites_change_nothing_here() -> None:
    """Outcomes are captured at their entry; only those of our instances count."""
    pilot = Pilot(instances=1)
    assigned = only(pilot.request("r"), PlacementAssigned)
    pilot.start(assigned, request_id="x", instance="c-0", booking="elsewhere")
    assert pilot.load()[0] == 1
    assert "c-0" not in pilot.core.state.loads


# --------------------------------------------------------------------------------------------- repeated questions


def test_a_resubmitted_request_gets_the_same_decision_and_one_booking() -> None:
    """The gateway's time-out resubmitted; the answer to the first was only slow. Two bookings, one dispatch."""
    pilot = Pilot()
    first = only(pilot.request("r"), PlacementAssigned)
    again = only(pilot.request("r", revision=1), PlacementAssigned)
    assert again == first
    assert none_of(pilot.request("r", revision=1), PlacementAssigned), "redelivered: nothing"
    assert none_of(pilot.request("r"), PlacementAssigned), "the older question: nothing"
    assert sum(pilot.load(name)[0] for name in pilot.engines) == 1
    pilot.hear(first)
    pilot.hear(first)
    pilot.finish(first)
    pilot.quiet()


def test_after_a_decline_the_next_revision_is_decided_anew() -> None:
    """A declined assignment is dropped, so a later question must not be answered with it."""
    pilot = Pilot()
    first = only(pilot.request("r"), PlacementAssigned)
    pilot.decline(first)
    pilot.quiet()
    second = only(pilot.request("r", revision=1), PlacementAssigned)
    assert second.id != first.id
    pilot.finish(second)
    pilot.quiet()


def test_the_next_attempt_avoids_the_instance_that_failed() -> None:
    """A retry went back to the instance that had just reset the connection."""
    pilot = Pilot()
    first = only(pilot.request("r"), PlacementAssigned)
    pilot.finish(first, "failed", final=False)
    second = only(pilot.request("r", attempt=2, excluded=(first.instance,)), PlacementAssigned)
    assert second.instance != first.instance
    assert [c.out for c in second.candidates if c.name == first.instance] == ["excluded"]
    assert none_of(pilot.request("r", revision=5), PlacementAssigned), "the first attempt is over"
    pilot.finish(second)
    pilot.quiet()


def test_a_closed_request_is_not_decided_again() -> None:
    """A delayed resubmission booked an instance for a client long gone."""
    pilot = Pilot()
    pilot.finish(only(pilot.request("r"), PlacementAssigned))
    assert pilot.request("r", revision=3) == []
    pilot.quiet()


def test_a_lost_answer_is_said_again() -> None:
    """Plain messages are lost before capture when NATS restarts: the decision existed, nobody knew it."""
    pilot = Pilot(instances=1)
    assigned = only(pilot.request("r", input_tokens=4096), PlacementAssigned)
    waiting = held(pilot, "h")
    assert none_of(pilot.wake(500), PlacementAssigned, PlacementHeld)
    pilot.report_all()
    again = pilot.wake(600)
    assert only(again, PlacementAssigned) == assigned
    assert only(again, PlacementHeld) == waiting
    pilot.hear(assigned)
    pilot.hear(waiting)
    assert none_of(pilot.wake(1100), PlacementAssigned, PlacementHeld), "it came back: enough"


# --------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ready": False, "reason": "unhealthy"}, "not_ready"),
        ({"draining": True}, "draining"),
        ({"version": "2"}, "other_version"),
        ({"version": ""}, "other_version"),
        ({"routable_from": ("us",)}, "not_routable"),
        ({"routable_from": ()}, "not_routable"),
        ({"max_model_len": 1000}, "too_long"),
        ({"kv_tokens_total": 999}, "kv_too_small"),
        ({"endpoint_url": ""}, "no_endpoint"),
        ({"zone": "us"}, "zone_mismatch"),
    ],
)
def test_an_unusable_instance_is_out_for_its_reason(changes: dict[str, object], reason: str) -> None:
    """Each of these was once counted as healthy: the request went there and failed, or another version answered."""
    pilot = Pilot()
    pilot.report("b-0", **changes)
    for n in range(4):
        assigned = only(pilot.request(f"r{n}", input_tokens=1000), PlacementAssigned)
        assert assigned.instance == "b-1"
        assert {c.name: (c.out, c.chosen) for c in assigned.candidates} == {"b-0": (reason, False), "b-1": ("", True)}


def test_an_adapter_request_goes_only_where_the_adapter_is() -> None:
    """P17: the base model answered for an adapter that was not loaded, without an error."""
    pilot = Pilot()
    pilot.report("b-1", adapters=("l",))
    for n in range(6):
        assigned = only(pilot.request(f"r{n}", adapter="l", input_tokens=100), PlacementAssigned)
        assert assigned.instance == "b-1"
    pilot.report("b-1", adapters=())
    waiting = held(pilot, "none", adapter="l")
    assert waiting.lacks == "instance"
    assert {c.out for c in waiting.candidates} == {"no_adapter"}


def test_what_waits_for_an_adapter_whose_only_instance_went_is_refused_or_goes_where_it_was_loaded() -> None:
    """P17: the only instance with an adapter was removed; what waited for it hung, or the base model answered."""
    pilot = Pilot()
    pilot.report("b-1", adapters=("l",))
    pilot.report("b-1", adapters=("l",), ready=False)
    first, second = held(pilot, "first", adapter="l"), held(pilot, "second", adapter="l", patience_ms=60_000)
    assert first.lacks == second.lacks == "instance"
    said = []
    for n in range(8):
        pilot.now_ms += 2000
        said += [*pilot.lease(n, "first", "second"), *pilot.report("b-0"), *pilot.wake()]
    refused = only(said, PlacementRefused)
    assert (refused.request_id, refused.status) == ("first", 503)
    assert none_of(said, PlacementAssigned), "the base model is there and idle all the time"
    said = [*pilot.report("b-0", adapters=("l",)), *pilot.wake()]
    again = [event for event in said if isinstance(event, PlacementHeld | PlacementAssigned)]
    assert [event.request_id for event in again] == ["second"]
    assert isinstance(again[0], PlacementAssigned) or again[0].home_instance == "b-0"


def test_an_old_report_is_no_report() -> None:
    """An agent died; its last word, all well, was believed for minutes. Judged by when it reached us."""
    pilot = Pilot()
    for _ in range(6):
        pilot.now_ms += 2000
        pilot.report("b-1")
    assigned = only(pilot.request("r"), PlacementAssigned)
    assert {c.name: c.out for c in assigned.candidates} == {"b-0": "stale", "b-1": ""}


def test_a_deaf_listener_does_not_call_others_silent() -> None:
    """After a bus restart every instance was stale and every gateway dead, because nobody had been heard."""
    pilot = Pilot()
    assigned = only(pilot.request("r"), PlacementAssigned)
    pilot.lease(1, "r")
    pilot.now_ms += 60_000
    pilot.wake()
    assert pilot.load(assigned.instance)[0] == 1, "deaf: nobody expires"
    pilot.lease(2, "r")
    assert only(pilot.request("s"), PlacementAssigned).instance in pilot.engines, "the last reports hold on"
    pilot.do(pilot.core.resumed(pilot.now_ms))
    assert pilot.load(assigned.instance)[0] >= 1


def test_nothing_is_placed_for_a_tenant_that_may_not_be_here() -> None:
    """F01: a wrong site choice carried the prompt over a border. Silence sends the sender elsewhere."""
    fleet = small_fleet({"c": 2})
    core = TokenPilot(fleet, "c", replica="p0")
    pilot = Pilot()
    pilot.core = core
    pilot.do(core.handle(core.mark("pool:c:m:1", 1, pilot.now_ms), pilot.now_ms))
    event = PlacementRequested(id="r", site="c", ask=ask("r", tenant="local"))
    assert pilot.do(core.handle(event, pilot.now_ms)) == []
    assert pilot.notes[-1].labels == {"reason": "residency"}
    assert not core.state.pools["pool:c:m:1"].waiting


def test_a_request_for_another_site_or_pool_is_not_ours() -> None:
    """A wildcard subscription once made two sites answer one request."""
    pilot = Pilot()
    assert pilot.hear(PlacementRequested(id="x", site="c", ask=ask("x"))) == []
    assert pilot.request("y", version="2") == []
    assert pilot.notes[-1].labels == {"reason": "unknown_pool"}
    pilot.quiet()


# --------------------------------------------------------------------------------------------- holds and room


def test_beyond_the_look_ahead_requests_are_held_and_nothing_is_booked() -> None:
    """Everything was sent to the engines, where a queue of an hour is first come, first served."""
    pilot = Pilot()
    fill(pilot)
    before = [pilot.load(name) for name in pilot.engines]
    waiting = held(pilot, "h", input_tokens=3000)
    assert waiting.lacks == "prefill_tokens"
    assert waiting.home_instance in pilot.engines
    assert waiting.predicted_wait_ms == pytest.approx(410, rel=0.01)
    assert waiting.predicted_own_ms == pytest.approx(300, rel=0.01)
    assert waiting.slack_ms == pytest.approx(995)
    assert waiting.patience_left_ms == 10_000
    assert {c.out for c in waiting.candidates} == {"lacks_prefill_tokens"}
    assert [pilot.load(name) for name in pilot.engines] == before
    assert pilot.held() == 1


def test_a_prompt_larger_than_the_look_ahead_fits_an_idle_instance() -> None:
    """A document of 50k tokens never fitted two chunks of look-ahead and was never served."""
    pilot = Pilot(instances=1, kv_tokens=200_000)
    assert only(pilot.request("big", input_tokens=50_000), PlacementAssigned).how == "room"
    assert held(pilot, "next", input_tokens=50_000).lacks == "prefill_tokens"


def test_room_is_closed_to_newcomers_while_somebody_waits() -> None:
    """Newcomers took each slot as it came free; those that waited first were served last."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "first", input_tokens=4000)
    pilot.start(assigned[0])
    small = held(pilot, "small", input_tokens=10)
    assert small.lacks == "newcomer"


def test_freed_room_is_offered_as_a_level_and_released_into() -> None:
    """The congested road in full: held, first token, offer, release, assigned, next offer names the release."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    one, two = held(pilot, "h1", input_tokens=2000), held(pilot, "h2", input_tokens=2000)
    pilot.now_ms += 300
    offer = only(pilot.start(assigned[0]), RoomOffered)
    assert (offer.prefill_tokens, offer.idle, offer.sequences) == (2048, False, 30)
    assert (offer.last_released, offer.held) == (0, 2)
    assert offer.kv_tokens == 200_000 - sum(a.work.kv_tokens for a in assigned)
    pilot.now_ms += 5
    placed = only(pilot.release(two, 1), PlacementAssigned)
    assert (placed.request_id, placed.how, placed.release_number) == ("h2", "released", 1)
    assert placed.cause == "released:5:1"
    assert pilot.held() == 1
    pilot.now_ms += 300
    offer = only(pilot.start(assigned[1]), RoomOffered)
    assert (offer.last_released, offer.held, offer.prefill_tokens) == (1, 1, 2096)
    placed = only(pilot.release(one, 2), PlacementAssigned)
    pilot.now_ms += 300
    assert none_of(pilot.start(placed), RoomOffered), "nobody waits any more"


def test_offers_that_nothing_fits_are_not_made() -> None:
    """Every end made an offer and every offer a decline: more messages than requests."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "big", input_tokens=4000)
    pilot.now_ms += 300
    assert none_of(pilot.start(assigned[0]), RoomOffered), "2,048 are free, 4,000 wait"
    pilot.now_ms += 300
    assert only(pilot.start(assigned[1]), RoomOffered).idle


def test_a_release_without_room_keeps_the_place_and_says_what_lacks() -> None:
    """The room was gone when the release came (an instance fell ill); the request went to the end of the queue."""
    pilot = Pilot(instances=2)
    fill(pilot)
    first, second = held(pilot, "h1"), held(pilot, "h2")
    again = only(pilot.release(first, 1), PlacementHeld)
    assert (again.request_id, again.after_release, again.lacks) == ("h1", 1, "prefill_tokens")
    assert list(pilot.core.state.pools[SCOPE].waiting) == ["h1", "h2"]
    assert pilot.release(first, 1) == [], "redelivered"
    assert second.after_release == 0


def test_a_released_request_may_go_to_another_instance_with_room() -> None:
    """Room was offered on one instance; when the release came another was better."""
    pilot = Pilot(instances=2)
    assigned = fill(pilot)
    waiting = held(pilot, "h", input_tokens=2000)
    other = "b-1" if waiting.home_instance == "b-0" else "b-0"
    for one in assigned:
        if one.instance == other:
            pilot.start(one)
    placed = only(pilot.release(waiting, 1, instance=waiting.home_instance), PlacementAssigned)
    assert placed.instance == other


def test_a_hold_that_no_instance_can_serve_does_not_close_the_pool() -> None:
    """One request for an adapter that was nowhere made every newcomer wait behind it, release by release."""
    pilot = Pilot(instances=1)
    waiting = held(pilot, "stuck", adapter="l")
    assert (waiting.lacks, waiting.home_instance) == ("instance", "")
    assert waiting.predicted_wait_ms == waiting.patience_left_ms, "nobody knows: never zero"
    assert not offers(pilot.said)
    fill(pilot, 2)
    again = only(pilot.release(waiting, 1), PlacementHeld)
    assert (again.lacks, again.after_release) == ("instance", 1)
    loaded = only(pilot.report("b-0", adapters=("l",)), PlacementHeld)
    assert (loaded.request_id, loaded.lacks, loaded.home_instance) == ("stuck", "prefill_tokens", "b-0")
    assert loaded.id != again.id
    assert held(pilot, "behind").lacks == "newcomer"


def test_holds_of_a_dead_pool_are_placed_when_an_instance_comes_back() -> None:
    """Every engine of a site restarted; what had been held meanwhile was never looked at again."""
    pilot = Pilot(instances=2)
    for name in pilot.engines:
        pilot.report(name, ready=False, reason="unreachable")
    for n in range(5):
        assert held(pilot, f"r{n}", input_tokens=2048).lacks == "instance"
    said = pilot.report("b-0")
    assert [e.request_id for e in said if isinstance(e, PlacementAssigned)] == ["r0", "r1"]
    assert [(e.request_id, e.lacks) for e in said if isinstance(e, PlacementHeld)] == [
        ("r2", "prefill_tokens"),
        ("r3", "newcomer"),
        ("r4", "newcomer"),
    ]


def test_a_withdrawn_declined_or_closed_hold_is_dropped() -> None:
    """Dead holds kept the pool closed to newcomers for ever."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "moved")
    gone = held(pilot, "declined")
    held(pilot, "left")
    pilot.withdraw("moved")
    pilot.decline(gone)
    pilot.finish(assigned[0], "cancelled", request_id="left", attempt=0, instance="", booking="", id="left:0")
    held(pilot, "refused")
    pilot.hear(
        PlacementRefused(
            id="x",
            site="b",
            request_id="refused",
            gateway="gw",
            model="m",
            version="1",
            attempt=1,
            revision=0,
            reason="patience",
            status=503,
        )
    )
    assert pilot.held() == 0
    for one in assigned:
        pilot.finish(one)
    assert only(pilot.request("new"), PlacementAssigned).how == "room"


def test_a_request_that_was_moved_away_can_come_back() -> None:
    """FleetMind moved a hold and moved it back with a higher revision; the tombstone of the move ate it."""
    pilot = Pilot(instances=1)
    fill(pilot, 2)
    held(pilot, "h")
    pilot.withdraw("h")
    assert pilot.held() == 0
    back = only(pilot.request("h", revision=2), PlacementHeld)
    assert back.revision == 2
    assert pilot.withdraw("h", revision=1) == [], "the old withdrawal, redelivered, concerns the old hold"
    assert pilot.held() == 1


def test_unanswered_offers_are_filled_earliest_deadline_first_and_marked() -> None:
    """SLOMax silent: engines ran dry while requests were held."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "relaxed", input_tokens=2000, ttft_ms=9000)
    held(pilot, "urgent", input_tokens=2000, ttft_ms=500)
    pilot.now_ms += 100
    only(pilot.start(assigned[0]), RoomOffered)
    assert min(pilot.wakes[-3:]) <= pilot.now_ms + 200
    assert none_of(pilot.wake(199), PlacementAssigned)
    placed = only(pilot.wake(2), PlacementAssigned)
    assert (placed.request_id, placed.how) == ("urgent", "unanswered")
    assert [n.name for n in pilot.notes].count("offer_unanswered") == 1


def test_a_declined_offer_is_left_alone_until_its_time() -> None:
    """A decline is an answer: filling the room after it took it from what SLOMax had reserved it for."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "h", input_tokens=2000)
    pilot.now_ms += 100
    offer = only(pilot.start(assigned[0]), RoomOffered)
    pilot.echo()
    pilot.hear(
        RoomDeclined(
            id="d", site="b", model="m", version="1", instance="b-0", offer=offer.id, for_ms=900, reason="reserved"
        )
    )
    assert none_of(pilot.wake(500), PlacementAssigned, RoomOffered)
    pilot.report("b-0")
    assert only(pilot.wake(450), RoomOffered).revision == offer.revision + 1
    assert only(pilot.wake(250), PlacementAssigned).how == "unanswered"


def test_what_slomax_forgets_is_refused_here_in_the_end() -> None:
    """Nothing waits for ever: patience ran out while SLOMax was down."""
    pilot = Pilot(instances=1)
    fill(pilot, 2)
    held(pilot, "h", patience_ms=2000)
    pilot.report_all()
    assert none_of(pilot.wake(2000), PlacementRefused)
    pilot.report_all()
    pilot.lease(1, "h", "fill0", "fill1")
    refused = only(pilot.wake(1600), PlacementRefused)
    assert (refused.reason, refused.status, refused.request_id) == ("patience", 503, "h")
    assert pilot.held() == 0


def test_an_instance_that_falls_ill_takes_its_offer_back() -> None:
    """SLOMax kept releasing into an offer of an instance that was not ready any more."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "h", input_tokens=2000)
    pilot.now_ms += 100
    assert only(pilot.start(assigned[0]), RoomOffered).sequences > 0
    pilot.now_ms += 100
    taken = only(pilot.report("b-0", ready=False), RoomOffered)
    assert (taken.sequences, taken.prefill_tokens, taken.kv_tokens, taken.idle) == (0, 0, 0, False)


def test_unknown_kv_capacity_is_never_free() -> None:
    """An engine that did not say its KV size was filled to its sequence limit and preempted without end."""
    pilot = Pilot(instances=1, kv_tokens=0, token_budget=65_536, max_sequences=256)
    for n in range(16):
        assert only(pilot.request(f"r{n}", input_tokens=100), PlacementAssigned)
    assert held(pilot, "h", input_tokens=100).lacks == "sequences"


def test_kv_room_is_what_is_left_of_the_total() -> None:
    """Bookings count at their end, not at their beginning: decode grows into the room."""
    pilot = Pilot(instances=1, kv_tokens=5000, token_budget=65_536)
    only(pilot.request("r", input_tokens=3000, output_budget_tokens=100), PlacementAssigned)
    waiting = held(pilot, "h", input_tokens=1850, output_budget_tokens=100)
    assert (waiting.lacks, waiting.work.kv_tokens) == ("kv_tokens", 1950)


def test_sequences_are_a_limit_too() -> None:
    """max_num_seqs reached, the engine queues in an order of its own."""
    pilot = Pilot(instances=1, max_sequences=2, token_budget=65_536)
    for n in range(2):
        only(pilot.request(f"r{n}", input_tokens=10), PlacementAssigned)
    assert held(pilot, "h", input_tokens=10).lacks == "sequences"


def test_the_wait_for_a_sequence_to_end_is_part_of_the_prediction() -> None:
    """Short prompts, long answers: the predicted wait was zero while every slot was taken for minutes."""
    pilot = Pilot(instances=1, max_sequences=4, token_budget=65_536)
    pilot.finish(only(pilot.request("seen"), PlacementAssigned), output_tokens=100)
    for n in range(4):
        pilot.start(only(pilot.request(f"r{n}", input_tokens=100), PlacementAssigned))
    first = held(pilot, "h1", input_tokens=100)
    second = held(pilot, "h2", input_tokens=100)
    assert first.predicted_wait_ms == pytest.approx(100 * 20 / 4)
    assert second.predicted_wait_ms == pytest.approx(2 * 100 * 20 / 4)


def test_an_unknown_rate_predicts_nothing_and_is_not_fast() -> None:
    """Zero read as a rate gave a TTFT of zero; unknown read as fast drew everything."""
    pilot = Pilot(instances=2, prefill_tokens_per_s=0)
    pilot.engines["b-0"].prefill_tokens_per_s = 0.0
    pilot.report("b-0", prefill_tokens_per_s=None)
    pilot.report("b-1", prefill_tokens_per_s=20_000.0)
    got = [only(pilot.request(f"r{n}", input_tokens=100), PlacementAssigned) for n in range(8)]
    assert {a.predicted_ttft_ms is None for a in got if a.instance == "b-0"} == {True}
    assert all(a.predicted_ttft_ms for a in got if a.instance == "b-1")
    assert Counter(a.instance for a in got)["b-0"] == 4


def test_predictions_are_in_the_assignment() -> None:
    """P16: without the prediction beside the outcome nobody can see the predictor's error."""
    pilot = Pilot(instances=1)
    first = only(pilot.request("r1", input_tokens=1000, elapsed_ms=40), PlacementAssigned)
    assert first.predicted_ttft_ms == pytest.approx(40 + 100 + 5)
    assert first.predicted_tpot_ms is None
    pilot.finish(first)
    second = only(pilot.request("r2", input_tokens=1000), PlacementAssigned)
    assert second.predicted_tpot_ms == 20
    assert second.work.decode_tokens == 20, "the expected output is learned"


# --------------------------------------------------------------------------------------------- breaker


def test_bad_requests_do_not_open_the_breaker() -> None:
    """F11: a hundred over-long prompts (400) took every worker out of service."""
    pilot = Pilot(instances=1)
    for n in range(100):
        outcome = ("rejected", "cancelled", "client_stalled")[n % 3]
        pilot.finish(only(pilot.request(f"r{n}"), PlacementAssigned), outcome)
    assert only(pilot.request("next"), PlacementAssigned).instance == "b-0"


def test_the_breaker_opens_tries_and_closes() -> None:
    """F14: a quarantine that only a request could end, and that no request could reach."""
    pilot = Pilot(instances=1)
    for n in range(3):
        pilot.finish(only(pilot.request(f"r{n}"), PlacementAssigned), "timed_out", final=False)
        if n == 1:
            pilot.finish(only(pilot.request("bad"), PlacementAssigned), "rejected")  # must not end the streak
    waiting = held(pilot, "h", patience_ms=100_000)
    assert {c.out for c in waiting.candidates} == {"breaker"}
    assert waiting.lacks == "instance"
    for n in range(5):
        pilot.now_ms += 1900
        pilot.lease(n + 1, "h", "t2", "t3")
        assert none_of(pilot.report("b-0"), PlacementAssigned)
        pilot.wake()
    pilot.now_ms += 600
    trial = only(pilot.report("b-0"), PlacementAssigned)
    assert (trial.request_id, trial.how) == ("h", "room")
    assert held(pilot, "t2").lacks == "instance", "one trial at a time"
    pilot.finish(trial)
    second = only(pilot.report("b-0"), PlacementAssigned)
    assert second.request_id == "t2"
    pilot.finish(second, "cancelled")  # neutral: the trial is over, but it proved nothing
    third = only(pilot.request("t3"), PlacementAssigned)
    pilot.finish(third)
    assert pilot.core.state.load("b-0").breaker.opened_ms is None
    for n in range(4):
        only(pilot.request(f"after{n}"), PlacementAssigned)


def test_a_breaker_that_nobody_tries_is_closed_in_the_end_and_says_so() -> None:
    """Long closed for want of failures, a breaker was still shown as open: traffic went to another site meanwhile."""
    pilot = Pilot(instances=1)
    for n in range(3):
        pilot.finish(only(pilot.request(f"r{n}"), PlacementAssigned), "failed", final=False)
    shown = {(("instance", "b-0"),): 1.0}
    for _ in range(69):
        pilot.now_ms += 1000
        pilot.report("b-0")
        pilot.wake()
        assert pilot.core.gauges()["breaker_open"] == shown
    pilot.now_ms += 2000
    pilot.report("b-0")
    pilot.wake()
    assert pilot.core.gauges()["breaker_open"] == {(("instance", "b-0"),): 0.0}
    assert pilot.core.state.load("b-0").breaker.failures == 0


def waiting_of(pilot: Pilot, request_id: str) -> PlacementHeld:
    found = pilot.core.state.pools[SCOPE].waiting[request_id].held
    assert found is not None
    return found


# --------------------------------------------------------------------------------------------- leases


def test_two_leases_that_omit_a_request_end_its_booking_and_hold() -> None:
    """A gateway lost `finished` with its process memory; the booking stayed for ever."""
    pilot = Pilot(instances=1)
    assigned = fill(pilot, 2)
    held(pilot, "h")
    pilot.lease(1, "fill0", "h")
    assert pilot.load()[0] == 2, "one lease may have been under way already"
    pilot.lease(1, "fill0", "h")
    assert pilot.load()[0] == 2, "a redelivered lease proves nothing"
    pilot.lease(2, "fill0", "h")
    assert pilot.load()[0] == 1
    assert assigned[1].id not in pilot.core.state.bookings
    pilot.lease(3, "fill0")
    pilot.lease(4, "fill0")
    assert pilot.held() == 0
    pilot.finish(assigned[0])
    pilot.quiet()


def test_a_silent_gateway_or_a_new_incarnation_ends_everything_of_it() -> None:
    """P05: bookings of a killed gateway vanish within ten seconds, at once when its successor speaks."""
    pilot = Pilot(instances=1)
    fill(pilot, 2)
    held(pilot, "h")
    pilot.lease(1, "fill0", "fill1", "h")
    for _ in range(3):
        pilot.now_ms += 2000
        pilot.report_all()
        pilot.wake()
    assert pilot.load()[0] == 2
    pilot.now_ms += 500
    pilot.report_all()
    pilot.wake()
    pilot.quiet()
    fill(pilot, 1)
    pilot.lease(9, "fill0")
    pilot.lease(0, incarnation="2")
    pilot.quiet()


# --------------------------------------------------------------------------------------------- offices


def test_a_standby_folds_everything_and_says_nothing() -> None:
    """Two replicas answered every request: two bookings each, half the capacity."""
    owner, standby = Pilot(), Pilot(elected=False)
    mark = PlacementOwned(id="m", term=1, site="b", scope=SCOPE, owner="other", model="m")
    standby.hear(mark)
    for n in range(8):
        request = PlacementRequested(id=f"q{n}", site="b", ask=ask(f"r{n}", input_tokens=1500))
        said = owner.hear(request)
        standby.hear(request)
        for event in said:
            if not isinstance(event, RoomOffered):
                assert none_of(standby.hear(event), PlacementAssigned, PlacementHeld, RoomOffered)
    standby.wake(1500)
    assert standby.said == []
    assert owner.held() == standby.held() > 0
    assert [owner.load(n) for n in owner.engines] == [standby.load(n) for n in standby.engines]
    assert set(owner.core.state.bookings) == set(standby.core.state.bookings)


def test_a_new_owner_answers_everything_unanswered_once() -> None:
    """The owner died between question and answer; the requests waited for their gateways' time-outs."""
    pilot = Pilot(elected=False)
    for n in range(6):
        pilot.request(f"r{n}", input_tokens=2000)
    assert pilot.said == []
    said = pilot.take_office(7)
    assert [type(e).__name__ for e in said] == ["PlacementAssigned"] * 4 + ["PlacementHeld"] * 2
    assert {e.term for e in said} == {7}
    assert pilot.hear(PlacementOwned(id="again", term=7, site="b", scope=SCOPE, owner="p0", model="m")) == []


def test_a_release_that_the_old_owner_did_not_answer_is_answered_by_the_new() -> None:
    """SLOMax had released; the owner died; SLOMax waited for an answer, the request for both."""
    pilot = Pilot(elected=False, instances=1)
    old = Pilot(pilot.fleet)
    for n in range(3):
        request = PlacementRequested(id=f"q{n}", site="b", ask=ask(f"r{n}", input_tokens=2048))
        pilot.hear(request)
        for event in old.hear(request):
            if not isinstance(event, RoomOffered):
                pilot.hear(event)
    waiting = waiting_of(old, "r2")
    for event in [e for e in old.said if isinstance(e, PlacementAssigned)]:
        pilot.finish(event)
    assert pilot.release(waiting, 1) == []
    placed = only(pilot.take_office(9), PlacementAssigned)
    assert (placed.request_id, placed.how, placed.release_number) == ("r2", "released", 1)


def test_a_decision_after_a_successors_mark_is_void_and_undone() -> None:
    """A paused owner woke up and booked; its successor's mark was in the stream before. Neither may count it."""
    pilot = Pilot(instances=1)
    assigned = only(pilot.request("r"), PlacementAssigned)
    pilot.hear(PlacementOwned(id="m2", term=2, site="b", scope=SCOPE, owner="other", model="m"))
    assert pilot.load()[0] == 1, "it may have been captured before the mark"
    assert pilot.hear(assigned) == []
    assert pilot.load()[0] == 0, "it was not: void"
    assert sum(pilot.core.gauges()["waiting_requests"].values()) == 1, "for the new owner to answer"
    assert pilot.request("s") == []
    again = msgspec.structs.replace(assigned, id="r:assigned:by-other", term=2)
    pilot.hear(again)
    assert pilot.load()[0] == 1
    pilot.finish(again)
    assert pilot.load()[0] == 0


def test_a_decision_before_the_mark_counts() -> None:
    """The same, but the stream had the decision first: undoing it would book the instance twice."""
    pilot = Pilot(instances=1)
    assigned = only(pilot.request("r"), PlacementAssigned)
    pilot.hear(assigned)
    pilot.hear(PlacementOwned(id="m2", term=2, site="b", scope=SCOPE, owner="other", model="m"))
    assert pilot.load()[0] == 1
    pilot.do(pilot.core.resign(SCOPE, pilot.now_ms))
    assert pilot.request("s") == []


def test_commands_of_a_former_fleetmind_or_slomax_are_void() -> None:
    """A fenced leader's late orders moved requests twice."""
    pilot = Pilot(instances=1)
    fill(pilot, 2)
    waiting = held(pilot, "h", input_tokens=2000, term=10)
    assert pilot.request("late", term=9) == []
    assert only(pilot.request("fallback", term=3, fallback="slomax"), PlacementHeld)
    pilot.release(waiting, 1, term=20)
    again = waiting_of(pilot, "h")
    assert pilot.release(again, 2, term=19) == []


# --------------------------------------------------------------------------------------------- round robin, reload


def test_round_robin_takes_usable_instances_in_turn_without_holding() -> None:
    """The baseline: in turn, no look-ahead, the same filters."""
    pilot = Pilot(instances=3, policy='placement = "round-robin"')
    pilot.report("b-1", ready=False)
    got = [only(pilot.request(f"r{n}", input_tokens=4000), PlacementAssigned).instance for n in range(10)]
    assert got == ["b-0", "b-2"] * 5
    assert pilot.held() == 0


def test_least_requests_takes_the_emptiest_without_holding() -> None:
    """What most load balancers do: by open requests alone, whatever the prompts weigh."""
    pilot = Pilot(instances=3, policy='placement = "least-requests"')
    pilot.report("b-1", ready=False)
    got = [only(pilot.request(f"r{n}", input_tokens=4000 if n % 2 else 10), PlacementAssigned) for n in range(10)]
    assert sorted(one.instance for one in got) == ["b-0"] * 5 + ["b-2"] * 5
    for one in got:
        if one.instance == "b-2":
            pilot.finish(one)
    assert only(pilot.request("next"), PlacementAssigned).instance == "b-2"
    assert pilot.held() == 0


def test_a_reload_to_round_robin_places_what_was_held() -> None:
    """`make demo` switches policies on running processes; holds of the old policy were orphans."""
    pilot = Pilot(instances=1)
    fill(pilot, 2)
    for n in range(3):
        held(pilot, f"h{n}")
    said = pilot.do(pilot.core.reconfigure(small_fleet({"b": 1}, policy='placement = "round-robin"'), pilot.now_ms))
    assert [e.request_id for e in said if isinstance(e, PlacementAssigned)] == ["h0", "h1", "h2"]
    assert pilot.held() == 0


# --------------------------------------------------------------------------------------------- checkpoints, prefix


def test_a_restored_checkpoint_decides_as_the_original() -> None:
    """A restart from a checkpoint forgot who waited first."""
    pilot = Pilot()
    assigned = fill(pilot)
    held(pilot, "h1", input_tokens=2000)
    held(pilot, "h2", input_tokens=2000)
    copy = Pilot(elected=False)
    copy.core = TokenPilot(pilot.fleet, "b", replica="p0", knobs=KNOBS)
    copy.core.restore(pilot.core.snapshot())
    copy.said.clear()
    copy.take_office(2)
    assert copy.core.state.bookings == pilot.core.state.bookings
    for one in (pilot, copy):
        one.now_ms += 400
        for booked in assigned[:2]:
            one.start(booked)
        one.release(waiting_of(one, "h2"), 1)
        one.release(waiting_of(one, "h1"), 2)
    placed, same = ([e for e in one.said if isinstance(e, PlacementAssigned)][-2:] for one in (pilot, copy))
    assert [(e.request_id, e.instance, e.work) for e in placed] == [(e.request_id, e.instance, e.work) for e in same]
    assert [e.request_id for e in placed] == ["h2", "h1"]


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81\xa1x\x01"])
def test_a_checkpoint_of_another_release_is_refused(data: bytes) -> None:
    """The shell then refolds the streams; half a state would be worse."""
    with pytest.raises(ValueError, match="snapshot"):
        Pilot().core.restore(data)
    other = TokenPilot(small_fleet({"c": 1}), "c", replica="x")
    with pytest.raises(ValueError, match="site"):
        Pilot().core.restore(other.snapshot())


def test_a_shared_prefix_goes_where_it_is_cached() -> None:
    """P13: two tenants with one prompt and different salts never match; the same tenant does, by the digest alone."""
    pilot = Pilot(instances=2, token_budget=65_536)
    chain = prefix.pack(prefix.digests(b"s" * 4096, prefix.tenant_key("k", "acme")))[0]
    other = prefix.pack(prefix.digests(b"s" * 4096, prefix.tenant_key("k", "local")))[0]
    first = only(pilot.request("r0", input_tokens=4200, prefix=chain), PlacementAssigned)
    assert first.prefix_hit_tokens == 0
    pilot.start(first)
    for n in range(1, 6):
        again = only(pilot.request(f"r{n}", input_tokens=4200, prefix=chain), PlacementAssigned)
        assert (again.instance, again.prefix_hit_tokens, again.work.prefill_tokens) == (first.instance, 4096, 104)
        pilot.finish(again)
    assert only(pilot.request("o", input_tokens=4200, prefix=other), PlacementAssigned).prefix_hit_tokens == 0
    pilot.engines[first.instance].incarnation = "2"
    pilot.report(first.instance)
    assert only(pilot.request("z", input_tokens=4200, prefix=chain), PlacementAssigned).prefix_hit_tokens == 0


def test_a_garbled_prefix_costs_the_affinity_only() -> None:
    """One foreign publisher's bad base64 stopped a fold."""
    pilot = Pilot()
    assert only(pilot.request("r", prefix="%%%"), PlacementAssigned).prefix_hit_tokens == 0


def test_bookkeeping_does_not_grow() -> None:
    """P08, P11: per-request maps were never cleared."""
    pilot = Pilot(token_budget=65_536)
    for n in range(2000):
        pilot.now_ms += 100
        pilot.finish(only(pilot.request(f"r{n}", input_tokens=10), PlacementAssigned))
        if n % 10 == 0:
            pilot.report_all()
            pilot.wake()
    pilot.quiet()
    assert len(pilot.core.state.gone) < 6000
    pilot.now_ms += 130_000
    pilot.wake()
    assert not pilot.core.state.gone
