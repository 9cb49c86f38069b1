"""Processes that hang instead of dying: ports open, connections up, nobody answers. The hard variant of every death."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.e2e.running import Load, Running, eventually, patience

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]


@asynccontextmanager
async def frozen(fleet: Running, *names: str) -> AsyncIterator[None]:
    """SIGSTOP for a while, with children."""
    import psutil

    processes = [
        one for name in names for root in [psutil.Process(fleet.pid(name))] for one in (root, *root.children(True))
    ]
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.resume()


async def test_a_frozen_bus(fleet: Running) -> None:
    """NATS hangs for six seconds, connections open: clients get an answer or a typed error, and nothing is lost."""
    async with Load(fleet, rate_per_s=3.0, tokens=12) as load:
        await load.completions(3)
        async with frozen(fleet, "nats"):
            await asyncio.sleep(6.0)
        thawed_s = time.monotonic()
        await load.completions(6, within_s=30)
    assert [one for one in load.answers if not one.ended_typed or one.broken] == []
    bad = [one for one in load.answers if not one.completed]
    assert {one.status for one in bad} <= {503, 429}, bad
    back_s = load.first_after(thawed_s)
    assert back_s is not None
    assert back_s < patience(5.0)
    await fleet.ledger_agrees(load.answers, since_s=load.began_s)


async def test_a_frozen_database(fleet: Running) -> None:
    """Postgres hangs: clients whose keys are known do not feel it, and the rows come afterwards, once each."""
    async with Load(fleet, rate_per_s=3.0, tokens=12) as load:
        await load.completions(3)
        async with frozen(fleet, "postgres"):
            await load.completions(20, within_s=25)
    assert [one for one in load.answers if not one.completed] == []
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    assert all(len(found) == 1 for found in rows.values())


async def test_a_gateway_that_starts_without_its_database(fleet: Running) -> None:
    """Both die, Postgres stays away for a while: the gateway is up, says 503 and not 401, and serves when it can."""
    async with fleet.session() as session:
        assert (await fleet.ask(session)).completed
        async with frozen(fleet, "postgres"):
            victim = fleet.pid("gateway")
            os.kill(victim, signal.SIGKILL)
            seen: set[tuple[int, str]] = set()
            end = time.monotonic() + patience(10.0)
            while time.monotonic() < end and not any(status for status, _ in seen):
                one = await fleet.ask(session)
                seen.add((one.status, one.code))
                await asyncio.sleep(0.3)
            # a key that cannot be looked up is not a wrong key
            assert (503, "unavailable") in seen
            assert seen <= {(0, ""), (503, "unavailable")}, seen

        async def served() -> bool:
            return (await fleet.ask(session)).completed

        await eventually(served, within_s=15, what="served")


@pytest.mark.soak
async def test_a_frozen_agent_takes_its_site_out_and_back_in(fleet: Running) -> None:
    """Nobody says any more what site b has: after ten seconds it is not believed, and c serves; then b is back."""
    async with Load(fleet, rate_per_s=3.0, tokens=8, tenant="bank", cls="chat") as load:
        await load.completions(3)
        async with frozen(fleet, "siteagent-b"):

            async def elsewhere() -> bool:
                late = [one for one in load.answers if one.completed][-3:]
                return all(one.site == "c" for one in late)

            await eventually(elsewhere, within_s=20, what="served by c")

        async def home() -> bool:
            return all(one.site == "b" for one in [one for one in load.answers if one.completed][-3:])

        await eventually(home, within_s=10, what="served by b again")
    assert [one for one in load.answers if not one.completed] == []
    await fleet.ledger_agrees(load.answers, since_s=load.began_s)


@pytest.mark.soak
async def test_an_engine_whose_health_page_hangs_is_left_alone(fleet: Running) -> None:
    """Health and metrics hang while requests would be served: not ready, and back when it answers."""
    async with Load(fleet, rate_per_s=3.0, tokens=6, tenant="bank", cls="chat") as load:
        await load.completions(2)
        async with fleet.faulty(["b-chat-1"], "hang", scope="all"):

            async def out() -> bool:
                return await fleet.total("siteagent-b", "tokenfleet_siteagent_instance_ready", instance="b-chat-1") == 0

            await eventually(out, within_s=12, what="not ready")
            await load.completions(4, within_s=40)

        async def ready() -> bool:
            return await fleet.total("siteagent-b", "tokenfleet_siteagent_instance_ready", instance="b-chat-1") == 1

        await eventually(ready, within_s=12, what="ready again")
    # what was sent to it before it was known to hang was repeated elsewhere
    assert [one for one in load.answers if not one.completed] == []


async def test_a_frozen_gateway_loses_its_requests_once(fleet: Running) -> None:
    """A gateway asleep for longer than its lease: others give its requests up, and it wakes to find them closed.

    What it then truly ends replaces the guess: one final row each, whatever the order.
    """
    async with fleet.session() as session:
        began_s = time.time()
        calls = [asyncio.create_task(fleet.ask(session, tokens=300, prompt=f"Sleep on it, {n}.")) for n in range(4)]

        async def streaming() -> bool:
            return await fleet.total("gateway", "tokenfleet_gateway_open_requests", phase="streaming") == 4

        await eventually(streaming, within_s=10, what="four streams")
        async with frozen(fleet, "gateway"):
            await asyncio.sleep(9.0)
            lost = await fleet.sql(
                "SELECT outcome FROM attempts WHERE received_at > to_timestamp($1) AND tenant = 'studio'", began_s
            )
        answers = await asyncio.gather(*calls)
        assert [one for one in answers if not one.completed] == []
        assert {row["outcome"] for row in lost} <= {"owner_lost"}

        async def true_rows() -> bool:
            rows = await fleet.rows(one.request_id for one in answers)
            return all([row["outcome"] for row in found] == ["completed"] for found in rows.values())

        await eventually(true_rows, within_s=15, what="the truth in the ledger")
        again = await fleet.ask(session)
        assert again.completed


@pytest.mark.soak
async def test_a_frozen_owner_finds_its_office_taken(fleet: Running) -> None:
    """Everything that decides sleeps for longer than its lease at once, and wakes: no double decision, no lost one."""
    async with Load(fleet, rate_per_s=3.0, tokens=12) as load:
        await load.completions(2)
        async with frozen(fleet, "slomax", "fleetmind", "tokenpilot-b", "tokenpilot-c", "tokenpilot-d"):
            await asyncio.sleep(4.0)
        await load.completions(6, within_s=30)
    assert [one for one in load.answers if not one.completed] == []
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    assert all(len(found) == 1 for found in rows.values())
