"""The supervisor of `tokenfleet up`, with small scripts as its processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tokenfleet.local.errors import LocalError, NotReadyError
from tokenfleet.local.processes import Command, wait_until_gone
from tokenfleet.local.supervisor import Spec, Supervisor

#: announces itself in a file, then waits for SIGTERM
STEADY = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.sigwait({signal.SIGTERM})
"""


class Stage:
    """A supervisor, what it said, and specs made of scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[tuple[str, str]] = []
        self.supervisor = Supervisor(root / "logs", on_event=lambda name, what: self.said.append((name, what)))

    def command(self, script: str, *words: str) -> Command:
        argv = [sys.executable, "-c", textwrap.dedent(script), *words]
        return Command(argv=argv, env=dict(os.environ))

    def spec(self, name: str, script: str = STEADY, *, grace_s: float = 8.0) -> Spec:
        mark = self.root / f"{name}.up"

        async def ready(pid: int) -> bool:
            return mark.exists() and mark.read_text() == str(pid)

        return Spec(name=name, command=lambda: self.command(script, str(mark)), ready=ready, grace_s=grace_s)

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not check():
                await asyncio.sleep(0.01)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.supervisor.kill_all()


async def test_a_crashed_process_comes_back(stage: Stage) -> None:
    """A service died at night and nobody noticed until morning: whatever is killed runs again at once, same command."""
    spec = stage.spec("one")
    await stage.supervisor.start(spec)
    first = stage.supervisor.pids()["one"]

    os.kill(first, signal.SIGKILL)
    await stage.until(lambda: stage.supervisor.pids().get("one", first) != first)
    second = stage.supervisor.pids()["one"]
    await stage.until(lambda: (stage.root / "one.up").read_text() == str(second))

    assert stage.supervisor.restarts() == {"one": 1}
    assert any("status -9" in what for _, what in stage.said)


async def test_a_helper_does_not_outlive_its_crashed_leader(stage: Stage) -> None:
    """The helper of a killed service kept the port, so the service could never listen again."""
    script = """
    import pathlib, subprocess, sys, os
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.sigwait({signal.SIGUSR1})"])
    pathlib.Path(sys.argv[1] + ".helper").write_text(str(helper.pid))
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    helper.wait()
    """
    await stage.supervisor.start(stage.spec("leader", script))
    helper = int((stage.root / "leader.up.helper").read_text())

    os.kill(stage.supervisor.pids()["leader"], signal.SIGKILL)

    assert await asyncio.to_thread(wait_until_gone, helper, timeout_s=10)


async def test_stopping_goes_in_order_and_leaves_nothing(stage: Stage) -> None:
    """The database was stopped before the services that still had facts to write."""
    order = stage.root / "order"
    script = f"""
    import os, pathlib, signal, sys
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    signal.sigwait({{signal.SIGTERM}})
    with open({str(order)!r}, "a") as out:
        out.write(pathlib.Path(sys.argv[1]).stem + " ")
    """
    await stage.supervisor.start(*(stage.spec(name, script) for name in ("database", "service", "gateway")))
    pids = list(stage.supervisor.pids().values())

    await stage.supervisor.stop(["gateway"], ["service"], ["database"])

    assert order.read_text().split() == ["gateway", "service", "database"]
    assert all(wait_until_gone(pid, timeout_s=0.1) for pid in pids)
    assert stage.supervisor.pids() == {}


async def test_a_process_that_ignores_the_request_to_end_is_killed(stage: Stage) -> None:
    """One hung service made Ctrl-C hang too."""
    script = """
    import os, pathlib, signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    signal.sigwait({signal.SIGUSR1})
    """
    await stage.supervisor.start(stage.spec("deaf", script, grace_s=0.2))
    pid = stage.supervisor.pids()["deaf"]
    began = time.monotonic()
    await stage.supervisor.stop()
    assert time.monotonic() - began < 5
    assert wait_until_gone(pid, timeout_s=0.1)


async def test_a_process_that_keeps_ending_fails_the_start_with_its_own_words(stage: Stage) -> None:
    """`up` hung for ever on a service whose log said at once what was wrong."""
    spec = stage.spec("bad", "import sys; sys.exit('cannot find the thing')")
    with pytest.raises(NotReadyError, match="cannot find the thing"):
        await stage.supervisor.start(spec)
    assert stage.supervisor.restarts()["bad"] >= 3


async def test_wrong_settings_are_not_tried_again(stage: Stage) -> None:
    """Exit status 2 means that the input is wrong: the next attempt would only hide the message."""
    spec = stage.spec("bad", "import sys; print('no such setting'); sys.exit(2)")
    with pytest.raises(NotReadyError, match="refuses its settings"):
        await stage.supervisor.start(spec)
    assert stage.supervisor.restarts()["bad"] == 1


async def test_a_failed_step_says_what_it_printed_this_time(stage: Stage) -> None:
    """The log of an earlier run was quoted as the reason of today's failure."""
    with pytest.raises(LocalError, match="old"):
        await stage.supervisor.run_once("step", stage.command("import sys; sys.exit('old reason')"))
    with pytest.raises(LocalError, match="status 3") as caught:
        await stage.supervisor.run_once("step", stage.command("import sys; print('new reason'); sys.exit(3)"))
    assert "new reason" in str(caught.value)
    assert "old reason" not in str(caught.value)
    await stage.supervisor.run_once("step", stage.command("pass"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    """kill -9 of `up` left twenty processes behind that held every port."""
    script = f"""
    import asyncio, os, pathlib, sys
    from tokenfleet.local.processes import Command
    from tokenfleet.local.supervisor import Spec, Supervisor
    root = pathlib.Path({str(tmp_path)!r})
    async def main():
        supervisor = Supervisor(root / "logs", on_event=lambda *_: None)
        argv = [sys.executable, "-c", "import signal; signal.sigwait({{signal.SIGUSR1}})"]
        await supervisor.start(Spec(name="child", command=lambda: Command(argv=argv, env=dict(os.environ))))
        print(supervisor.pids()["child"], flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert wait_until_gone(child, timeout_s=10)
