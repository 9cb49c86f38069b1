"""The built-in workload: everything the reference fleet promises to somebody, drawn from a seed."""

import itertools
from collections import Counter, defaultdict

import pytest

from tokenfleet.fleet import Fleet, parse
from tokenfleet.local.fleetfile import REFERENCE
from tokenfleet.replay import traces, workload
from tokenfleet.replay.errors import WorkloadError
from tokenfleet.replay.plan import Choices, plan


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return parse(REFERENCE.read_bytes())


def test_the_reference_fleet_can_be_asked_for_everything_in_it(fleet: Fleet) -> None:
    """A tenant, class or model that the fleet file does not have would be refused throughout and judge nothing."""
    trace = workload.generate(seed=1)
    for request in plan(trace, fleet, Choices()):
        tenant = fleet.tenants[request.tenant]
        model, _ = fleet.resolve_model(request.model) or ("", "")
        assert request.cls in tenant.classes
        assert model
        assert "*" in tenant.models or model in tenant.models
        assert request.row.input_tokens + request.max_tokens <= fleet.models[model].max_model_len


def test_it_has_what_a_fleets_day_has(fleet: Fleet) -> None:
    """Chats, documents, agents and batch; several tenants, one bound to a zone; two models, one in two versions."""
    rows = workload.generate(seed=1).rows
    asked = {fleet.resolve_model(row.model or "") for row in rows}
    assert {("chat-8b", "1"), ("chat-8b", "2"), ("doc-32b", "1")} <= asked
    tenants = {str(row.tenant) for row in rows}
    assert len(tenants) >= 4
    assert any("*" not in fleet.tenants[tenant].zones for tenant in tenants)
    assert {row.cls for row in rows} == set(fleet.classes)


def test_turns_of_a_session_grow_out_of_each_other() -> None:
    """A chat's next turn sends its history again: each prompt's blocks begin with those of the one before."""
    sessions = defaultdict(list)
    for row in workload.generate(seed=3).rows:
        sessions[row.session].append(row)
    pairs = [pair for turns in sessions.values() for pair in itertools.pairwise(turns)]
    assert len(pairs) > 100
    for before, after in pairs:
        assert after.input_tokens > before.input_tokens
        assert after.blocks[: len(before.blocks)] == before.blocks


def test_apps_share_their_opening_and_sessions_nothing_else() -> None:
    """A system prompt is reused across sessions; histories are private."""
    rows = workload.generate(seed=3).rows
    first_block = {row.blocks[0] for row in rows}
    assert 5 <= len(first_block) <= 20
    owners = defaultdict(set)
    for row in rows:
        owners[row.blocks[-1]].add(row.session)
    assert max(map(len, owners.values())) == 1


def test_seeds_differ_in_when_and_what_but_not_in_how_much() -> None:
    """The comparison must hold on any seed: the load may not swing with it."""
    totals = [sum(row.output_tokens for row in workload.generate(seed=seed).rows) for seed in range(8)]
    assert max(totals) < 1.25 * min(totals)
    counts = [len(workload.generate(seed=seed).rows) for seed in range(8)]
    expected = workload.RATE_PER_S * workload.DURATION_S
    assert all(0.8 * expected < count < 1.2 * expected for count in counts)
    assert workload.generate(seed=1) == workload.generate(seed=1)
    assert workload.generate(seed=1) != workload.generate(seed=2)


def test_load_is_steady_from_the_first_second() -> None:
    """Sessions that began before the window send their turns in it: without them the first half is half empty."""
    trace = workload.generate(seed=5, duration_s=120.0)
    half = Counter(row.t_s < 60 for row in trace.rows)
    assert half[True] == pytest.approx(half[False], rel=0.3)
    assert 0 <= trace.rows[0].t_s < 2
    assert trace.rows[-1].t_s < 120


def test_it_can_be_saved_and_replayed_from_a_file() -> None:
    """What was generated once can be kept and sent elsewhere."""
    trace = workload.generate(seed=2, duration_s=10)
    assert traces.parse(traces.encode(trace)).rows == trace.rows


@pytest.mark.parametrize(
    "wrong", [{"duration_s": 0}, {"rate_per_s": -1}, {"rate_per_s": float("nan")}, {"streams": ()}]
)
def test_impossible_requests_are_refused(wrong: dict[str, float]) -> None:
    """Zero requests a second is a typo, not a workload."""
    with pytest.raises(WorkloadError):
        workload.generate(seed=1, **wrong)  # type: ignore[arg-type]  # one wrong argument at a time
