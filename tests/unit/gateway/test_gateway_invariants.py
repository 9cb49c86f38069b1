"""Whatever comes in whatever order: one final outcome, one dispatch per attempt, nothing left."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.test_gateway_core import Bench, assigned, held, refused

from tokenfleet.gateway.state import Dispatch, End, Stage
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import PlacementDeclined

REQUESTS = ("r1", "r2")
SITES = {"b": ("b-0", "b-1"), "c": ("c-0", "c-1")}

steps = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(REQUESTS)),
    st.tuples(
        st.just("assigned"),
        st.sampled_from(REQUESTS),
        st.integers(1, 3),
        st.integers(0, 3),
        st.sampled_from(["b-0", "b-1", "c-0", "c-1"]),
    ),
    st.tuples(st.just("held"), st.sampled_from(REQUESTS), st.integers(1, 3), st.integers(0, 3)),
    st.tuples(
        st.just("refused"),
        st.sampled_from(REQUESTS),
        st.integers(1, 3),
        st.sampled_from(["saturated", "no_capacity", "patience"]),
        st.sampled_from(["a", "b", "c"]),
    ),
    st.tuples(st.just("started"), st.sampled_from(REQUESTS)),
    st.tuples(
        st.just("ended"),
        st.sampled_from(REQUESTS),
        st.sampled_from(["completed", "failed", "timed_out", "cancelled", "rejected", "failed_midstream"]),
    ),
    st.tuples(st.just("left"), st.sampled_from(REQUESTS)),
    st.tuples(st.just("report"), st.sampled_from(["b-0", "b-1", "c-0"]), st.booleans(), st.sampled_from(["e1", "e2"])),
    st.tuples(st.just("reconnected")),
    st.tuples(st.just("advance"), st.sampled_from([10.0, 300.0, 1500.0, 12_000.0])),
)


def perform(bench: Bench, step: tuple[Any, ...], opened: set[str]) -> None:
    """One step as the shell would take it: it ends or starts only what the core dispatched."""
    gateway, kind, *values = bench.gateway, *step
    one = gateway.requests.get(values[0]) if values and isinstance(values[0], str) else None
    if kind == "open" and values[0] not in opened:
        opened.add(values[0])
        bench.open(values[0])
    elif kind == "assigned":
        name, attempt, revision, instance = values
        bench.hear(assigned(name, attempt=attempt, revision=revision, instance=instance, site=instance[0]))
    elif kind == "held":
        bench.hear(held(values[0], attempt=values[1], revision=values[2]))
    elif kind == "refused":
        bench.hear(refused(values[0], attempt=values[1], reason=values[2], status=503, site=values[3]))
    elif kind == "started":
        bench.do(gateway.started(values[0], bench.now_ms))
    elif kind == "ended" and one is not None and not one.stage.unplaced:
        bench.do(gateway.ended(values[0], End(outcome=values[1], reason="x"), bench.now_ms))
    elif kind == "left" and one is not None and one.stage.unplaced:
        bench.do(gateway.left(values[0], bench.now_ms))
    elif kind == "report":
        bench.report(values[0][0], values[0], ready=values[1], incarnation=values[2])
    elif kind == "reconnected":
        bench.do(gateway.reconnected(bench.now_ms))
    elif kind == "advance":
        bench.advance(values[0])


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=40))
def test_any_order_of_events_keeps_the_books(sequence: list[tuple[Any, ...]]) -> None:
    """Late, repeated, crossed and contradicting messages, time-outs and reconnections in between."""
    bench = Bench(max_attempts=3)
    opened: set[str] = set()
    for step in sequence:
        perform(bench, step, opened)
        waiting = {n for n, one in bench.gateway.requests.items() if one.stage is Stage.DISPATCHED}
        assert set().union(*bench.gateway._awaiting.values()) == waiting
        leased = {open_.request_id for open_ in bench.gateway.lease(bench.now_ms).open}
        assert leased == set(bench.gateway.requests)
    for name, one in list(bench.gateway.requests.items()):
        if not one.stage.unplaced:
            bench.do(bench.gateway.ended(name, End(outcome="cancelled"), bench.now_ms))
    bench.advance(40_000)  # everything still waiting runs out of patience
    bench.check_empty()
    rows = bench.events(OutcomeFinished)
    assert {row.request_id for row in rows if row.final} == opened, "each request has its one final row"
    dispatched = [(e.request_id, e.attempt) for e in bench.effects if isinstance(e, Dispatch)]
    assert len(dispatched) == len(set(dispatched)), "one dispatch per attempt"
    used = {e.assigned.id for e in bench.effects if isinstance(e, Dispatch)}
    assert {row.booking for row in rows if row.booking} == used, "every booking that was used is closed by a row"
    assert used.isdisjoint(d.declined for d in bench.events(PlacementDeclined))
    for row in rows:
        assert row.attempt == 0 or (row.request_id, row.attempt) in dispatched
        assert all(value is None or value >= 0 for value in (row.times.ttft_ms, row.times.queue_ms, row.times.e2e_ms))
    starts = [(e.request_id, e.attempt) for e in bench.events(OutcomeStarted)]
    assert len(starts) == len(set(starts))
