"""CPU time of a whole process tree, read from the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenfleet.replay import cpu

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc on this system")

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_children_and_children_that_ended_are_counted() -> None:
    """A database ends its backends between two readings: their work was still work."""
    usage = cpu.TreeUsage(os.getpid())
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)
    with subprocess.Popen([sys.executable, "-S", "-c", BURN + "input()"], stdin=subprocess.PIPE) as running:
        try:
            while (used := usage.seconds()) is not None and used < 0.55:
                pass
            assert running.pid in {pid for pid, _ in cpu.descendants(os.getpid())}
        finally:
            running.communicate(b"\n")
    final = usage.seconds()
    assert used is not None
    assert final is not None
    assert final >= used - 0.02


def test_a_process_is_told_from_a_later_one_with_its_id() -> None:
    """Process ids come back: what is to be ended must be the very process that was started."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    started = dict(cpu.descendants(child.pid))[child.pid]
    assert cpu.alive(child.pid, started)
    assert not cpu.alive(child.pid, started - 1)
    child.communicate(b"\n")
    assert not cpu.alive(child.pid, started)
