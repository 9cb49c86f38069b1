"""`tokenfleet demo` as a user runs it: a whole fleet, two short runs, a verdict, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tokenfleet.replay import records


def demo(tmp_path: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "tokenfleet.cli", "demo", "--html", str(tmp_path / "demo.html"), *words]
    # Its state directory is made below this one, which names every process of the fleet.
    home = tmp_path / "tmp"
    home.mkdir()
    for parent in (home, *home.parents[:3]):
        if parent != Path(tempfile.gettempdir()):
            parent.chmod(0o711)
    return subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def leftovers(tmp_path: Path) -> list[str]:
    """Processes that still name the run's directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue  # gone, or a zombie
        if process.pid != os.getpid() and any(str(tmp_path) in word for word in words):
            found.append(f"{process.pid} {' '.join(words[:6])}")
    return found


@pytest.mark.timeout(280)
def test_two_policies_on_one_fleet_and_a_verdict(tmp_path: Path) -> None:
    """Both runs offer the same requests, the second one really goes round robin, residency holds in both, and the exit
    code is the verdict's. Whether the margin is reached is for the full length to show, not for these few seconds."""
    process = demo(
        tmp_path, "--duration", "6", "--rate", "20", "--drain", "10", "--json", "--records", str(tmp_path / "records")
    )
    out, err = process.communicate(timeout=270)
    assert process.returncode in (0, 1), err
    ours, baseline = (json.loads(line) for line in out.splitlines())
    assert (ours["policy"], baseline["policy"]) == ("tokenfleet", "round-robin")
    assert ours["overall"]["offered"] == baseline["overall"]["offered"] > 80
    for report in (ours, baseline):
        overall = report["overall"]
        ended = sum(overall[k] for k in ("completed", "refused", "cancelled", "failed", "unfinished"))
        assert ended == overall["offered"]
        assert overall["completed"] > 0.5 * overall["offered"]
    kept = {
        policy: records.decode((tmp_path / "records" / f"{policy}.jsonl").read_bytes())
        for policy in ("tokenfleet", "round-robin")
    }
    for run in kept.values():
        assert {r.site for r in run if r.tenant == "bank"} <= {"b", "c", ""}
    assert [(r.planned_ms, r.input_tokens, r.tenant) for r in kept["tokenfleet"]] == [
        (r.planned_ms, r.input_tokens, r.tenant) for r in kept["round-robin"]
    ]
    # In turn over the three sites of this model, whatever they have to do.
    free = [r.site for r in kept["round-robin"] if r.site and r.model == "chat-8b" and r.tenant != "bank"]
    assert all(free.count(site) > 0.2 * len(free) for site in ("b", "c", "d")), {s: free.count(s) for s in set(free)}
    assert (tmp_path / "demo.html").read_text().startswith("<!doctype html>")
    assert "cores for everything" in err
    assert "no process is left" in err
    assert leftovers(tmp_path) == []
    # claims on ports outlive their fleet, so that the next one chooses others
    assert [one for one in (tmp_path / "tmp").iterdir() if not one.name.startswith("tokenfleet-ports-")] == []


@pytest.mark.timeout(120)
def test_ctrl_c_stops_the_fleet_too(tmp_path: Path) -> None:
    """Whoever loses patience with the demo must not keep eleven services and two databases."""
    process = demo(tmp_path, "--duration", "60")
    assert process.stderr is not None
    for line in process.stderr:
        if "sent" in line:
            break
    assert len(leftovers(tmp_path)) > 10
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert leftovers(tmp_path) == []
