"""`tokenfleet up` itself: every service as its own process on a real NATS and a real Postgres."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokenfleet.local.fleetfile import REFERENCE

START_S = 120.0


class Up:
    """A running `tokenfleet up` and its ready file."""

    def __init__(self, process: "subprocess.Popen[str]", ready_file: Path) -> None:
        self.process = process
        self._ready_file = ready_file

    @property
    def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ready_file.read_text())
        return found

    def ask(self, *, model: str = "chat-8b") -> tuple[int, dict[str, Any]]:
        ready = self.ready
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Say something."}]}
        request = urllib.request.Request(
            f"{ready['api']}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ready['key']}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
                return int(answer.status), found
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        except OSError:
            # nobody listens: the gateway is being started again
            return 0, {}

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def run_up(data_dir: Path, *options: str) -> Iterator[Up]:
    """Start it and wait until all answers; whatever happens, nothing of it is left afterwards."""
    ready_file = data_dir.with_name(f"{data_dir.name}.ready.json")
    log = data_dir.with_name(f"{data_dir.name}.log")
    command = [sys.executable, "-m", "tokenfleet.cli", "up", "--data-dir", str(data_dir), "--ready-file"]
    # left by one that was killed
    ready_file.unlink(missing_ok=True)
    with log.open("a") as out:
        process = subprocess.Popen([*command, str(ready_file), *options], stdout=out, stderr=out, text=True)
    try:
        end = time.monotonic() + START_S
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
        yield Up(process, ready_file)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def leftovers(data_dir: Path) -> list[str]:
    """Processes that still name the directory in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            command, environment = process.cmdline(), process.environ()
        except psutil.Error:
            # gone, or a zombie
            continue
        if process.pid != os.getpid() and any(str(data_dir) in word for word in (*command, *environment.values())):
            found.append(f"{process.pid} {' '.join(command)}")
    return found


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up") / "state"


@pytest.mark.timeout(400)
def test_up_serves_resumes_and_leaves_nothing_behind(data_dir: Path) -> None:
    """The fixed promises of `up`: one ready file for scripts, the same state and key after a restart, no orphans."""
    with run_up(data_dir) as up:
        ready = up.ready
        assert set(ready) == {"api", "key", "metrics", "nats", "postgres", "emulators", "pids"}
        assert set(ready["emulators"]) >= {"b-chat-1", "c-chat-1", "d-chat-1"}
        assert set(ready["metrics"]) | {"nats", "postgres"} == set(ready["pids"])
        assert all(psutil.pid_exists(pid) for pid in ready["pids"].values())
        for url in ready["metrics"].values():
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.status == 200
        status, answered = up.ask()
        assert status == 200, answered
        assert answered["usage"]["completion_tokens"] == 4

        second = subprocess.run(
            [sys.executable, "-m", "tokenfleet.cli", "up", "--data-dir", str(data_dir)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert second.returncode == 1
        assert f"process {up.process.pid}" in second.stderr

        # any one service killed: back at once, under a new process id that the ready file tells
        for name in ("fleetmind", "gateway", "nats", "postgres"):
            victim = ready["pids"][name]
            os.kill(victim, signal.SIGKILL)
            end = time.monotonic() + 20
            while up.ready["pids"].get(name) in (victim, None):
                assert time.monotonic() < end, name
                time.sleep(0.05)
        end = time.monotonic() + 30
        while up.ask()[0] != 200:
            assert time.monotonic() < end
        assert up.stop(signal.SIGINT) == 0
    assert leftovers(data_dir) == []

    with run_up(data_dir) as up:
        again = up.ready
        assert {k: again[k] for k in ("api", "key", "nats", "postgres", "emulators")} == {
            k: ready[k] for k in ("api", "key", "nats", "postgres", "emulators")
        }
        assert up.ask()[0] == 200
        # kill -9 of `up` itself takes everything with it
        up.process.kill()
        up.process.wait()
        end = time.monotonic() + 20
        while left := leftovers(data_dir):
            assert time.monotonic() < end, left
            time.sleep(0.05)

    with run_up(data_dir) as up:
        assert up.ready["key"] == ready["key"]
        assert up.ask()[0] == 200
    assert leftovers(data_dir) == []


def test_a_wrong_fleet_file_starts_nothing(tmp_path: Path) -> None:
    """Exit code 2 and the findings, before any process or directory is made for them."""
    path = tmp_path / "fleet.toml"
    path.write_text(REFERENCE.read_text().replace('zones = ["eu"]', 'zones = ["moon"]'))
    done = subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", "up", "--fleet", str(path), "--data-dir", str(tmp_path / "state")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "moon" in done.stderr
    assert leftovers(tmp_path) == []
