"""Any one process killed with -9 under load: nothing is lost, nothing happens twice, and traffic goes on at once."""

import asyncio
import os
import signal
import time
from collections import Counter

import pytest
from tests.e2e.running import Answer, Load, Running, eventually, patience

pytestmark = pytest.mark.timeout(400)
#: from the kill to the first good answer to a request that was sent after it
BACK_S = 5.0


async def _kill(fleet: Running, name: str) -> float:
    """SIGKILL; returns the moment, when the supervisor has started the process again."""
    victim = fleet.pid(name)
    moment_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    async def again() -> bool:
        return fleet.ready["pids"].get(name) not in (victim, None)

    await eventually(again, within_s=10.0, what=f"{name} started again")
    return moment_s


def _all_typed(answers: list[Answer]) -> None:
    assert [one for one in answers if not one.ended_typed] == []
    # what failed says so in one error, not in several
    assert [one for one in answers if one.errors > 1] == []


def _back_soon(load: Load, moment_s: float) -> None:
    """Traffic flows again, seconds after the kill."""
    back_s = load.first_after(moment_s)
    assert back_s is not None
    print(f"a request sent after the kill was answered {back_s:.2f} s after it")
    assert back_s < min(patience(BACK_S), 2 * BACK_S)


#: the same again at other sites
MORE = [pytest.param(name, marks=pytest.mark.soak) for name in ("tokenpilot-c", "siteagent-c", "tokenpilot-d")]


@pytest.mark.parametrize("name", ["slomax", "fleetmind", "tokenpilot-b", "siteagent-b", "accountant", *MORE])
async def test_a_killed_service_costs_no_request(fleet: Running, name: str) -> None:
    """A control plane whose part dies must not take requests with it: others stand in, the restarted one refolds."""
    async with Load(fleet, rate_per_s=4.0, tokens=25) as load:
        await load.completions(4)
        moment_s = await _kill(fleet, name)
        await load.completions(12)
    _all_typed(load.answers)
    _back_soon(load, moment_s)
    # the gateway lives: nobody may even notice
    assert [one for one in load.answers if not one.completed] == []
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    outcomes = Counter(row["outcome"] for found in rows.values() for row in found)
    assert outcomes == {"completed": len(load.answers)}, outcomes
    await _made_once(fleet, rows)


async def _made_once(fleet: Running, rows: "dict[str, list[dict[str, object]]]") -> None:
    """No engine worked for a request that the ledger knows nothing of, or on one attempt more than once."""
    made: dict[str, int] = {}
    for instance in fleet.ready["emulators"]:
        for key, tokens in (await fleet.emulator(instance))["tokens_by_request"].items():
            assert key not in made, f"{key} ran on two instances"
            made[key] = tokens
    for rid, found in rows.items():
        by_attempt = {row["attempt"]: row for row in found}
        for key in (key for key in made if key.startswith(rid)):
            attempt = int(key.rpartition("-")[2])
            assert attempt in by_attempt or any(row["outcome"] == "owner_lost" for row in found), (key, found)
        for attempt, row in by_attempt.items():
            if row["outcome"] == "completed":
                assert made[f"{rid}-{attempt}"] == row["output_tokens"], row


async def test_a_killed_gateway_breaks_its_streams_and_closes_their_rows(fleet: Running) -> None:
    """Its open streams break visibly, their rows are closed as `owner_lost`, and nothing stays booked for them."""
    async with Load(fleet, rate_per_s=4.0, tokens=25) as load, fleet.session() as session:
        await load.completions(3)
        begun: list[Answer] = []
        long = [
            asyncio.create_task(fleet.ask(session, tokens=400, on_chunk=begun.append, prompt=f"A long one, {n}."))
            for n in range(3)
        ]

        async def all_begun() -> bool:
            return len({one.request_id for one in begun if one.tokens}) == 3

        await eventually(all_begun, within_s=15, what="three long streams")
        moment_s = await _kill(fleet, "gateway")
        broken = await asyncio.gather(*long)
        await load.completions(8, within_s=30)
    assert all(one.broken and not one.completed for one in broken), broken
    _all_typed(load.answers)
    _back_soon(load, moment_s)
    assert all(one.broken for one in load.answers if not one.completed)
    rows = await fleet.ledger_agrees([*load.answers, *broken], since_s=load.began_s)
    for one in broken:
        final = next(row for row in rows[one.request_id] if row["final"])
        assert (final["outcome"], final["attempt"]) == ("owner_lost", 1), final
        assert final["instance"]
    for found in rows.values():
        final = next(row for row in found if row["final"])
        assert final["outcome"] in ("completed", "owner_lost"), final
    # the engines were left by their client and stopped
    for one in broken:
        for instance in fleet.ready["emulators"]:
            tokens = (await fleet.emulator(instance))["tokens_by_request"].get(f"{one.request_id}-1", 0)
            assert tokens < 400


async def test_a_restarted_engine_costs_only_what_it_had_begun(fleet: Running) -> None:
    """An engine that dies and comes back on the same port: begun answers get one typed error, others go elsewhere."""
    async with Load(fleet, rate_per_s=5.0, tokens=40) as load:
        await load.completions(5)
        moment_s = time.monotonic()
        await fleet.fault("b-chat-1", "restart", down_ms=1500)
        await load.completions(12)
    _all_typed(load.answers)
    _back_soon(load, moment_s)
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    for one in load.answers:
        final = next(row for row in rows[one.request_id] if row["final"])
        if not one.completed:
            # it had shown something: no second attempt would be honest
            assert final["outcome"] == "failed_midstream", final
            assert one.tokens > 0 or final["stream"] is False
    assert any(one.completed and one.attempts > 1 for one in load.answers) or all(
        one.attempts == 1 for one in load.answers
    )
    assert sum(not one.completed for one in load.answers) <= 8


async def test_a_killed_nats_loses_no_outcome(fleet: Running) -> None:
    """Open streams go on, newcomers are refused with 503 or wait, every outcome reaches the ledger afterwards."""
    async with Load(fleet, rate_per_s=4.0, tokens=60) as load:
        await load.completions(4)
        moment_s = await _kill(fleet, "nats")
        await load.completions(10, within_s=30)
    _all_typed(load.answers)
    assert [one for one in load.answers if one.broken] == []
    bad = [one for one in load.answers if not one.completed]
    assert {(one.status, one.code) for one in bad} <= {(503, "unavailable")}
    assert all(int(one.retry_after) >= 1 for one in bad)
    _back_soon(load, moment_s)
    # streams that were open when it died are whole
    assert any(one.completed and one.sent_s < moment_s < one.ended_s for one in load.answers)
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    assert {row["outcome"] for found in rows.values() for row in found} <= {"completed", "refused"}
    # also the refusals of the outage have their rows
    refused = await fleet.rows(one.request_id for one in bad)
    assert all(len(found) == 1 and found[0]["outcome"] == "refused" for found in refused.values()), refused


async def test_a_killed_postgres_is_nobodys_business_but_the_ledgers(fleet: Running) -> None:
    """Requests of known keys are served all the while; rows wait on the bus and come, once each."""
    async with Load(fleet, rate_per_s=4.0, tokens=25) as load:
        await load.completions(4)
        await _kill(fleet, "postgres")
        await load.completions(14)
    assert [one for one in load.answers if not one.completed] == []
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    assert all(len(found) == 1 for found in rows.values())


async def test_a_stopped_service_is_not_a_dead_one(fleet: Running) -> None:
    """SIGSTOP, the hard variant of a death: the port is open and nobody answers. Others stand in; then it catches up.

    (G04; F09: an owner that was asleep for longer than its lease must not act on what it remembers.)
    """
    for name in ("slomax", "fleetmind", "tokenpilot-b"):
        pid = fleet.pid(name)
        async with Load(fleet, rate_per_s=3.0, tokens=15) as load:
            await load.completions(2)
            os.kill(pid, signal.SIGSTOP)
            try:
                await load.completions(8, within_s=25)
            finally:
                os.kill(pid, signal.SIGCONT)
            await load.completions(4)
        assert fleet.pid(name) == pid
        assert [one for one in load.answers if not one.completed] == [], name
        rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
        assert all(len(found) == 1 for found in rows.values())
        await fleet.invariants(within_s=25)
