"""The long cycle on a whole running fleet: demand starts replicas, its end stops them, promises are kept by command.

A fleet of its own, one site and two emulated engines, whose day passes 240 times as fast: four plans a second, cold
starts of a quarter of one.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.running import Answer, Running, eventually, running

from tokenfleet.local.ports import free_ports

pytestmark = pytest.mark.timeout(300)

FLEET = """
[fleet]
name = "planned"
default_class = "chat"
[planning]
mode = "on"
cold_start_s = 60.0
drain_s = 600.0
time_scale = 240.0
[models.chat-8b]
versions = ["1"]
default_version = "1"
max_model_len = 8192
tokenizer = "bytes"
[classes.chat]
ttft_ms = 2000
tpot_ms = 100
[tenants.studio]
zones = ["*"]
classes = ["chat"]
[sites.a]
zone = "eu"
entry = true
homes = { chat-8b = ["b"] }
[sites.b]
zone = "eu"
gpus = 2
actuator = { kind = "emulator" }
[sites.b.instances.b-chat-1]
model = "chat-8b"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-a100"
max_sequences = 2
kv_tokens = 24000
cold_start_s = 60.0
[sites.b.instances.b-chat-2]
model = "chat-8b"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-a100"
max_sequences = 2
kv_tokens = 24000
cold_start_s = 60.0
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("planned")
    (home / "fleet.toml").write_text(FLEET)
    words = ("--port", str(free_ports(1)[0]), "--fleet", str(home / "fleet.toml"))
    with running(home / "state", *words) as found:
        yield found


def command(fleet: Running, *words: str) -> tuple[int, dict[str, Any]]:
    """`tokenfleet WORDS --json` as an operator runs it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
    done = subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", *words, "--nats", fleet.ready["nats"], "--json"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def _powered(fleet: Running) -> int:
    return sum([(await fleet.emulator(name))["powered"] for name in fleet.ready["emulators"]])


async def test_replicas_follow_demand_and_promises(planned: Running) -> None:
    """Load on both, silence, none: every stream whole; then a promise keeps one, and its end lets it go."""
    stop = asyncio.Event()
    answers: list[Answer] = []

    async def client() -> None:
        async with planned.session() as session:
            while not stop.is_set():
                answers.append(await planned.ask(session, tokens=40))
                if not answers[-1].completed:
                    await asyncio.sleep(0.3)  # as it is told by Retry-After, only sooner

    # nobody asked until now, so nothing may run: they are refused until it does, and keep both running
    clients = [asyncio.create_task(client()) for _ in range(6)]

    async def both() -> bool:
        return await _powered(planned) == 2 and sum(one.completed for one in answers) > 30

    try:
        await eventually(both, within_s=40, what="two replicas under load")
    finally:
        stop.set()
        await asyncio.gather(*clients)
    refused = ("", "model_not_ready", "no_capacity", "patience")
    assert [one for one in answers if one.broken or one.code not in refused] == []

    async def none() -> bool:
        return await _powered(planned) == 0

    await eventually(none, within_s=90, what="no replica without demand")
    code, said = command(planned, "plan")
    assert code == 0
    (row,) = said["plans"]
    assert (row["site"], row["model"], row["planned"]) == ("b", "chat-8b@1", 0)
    assert row["reason"]

    promise = ("reserve", "add", "night", "--site", "b", "--model", "chat-8b", "--tenant", "studio", "--for", "1h")
    code, said = command(planned, *promise, "--gpus", "1")
    assert (code, said) == (0, {"reservation": "night", "granted": True, "reason": ""})
    code, said = command(planned, "reserve", "add", "more", *promise[3:], "--gpus", "1.5")
    assert (code, said["reason"]) == (1, "over_budget")
    (standing,) = command(planned, "reserve", "list")[1]["reservations"]
    assert (standing["reservation"], standing["open"]) == ("night", True)

    async def one() -> bool:
        return await _powered(planned) == 1

    await eventually(one, within_s=40, what="a replica for the promise")
    assert command(planned, "reserve", "cancel", "night") == (0, {"reservation": "night", "cancelled": True})
    assert command(planned, "reserve", "list")[1]["reservations"] == []
    await eventually(none, within_s=40, what="no replica without the promise")
    assert await planned.total("siteagent-b", "tokenfleet_siteagent_actuator_failing") == 0
    assert await planned.never_things() == {}
