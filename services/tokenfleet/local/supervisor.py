"""Keeps named processes running, and ends them in order.

Decides when to start, when to start again (a back-off that grows while a process keeps dying young) and in which order
to stop. Knows nothing of what the processes do: readiness is a question that each answers for itself.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenfleet.local.errors import LocalError, NotReadyError
from tokenfleet.local.processes import Command, signal_group, spawn
from tokenfleet.local.server import log_tail

_KILL = signal.SIGKILL

#: wait before the first restart, doubled up to the last while a process keeps ending within `_YOUNG_S`
_BACKOFF_FIRST_S = 0.2
_BACKOFF_LAST_S = 5.0
_YOUNG_S = 20.0
#: a process that ends so often before it was ever ready fails the start
_START_ATTEMPTS = 3
_POLL_S = 0.1
#: exit status of a process whose settings are wrong: the next attempt would end like this one
_WRONG_INPUT = 2


async def _always(_: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One process to be kept running."""

    name: str
    #: asked anew for each start
    command: Callable[[], Command]
    #: whether the process with this id answers
    ready: Callable[[int], Awaitable[bool]] = _always
    #: time for an orderly end before SIGKILL
    grace_s: float = 8.0


@dataclass
class _Kept:
    spec: Spec
    command: Command | None = None
    process: "subprocess.Popen[bytes] | None" = None
    watcher: "asyncio.Task[None] | None" = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: int = 0
    status: int | None = None


class Supervisor:
    """Runs specs, each with its log `<logs>/<name>.log`. All calls from one event loop in the main thread.

    `on_event(name, what)` hears of every start, end and restart, for the operator's eyes.
    """

    def __init__(self, logs: Path, *, on_event: Callable[[str, str], None]) -> None:
        self.logs = logs
        self._on_event = on_event
        self._kept: dict[str, _Kept] = {}
        self._stopping = False

    def pids(self) -> dict[str, int]:
        """Process ids of what runs at this moment."""
        return {
            name: kept.process.pid
            for name, kept in self._kept.items()
            if kept.process is not None and kept.process.returncode is None
        }

    def restarts(self) -> dict[str, int]:
        """How often each process had to be started again."""
        return {name: kept.restarts for name, kept in self._kept.items()}

    def log(self, name: str) -> Path:
        """Where a process' output goes."""
        return self.logs / f"{name}.log"

    async def start(self, *specs: Spec, timeout_s: float = 60.0) -> None:
        """Start processes at once and return when all of them answer.

        Raises `NotReadyError` with the end of the log of the first that stays silent or keeps ending.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        for spec in specs:
            if spec.name in self._kept:
                raise LocalError(f"{spec.name} is already being kept")
            kept = self._kept[spec.name] = _Kept(spec)
            self._spawn(kept)
            kept.watcher = asyncio.create_task(self._watch(kept))
        await asyncio.gather(*(self._await_ready(self._kept[s.name], timeout_s) for s in specs))

    async def run_once(self, name: str, command: Command, *, timeout_s: float = 120.0) -> None:
        """Run a process to its end; raises `LocalError` with its last words if it fails."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.log(name)
        began = log.stat().st_size if log.exists() else 0
        process = spawn(command, log)
        try:
            await asyncio.wait_for(_exited(process), timeout_s)
        except TimeoutError:
            raise NotReadyError(f"{name} did not end within {timeout_s:.0f} s; its log: {log}") from None
        finally:
            signal_group(process.pid, _KILL)
            status = process.wait()
        if status != 0:
            words = log.read_bytes()[began:].decode("utf-8", "replace").strip()
            raise LocalError(f"{name} failed with status {status}: {words[-2000:]}")

    async def stop(self, *groups: Sequence[str]) -> None:
        """End the named processes, group after group, then everything else; nothing is left behind.

        Cancelling (a second Ctrl-C) ends all of them at once by SIGKILL.
        """
        self._stopping = True
        named = [name for group in groups for name in group]
        rest = [name for name in reversed(self._kept) if name not in named]
        try:
            for group in (*groups, rest):
                await asyncio.gather(*(self._stop_one(self._kept[n]) for n in group if n in self._kept))
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL to whatever still runs, with its descendants; returns when it is gone."""
        self._stopping = True
        for kept in self._kept.values():
            if kept.watcher is not None:
                kept.watcher.cancel()
            if kept.process is not None:
                # also for one that has ended: it may have left others of its group
                signal_group(kept.process.pid, _KILL)
                kept.process.wait()

    def _spawn(self, kept: _Kept) -> None:
        kept.ended.clear()
        kept.command = kept.spec.command()
        kept.process = spawn(kept.command, self.log(kept.spec.name))
        self._on_event(kept.spec.name, f"started, process {kept.process.pid}")

    async def _watch(self, kept: _Kept) -> None:
        """Start it again whenever it ends, until we stop."""
        wait_s = _BACKOFF_FIRST_S
        while True:
            assert kept.process is not None
            began = time.monotonic()
            status = kept.status = await _exited(kept.process)
            kept.ended.set()
            # helpers without their leader serve nobody and hold its port
            signal_group(kept.process.pid, _KILL)
            if self._stopping:
                return
            kept.restarts += 1
            wait_s = min(wait_s * 2, _BACKOFF_LAST_S) if time.monotonic() - began < _YOUNG_S else _BACKOFF_FIRST_S
            self._on_event(kept.spec.name, f"ended with status {status}; starting it again in {wait_s:.1f} s")
            await asyncio.sleep(wait_s)
            while True:
                try:
                    self._spawn(kept)
                    break
                except (OSError, LocalError) as error:
                    # e.g. no descriptors left: the only right thing is to keep trying, and to say so
                    self._on_event(kept.spec.name, f"cannot be started: {error}")
                    await asyncio.sleep(_BACKOFF_LAST_S)

    async def _await_ready(self, kept: _Kept, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while True:
            process = kept.process
            if process is not None and process.returncode is None and await kept.spec.ready(process.pid):
                return
            if kept.restarts and kept.status == _WRONG_INPUT:
                what = "refuses its settings"
            elif kept.restarts >= _START_ATTEMPTS:
                what = "keeps ending"
            elif time.monotonic() > end:
                what = f"did not get ready within {timeout_s:.0f} s"
            else:
                await asyncio.sleep(_POLL_S)
                continue
            log = self.log(kept.spec.name)
            raise NotReadyError(f"{kept.spec.name} {what}; its log ({log}) ends:\n{log_tail(log)}")

    async def _stop_one(self, kept: _Kept) -> None:
        process = kept.process
        if process is None or kept.watcher is None or kept.command is None:
            return
        if process.returncode is None and not kept.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(kept.command.stop_signal)
            try:
                await asyncio.wait_for(kept.ended.wait(), kept.spec.grace_s)
            except TimeoutError:
                self._on_event(kept.spec.name, f"did not end within {kept.spec.grace_s:.0f} s: killed")
        signal_group(process.pid, _KILL)
        kept.watcher.cancel()


async def _exited(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a child without a thread of its own; returns its status, negative for a signal."""
    if sys.platform == "linux" and process.poll() is None:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    while process.poll() is None:  # noqa: ASYNC110  elsewhere the kernel has no such event
        await asyncio.sleep(_POLL_S)
    assert process.returncode is not None
    return process.returncode


async def answers(url: str, *, headers: dict[str, str] | None = None, timeout_s: float = 2.0) -> bool:
    """Whether a GET is answered with 200."""

    def ask() -> bool:
        request = urllib.request.Request(url, headers=headers or {})
        # loopback: a proxy from the environment must not be asked
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError, ValueError):
            return False

    return await asyncio.to_thread(ask)
