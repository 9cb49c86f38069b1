"""One embedded server as tests and scripts hold it: start, stop, kill, restart on the same port and data."""

import abc
import signal
import subprocess
import time
from pathlib import Path

from tokenfleet.local.errors import NotReadyError
from tokenfleet.local.processes import Command, signal_group, spawn, stop


class Server(abc.ABC):
    """A server process with its data directory; a context manager that starts and stops it.

    The supervisor uses only `prepare`, `command` and `is_ready`; the rest is for whoever owns one server alone.
    """

    name: str
    log: Path
    _process: "subprocess.Popen[bytes] | None" = None

    @abc.abstractmethod
    def prepare(self) -> None:
        """Write configuration and initial data; safe to repeat. Raises `LocalError`."""

    @abc.abstractmethod
    def command(self) -> Command:
        """What to run."""

    @abc.abstractmethod
    def is_ready(self, pid: int) -> bool:
        """Whether the process with this id answers."""

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Start it and wait until it answers; no-op while it runs. Raises `NotReadyError`."""
        if self.pid is not None:
            return
        self.prepare()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = process = spawn(self.command(), self.log)
        end = time.monotonic() + timeout_s
        while not self.is_ready(process.pid):
            status = process.poll()
            if status is not None or time.monotonic() > end:
                self.stop(grace_s=1.0)
                what = f"ended with status {status}" if status is not None else "stayed silent"
                raise NotReadyError(f"{self.name} {what}; its log ends: {log_tail(self.log)}")
            time.sleep(0.01)

    def stop(self, *, grace_s: float = 10.0) -> None:
        """End it in order; no-op when it does not run."""
        if self._process is not None:
            stop(self._process, self.command(), grace_s=grace_s)
            self._process = None

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Stop and start on the same port and data."""
        self.stop()
        self.start()

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_tail(log: Path, *, characters: int = 600) -> str:
    """The last words of a log, for an error message."""
    try:
        return log.read_bytes()[-characters:].decode("utf-8", "replace").strip() or "(empty)"
    except OSError as error:
        return f"({error})"
