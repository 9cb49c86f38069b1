"""A trace through the whole fleet, every service a process of its own: the client's records and the ledger agree."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tokenfleet.local.ports import free_ports
from tokenfleet.replay import records
from tokenfleet.replay.prompts import PromptMaker
from tokenfleet.replay.records import Record

SHARED = Path(os.environ.get("TOKENFLEET_SHARED", Path(__file__).parents[3] / "shared"))
#: what the ledger calls the endings that a client sees; a client's own give-up is nobody's failure
ENDINGS = {
    "completed": {"completed"},
    "refused": {"refused", "rejected"},
    "failed": {"failed", "failed_midstream", "timed_out"},
    "cancelled": {"cancelled"},
    "unfinished": {"cancelled"},
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    """(ready file's content, state directory) of a fleet."""
    state = tmp_path_factory.mktemp("fleet")
    # Postgres runs as another user when we are root, and must reach its directory.
    for parent in (state, *state.parents[:2]):
        parent.chmod(0o711)
    ready_file, log = state / "ready.json", state / "up.log"
    command = [sys.executable, "-P", "-m", "tokenfleet.cli", "up", "--data-dir", str(state / "state")]
    # Another fleet of this machine may reach for the usual port at the same moment.
    command += ["--port", str(free_ports(1)[0])]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--ready-file", str(ready_file)], stdout=out, stderr=out)
    try:
        end = time.monotonic() + 120
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield json.loads(ready_file.read_text()), state / "state"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def replay(up: tuple[dict[str, Any], Path], tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[Record]]:
    """The report and the records of one replay through the fleet."""
    ready, state = up
    kept = tmp_path / "records.jsonl"
    command = [sys.executable, "-P", "-m", "tokenfleet.cli", "replay", *words, "--url", ready["api"]]
    command += ["--json", "--records", str(kept), "--fleet", str(state / "fleet.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), records.decode(kept.read_bytes())


def assert_adds_up(overall: dict[str, Any]) -> None:
    ended = sum(overall[k] for k in ("completed", "refused", "cancelled", "failed", "unfinished"))
    assert overall["offered"] == ended


async def ledger(postgres: str, ids: list[str]) -> list[dict[str, Any]]:
    """Rows of these requests' final attempts, once all are there: the accountant writes them behind the events."""
    connection = await asyncpg.connect(postgres)
    try:
        async with asyncio.timeout(20):
            while True:
                rows = await connection.fetch("select * from attempts where request_id = any($1) and final", ids)
                if len(rows) >= len(ids):
                    return [dict(row) for row in rows]
                await asyncio.sleep(0.2)
    finally:
        await connection.close()


def assert_ledger_agrees(postgres: str, kept: list[Record]) -> None:
    """Row by row: one final row per request, the same ending, attempts, tokens, tenant and class as its client saw."""
    by_id = {record.request_id: record for record in kept}
    assert "" not in by_id, "an answer without its request id"
    assert len(by_id) == len(kept)
    least = PromptMaker(0).minimum_tokens
    rows = asyncio.run(ledger(postgres, list(by_id)))
    assert len(rows) == len(kept)
    for row in rows:
        record = by_id[row["request_id"]]
        seen = (record.index, record.outcome, record.error_code, row["outcome"], row["reason"])
        assert row["outcome"] in ENDINGS[record.outcome], seen
        assert (row["tenant"], row["service_class"]) == (record.tenant, record.cls), seen
        if record.outcome == "completed":
            assert row["attempt"] == record.attempts, seen
            assert row["output_tokens"] == record.output_tokens == record.stated_output_tokens, seen
            # A prompt cannot be shorter than the chat template around it.
            assert row["input_tokens"] == record.prompt_tokens == max(record.input_tokens, least), seen
            assert row["served_site"] == record.site, seen
        if record.outcome == "refused":
            assert row["output_tokens"] == 0, seen


def test_a_public_trace_ends_whole_and_the_ledger_knows_every_request(
    up: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """The evaluator's first command: nothing stays open, and what the fleet billed is what the client saw."""
    trace = SHARED / "traces" / "azure2023-conv.jsonl.gz"
    if not trace.exists():
        pytest.skip(f"no trace slices at {SHARED} (set TOKENFLEET_SHARED)")
    ready, state = up
    key = json.loads((state / "keys.json").read_text())["studio"]
    report, kept = replay(
        up, tmp_path, str(trace), "--limit", "150", "--speed", "4", "--tenant", "studio", "--key", key
    )  # fmt: skip
    assert_adds_up(report["overall"])
    assert report["overall"]["offered"] == 150
    assert report["overall"]["unfinished"] == 0
    assert report["overall"]["completed"] > 75
    assert_ledger_agrees(ready["postgres"], kept)


def test_the_builtin_workload_overloads_the_fleet_and_every_request_is_accounted_for(
    up: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Several tenants, classes and versions at once, more than the fleet can keep its promises for."""
    ready, state = up
    report, kept = replay(
        up, tmp_path, "builtin", "--duration", "12", "--rate", "18", "--seed", "7", "--keys", str(state / "keys.json"),
    )  # fmt: skip
    assert_adds_up(report["overall"])
    assert report["overall"]["unfinished"] == 0
    assert set(report["classes"]) == {"interactive", "chat", "agent", "document", "batch"}
    # Residency: the bank's data stays in the zone of sites a, b and c.
    assert {record.site for record in kept if record.tenant == "bank"} <= {"b", "c", ""}
    assert_ledger_agrees(ready["postgres"], kept)
    busy = {name: open_requests(at["url"]) for name, at in ready["emulators"].items()}
    assert not any(busy.values()), busy


def open_requests(url: str) -> float:
    """Requests that an engine runs or queues."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))
