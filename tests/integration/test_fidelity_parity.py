"""A live fleet, and the same decisions again: by its own cores from what they were told, and by the simulator.

The first is exact on any machine, however busy. The second compares two systems of which one runs on a real clock:
the short run only sees to it that they are about the same, the long one (soak) holds them to the goals.
"""

import asyncio
import os
from pathlib import Path

import pytest
from benchmarks.fidelity import parity

from tokenfleet import fleet as fleets
from tokenfleet.runtime.recording import Replayed, replay
from tokenfleet.tokenpilot.core import TokenPilot


def _quiet(_text: str) -> None:
    """Nobody reads it."""


def _again(recordings: Path, load: parity.Load) -> Replayed:
    """TokenPilot's recording told to a fresh core."""
    (path,) = recordings.glob("tokenpilot.*.jsonl")
    fleet = fleets.parse(parity.fleet_text(load).encode())
    core = TokenPilot(fleet, "a", replica=path.name.removeprefix("tokenpilot.").removesuffix(".jsonl"))
    core.exact.asks = True  # as its shell sets it
    return replay(path, core)


@pytest.mark.timeout(240)
async def test_a_live_fleet_decides_as_its_cores_and_the_simulator_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision that depended on anything but its inputs could be neither explained nor simulated."""
    monkeypatch.setenv("TOKENFLEET_RECORD_DIR", str(tmp_path / "recordings"))
    load = parity.Load(seconds=8.0, rate_per_s=6.0, warmup_s=1.0)
    run = await parity.live(load, _quiet)
    again = _again(tmp_path / "recordings", load)
    assert again.calls > 3 * len(run.records)
    assert again.said >= len(run.records)
    assert again.differences == []
    found = parity.compare(run)
    assert found.requests > 20
    assert len({one.live for one in found.followed.decisions}) > 1
    # A busy machine stretches what the simulation does not know of; chance would agree on one in four.
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert found.followed.same >= (0.85 if busy < 1.0 else 0.6), parity.table(found)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_parity_reaches_its_goals() -> None:
    """95% of the decisions equal, the others close, TTFT medians within 10%: on a machine with nothing else to do."""
    found = parity.compare(asyncio.run(parity.live(parity.Load(seconds=120.0), _quiet)))
    assert found.reached, parity.table(found)
