"""The same deaths while requests are held: a queue must survive the death of whoever keeps it."""

import asyncio
import os
import signal
import time

import pytest
from tests.e2e.running import Answer, Load, Running, eventually

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]


class Crowd:
    """More requests for version 2 than its sixteen places take, each a few seconds long."""

    def __init__(self, fleet: Running, count: int = 34, tokens: int = 110) -> None:
        self.fleet = fleet
        self.began_s = time.time()
        self._session = fleet.session()
        self._tasks = [
            asyncio.create_task(
                fleet.ask(
                    self._session, model="chat-8b@2", tokens=tokens, prompt=f"One of a crowd, {n}.", stream=n % 3 != 0,
                    tenant=("studio", "devtools")[n % 2], cls=("chat", "agent")[n % 2],
                )
            )
            for n in range(count)
        ]  # fmt: skip

    async def is_held(self, least: int = 6) -> None:
        """Until at least so many of them wait."""

        async def held() -> bool:
            return await self.fleet.total("gateway", "tokenfleet_gateway_open_requests", phase="held") >= least

        await eventually(held, within_s=10, what="a queue")

    async def ends(self) -> list[Answer]:
        """All of them."""
        try:
            return await asyncio.gather(*self._tasks)
        finally:
            await self._session.close()


def _kill(fleet: Running, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(fleet.pid(name), number)


@pytest.mark.parametrize(
    "names",
    [
        ("slomax",),
        ("tokenpilot-b",),
        ("slomax", "fleetmind", "tokenpilot-b"),
        pytest.param(("fleetmind",), marks=pytest.mark.soak),
        pytest.param(("tokenpilot-c",), marks=pytest.mark.soak),
    ],
    ids="+".join,
)
async def test_what_is_held_is_served_though_its_keeper_died(fleet: Running, names: tuple[str, ...]) -> None:
    """The queue is a fold of events: who comes back has it again, and meanwhile others let nobody wait for ever."""
    crowd = Crowd(fleet)
    await crowd.is_held()
    for name in names:
        _kill(fleet, name)
    answers = await crowd.ends()
    assert [one for one in answers if not one.ended_typed or one.errors > 1 or one.broken] == []
    rows = await fleet.ledger_agrees(answers, since_s=crowd.began_s)
    assert len(rows) == len(answers)
    # nobody was refused for it: their patience is several times the outage
    assert [one for one in answers if not one.completed] == []


async def test_a_queue_outlives_the_bus(fleet: Running) -> None:
    """NATS dies while requests are held: their clients wait on, and are served when it is back."""
    crowd = Crowd(fleet)
    await crowd.is_held()
    _kill(fleet, "nats")
    answers = await crowd.ends()
    assert [one for one in answers if not one.completed] == []
    rows = await fleet.ledger_agrees(answers, since_s=crowd.began_s)
    assert len(rows) == len(answers)


async def test_a_queue_dies_with_its_gateway(fleet: Running) -> None:
    """Who is held has nobody waiting for it any more: dropped everywhere, closed as lost, and no engine sees it."""
    crowd = Crowd(fleet, tokens=900)
    await crowd.is_held()
    leases = await fleet.total("accountant", "tokenfleet_messages_handled_total", message="GatewayLeased")

    async def all_told() -> bool:
        told = await fleet.total("accountant", "tokenfleet_messages_handled_total", message="GatewayLeased")
        return told >= leases + 2

    await eventually(all_told, within_s=10, what="two leases, which name all that is open")
    waiting = await fleet.total("gateway", "tokenfleet_gateway_open_requests", phase="held")
    _kill(fleet, "gateway")
    answers = await crowd.ends()
    assert all(one.broken for one in answers if not one.completed)
    rows = await fleet.ledger_agrees(answers, since_s=crowd.began_s)
    assert len(rows) == len(answers)
    finals = [next(row for row in found if row["final"]) for found in rows.values()]
    assert {row["outcome"] for row in finals} <= {"completed", "owner_lost"}
    held = [row for row in finals if row["attempt"] == 0]
    assert len(held) == waiting >= 6
    assert {(row["outcome"], row["instance"], row["output_tokens"]) for row in held} == {("owner_lost", "", 0)}
    made: set[str] = set()
    for instance in fleet.ready["emulators"]:
        made |= set((await fleet.emulator(instance))["tokens_by_request"])
    assert not any(key.startswith(row["request_id"]) for row in held for key in made)
    async with fleet.session() as session:
        again = await fleet.ask(session, model="chat-8b@2")
    assert again.completed


async def test_everything_dies_at_once(fleet: Running) -> None:
    """A machine that loses power: after it, what was open is closed, and the fleet serves."""
    crowd = Crowd(fleet)
    await crowd.is_held()
    for name in ("nats", "postgres", "gateway", "slomax", "fleetmind", "tokenpilot-b", "tokenpilot-c", "accountant"):
        _kill(fleet, name)
    answers = await crowd.ends()
    assert [one for one in answers if not one.ended_typed] == []

    async def served() -> bool:
        async with fleet.session() as session:
            return (await fleet.ask(session, model="chat-8b@2")).completed

    await eventually(served, within_s=20, what="served again")
    # nobody saw their ends: whatever the streams have of them is closed
    await fleet.ledger_agrees([], since_s=crowd.began_s)


async def test_all_engines_die_at_once(fleet: Running) -> None:
    """The emulator's process with all instances: begun answers break, all others are served when it is back."""
    crowd = Crowd(fleet)
    await crowd.is_held()
    _kill(fleet, "emulator")
    answers = await crowd.ends()
    assert [one for one in answers if not one.ended_typed or one.errors > 1] == []
    rows = await fleet.ledger_agrees(answers, since_s=crowd.began_s)
    for one in answers:
        if not one.completed and one.status == 200:
            assert next(row for row in rows[one.request_id] if row["final"])["outcome"] == "failed_midstream"
    # who was only waiting is served
    assert sum(one.completed for one in answers) >= 8, [(one.status, one.code) for one in answers]


async def test_an_orderly_restart_of_everything_but_the_gateway_is_not_felt(fleet: Running) -> None:
    """A rolling upgrade: SIGTERM to one after the other under load, and no client notices."""
    async with Load(fleet, rate_per_s=4.0, tokens=25) as load:
        for name in ("accountant", "slomax", "fleetmind", "tokenpilot-b", "siteagent-b"):
            victim = fleet.pid(name)
            _kill(fleet, name, signal.SIGTERM)

            async def again(name: str = name, victim: int = victim) -> bool:
                return fleet.ready["pids"].get(name) not in (victim, None)

            await eventually(again, within_s=15, what=f"{name} started again")
            await load.completions(4)
    assert [one for one in load.answers if not one.completed] == []
    rows = await fleet.ledger_agrees(load.answers, since_s=load.began_s)
    assert all(len(found) == 1 for found in rows.values())


async def test_an_orderly_stop_of_the_gateway_lets_streams_finish(fleet: Running) -> None:
    """SIGTERM: what is open is finished, nothing is lost, and its rows are there."""
    began_s = time.time()
    begun: list[Answer] = []
    async with fleet.session() as session:
        streams = [
            asyncio.create_task(fleet.ask(session, tokens=150, prompt=f"Finish me, {n}.", on_chunk=begun.append))
            for n in range(5)
        ]

        async def all_begun() -> bool:
            return len({one.request_id for one in begun}) == 5

        await eventually(all_begun, within_s=15, what="streams")
        victim = fleet.pid("gateway")
        _kill(fleet, "gateway", signal.SIGTERM)
        answers = await asyncio.gather(*streams)
        assert [one for one in answers if not one.completed or one.tokens != 150] == []

        async def again() -> bool:
            pid = fleet.ready["pids"].get("gateway")
            return pid not in (victim, None) and (await fleet.ask(session)).completed

        await eventually(again, within_s=20, what="gateway back")
    rows = await fleet.ledger_agrees(answers, since_s=began_s)
    assert {row["outcome"] for found in rows.values() for row in found} == {"completed"}
