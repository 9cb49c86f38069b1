"""Everything at once, drawn from a seed: clients that leave, engines that fail, services that die or hang, for a while.

No single answer is predictable here; what is asserted is what must hold whatever happens: every request ends in a way
that its client can tell, every accepted one has exactly one final row, no attempt runs twice, nothing stays open.
"""

import asyncio
import os
import random
import signal
import time

import aiohttp
import pytest
from tests.e2e.running import Answer, Running, eventually, patience

MIX = (
    ("studio", "chat", "chat-8b"), ("studio", "interactive", "chat-8b"), ("bank", "interactive", "chat-8b"),
    ("devtools", "agent", "chat-8b@2"), ("research", "document", "doc-32b"), ("research", "batch", "chat-8b@2"),
    ("trial", "chat", "chat-8b"),
)  # fmt: skip
FAULTS = (
    ("refuse", {}), ("hang", {}), ("reset", {"n": 0}), ("reset", {"n": 3}), ("error_first", {}), ("stall", {}),
    ("slow", {"factor": 6.0}), ("no_done", {}), ("split_done", {"n": 5}), ("freeze_metrics", {}),
    ("restart", {"down_ms": 700.0}),
)  # fmt: skip


class Storm:
    """`seconds` of it at `rate_per_s`."""

    def __init__(self, fleet: Running, seed: int, *, seconds: float, rate_per_s: float = 5.0) -> None:
        self.fleet = fleet
        self.dice = random.Random(seed)
        self.seconds = seconds
        self.rate_per_s = rate_per_s
        self.answers: list[Answer] = []
        self.left = 0
        self.story: list[str] = []
        self.began_s = time.time()
        self._zero_s = time.monotonic()

    async def run(self) -> None:
        """Until it is over and everything sent has ended."""
        end = time.monotonic() + self.seconds
        weather = asyncio.create_task(self._weather(end))
        async with self.fleet.session() as session:
            calls: set[asyncio.Task[None]] = set()
            number = 0
            while time.monotonic() < end:
                number += 1
                calls.add(asyncio.create_task(self._client(session, number)))
                await asyncio.sleep(self.dice.expovariate(self.rate_per_s))
            await weather
            done, late = await asyncio.wait(calls, timeout=patience(90))
            assert not late, f"{len(late)} requests never ended"
            for call in done:
                call.result()

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        dice = self.dice
        tenant, cls, model = dice.choice(MIX)
        tokens = dice.choice((1, 4, 20, 60, 150))
        words = "word " * dice.choice((1, 10, 100, 600))
        call = asyncio.create_task(
            self.fleet.ask(
                session, tenant=tenant, cls=cls, model=model, tokens=tokens, stream=dice.random() < 0.7,
                prompt=f"{number}: {words}",
            )
        )  # fmt: skip
        if dice.random() < 0.25:
            await asyncio.sleep(dice.uniform(0, 2))
            if not call.done():
                self.left += 1
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                return
        self.answers.append(await call)

    async def _weather(self, end: float) -> None:
        dice, fleet = self.dice, self.fleet
        instances, services = list(fleet.ready["emulators"]), list(fleet.ready["pids"])
        services.remove("emulator")
        while time.monotonic() < end:
            what = dice.random()
            if what < 0.5:
                instance = dice.choice(instances)
                kind, more = dice.choice(FAULTS)
                self._tell(f"{instance} {kind} {more}")
                await fleet.fault(instance, kind, **more)
                await asyncio.sleep(dice.uniform(0.5, 3))
                await fleet.fault(instance, "none")
            elif what < 0.8:
                name = dice.choice(services)
                self._tell(f"kill {name}")
                self._signal(name, signal.SIGKILL)
            else:
                name = dice.choice(services)
                self._tell(f"freeze {name}")
                self._signal(name, signal.SIGSTOP)
                await asyncio.sleep(dice.uniform(0.5, 4))
                self._signal(name, signal.SIGCONT)
            await asyncio.sleep(dice.uniform(0.3, 2))
        for instance in instances:
            await fleet.fault(instance, "none")

    def _tell(self, line: str) -> None:
        self.story.append(f"{time.monotonic() - self._zero_s:6.1f} s  {line}")
        print(self.story[-1])

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self.fleet.ready["pids"].get(name)
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                self._tell(f"{name} is dead already")

    async def verdict(self) -> None:
        """What must hold."""
        fleet = self.fleet

        async def up() -> bool:
            return set(fleet.ready["pids"]) >= set(fleet.ready["metrics"]) | {"nats", "postgres"}

        await eventually(up, within_s=20, what="all processes up")

        async def served() -> bool:
            async with fleet.session() as session:
                return (await fleet.ask(session)).completed

        await eventually(served, within_s=30, what="served after the storm")
        untyped = [one for one in self.answers if not one.ended_typed or one.errors > 1]
        assert untyped == []
        rows = await fleet.ledger_agrees(self.answers, since_s=self.began_s)
        assert len(rows) >= len([one for one in self.answers if one.completed])
        for found in rows.values():
            attempts = [row["attempt"] for row in found]
            assert len(set(attempts)) == len(attempts)
            assert max(attempts) <= 3
        made: dict[str, str] = {}
        for instance in fleet.ready["emulators"]:
            for key in (await fleet.emulator(instance))["tokens_by_request"]:
                assert key not in made, f"{key} ran on {instance} and {made[key]}"
                made[key] = instance
        for rid, found in rows.items():
            for row in found:
                if row["tenant"] == "bank":
                    assert row["served_site"] in ("", "b", "c"), row
                if row["outcome"] == "completed":
                    assert made[f"{rid}-{row['attempt']}"] == row["instance"]
        await fleet.invariants(within_s=40)
        print(f"{len(self.answers)} ended, {self.left} left, {sum(one.completed for one in self.answers)} completed")


@pytest.mark.timeout(400)
async def test_a_short_storm(fleet: Running) -> None:
    """A quarter of a minute, another seed than the long ones."""
    storm = Storm(fleet, 1, seconds=15)
    await storm.run()
    await storm.verdict()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 3, 4])
async def test_a_long_storm(fleet: Running, seed: int) -> None:
    """Three minutes each."""
    storm = Storm(fleet, seed, seconds=180)
    await storm.run()
    await storm.verdict()
