"""How one child process is started and ended. Decides nothing about when: the supervisor and the tests do.

Every child leads its own session, so that Ctrl-C at a terminal reaches only the parent, which then stops things in
order, and so that a child can be ended together with whatever it started.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("_launch.py")


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run: `argv[0]` is an absolute path."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    #: drop to this user and group; None: stay who we are
    uid: int | None = None
    gid: int | None = None
    pass_fds: tuple[int, ...] = ()
    #: asks for an orderly end
    stop_signal: signal.Signals = signal.SIGTERM
    #: sent by the kernel when the parent is gone, however it went
    death_signal: signal.Signals = signal.SIGKILL


def spawn(command: Command, log: Path) -> "subprocess.Popen[bytes]":
    """Start it, appending its output to `log`. Raises OSError if the log cannot be written.

    To be called from the main thread: the kernel's death signal is tied to the thread that started the child.
    """
    argv = [sys.executable, "-I", "-S", str(_LAUNCHER)]
    argv += [str(-1 if who is None else who) for who in (command.uid, command.gid)]
    argv += [str(int(command.death_signal)), str(os.getpid()), "--", *command.argv]
    with log.open("ab") as out:
        return subprocess.Popen(
            argv,
            env=dict(command.env),
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=command.pass_fds,
            start_new_session=True,
        )


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signal everything in the session that `pid` leads; False if nothing is left of it."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # macOS says so for a group of zombies; Linux only if the group is a stranger's
        return False
    return True


def stop(process: "subprocess.Popen[bytes]", command: Command, *, grace_s: float = 10.0) -> int:
    """End one child: its stop signal, SIGKILL to its whole group after `grace_s`. Returns its exit status."""
    if process.poll() is None:
        process.send_signal(command.stop_signal)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)
    signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def wait_until_gone(pid: int, *, timeout_s: float) -> bool:
    """Wait for a process that is not our child to disappear; one that only waits for its parent's word is gone."""
    end = time.monotonic() + timeout_s
    while _runs(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        # the state follows the command's name, which may itself hold parentheses
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        if sys.platform == "linux":
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
