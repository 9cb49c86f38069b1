"""A recording told to a fresh core: the same inputs give the same words, and what does not is shown."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.runtime.recording import Recorder, RecordingError, replay
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.placement import PlacementOwned, PlacementWithdrawn


def withdrawn(request_id: str, at_ms: float = 0.0) -> PlacementWithdrawn:
    """Any event."""
    return PlacementWithdrawn(
        id=f"{request_id}:withdrawn",
        time_unix_ms=int(at_ms),
        request_id=request_id,
        gateway="g",
        model="m",
        version="1",
        attempt=1,
        revision=0,
        moved_to="b",
    )


class Echo:
    """Says what it hears, stamped; after `restore` and `mark` with what they brought."""

    def __init__(self, impure: float = 0.0) -> None:
        self.impure = impure
        self.prefix = ""

    def handle(self, message: Event, now_ms: float) -> Iterator[Effect]:
        yield Note("heard")
        yield Publish(withdrawn(f"{self.prefix}{message.id}", now_ms + self.impure))

    def wake(self, now_ms: float) -> Iterator[Effect]:
        yield Publish(withdrawn(f"{self.prefix}wake", now_ms))

    def resign(self, scope: str, now_ms: float) -> Iterator[Effect]:
        yield Publish(withdrawn(f"resign {scope}", now_ms))

    def restore(self, data: bytes) -> None:
        self.prefix = data.decode()

    def mark(self, scope: str, term: int, now_ms: float) -> PlacementOwned:
        self.prefix += f"{scope} {term} "
        return PlacementOwned(id="mark", scope=scope, owner="me", model="m")


def recorded(path: Path) -> Path:
    """What a runner writes of an `Echo`."""
    recorder, core = Recorder(path), Echo()

    def say(effects: Iterator[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                recorder.event("said", effect.event)

    recorder.write("restore", data=b"old ")
    core.restore(b"old ")
    recorder.write("mark", 10.5, scope="pool", term=3)
    core.mark("pool", 3, 10.5)
    for n in range(3):
        recorder.event("handle", withdrawn(f"r{n}"), 20.25 + n)
        say(core.handle(withdrawn(f"r{n}"), 20.25 + n))
    recorder.write("wake", 30.0)
    say(core.wake(30.0))
    recorder.write("resign", 31.0, scope="pool")
    say(core.resign("pool", 31.0))
    recorder.close()
    return path


def test_a_pure_core_says_the_same_again(tmp_path: Path) -> None:
    """State that was restored, terms that were issued and the time of every call are inputs too."""
    found = replay(recorded(tmp_path / "sub" / "echo.jsonl"), Echo())
    assert (found.calls, found.said, found.differences) == (7, 5, [])


def test_an_impure_core_is_found(tmp_path: Path) -> None:
    """A core that reads a clock of its own says something else the second time."""
    found = replay(recorded(tmp_path / "echo.jsonl"), Echo(impure=1.0))
    assert [number for number, _, _ in found.differences] == [0, 1, 2]
    _, before, now = found.differences[0]
    assert before is not None
    assert now is not None
    assert b'"time_unix_ms":20' in before
    assert b'"time_unix_ms":21' in now


def test_words_that_are_missing_are_differences(tmp_path: Path) -> None:
    """A recording that was cut in the middle of an answer."""
    path = recorded(tmp_path / "echo.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    found = replay(path, Echo())
    assert [(number, before) for number, before, _ in found.differences] == [(4, None)]


def test_what_cannot_be_told_again_is_an_error(tmp_path: Path) -> None:
    """A fleet file that was read meanwhile is not in the recording; other files are none."""
    path = recorded(tmp_path / "echo.jsonl")
    recorder = Recorder(path)
    recorder.write("reconfigure", 40.0)
    recorder.close()
    with pytest.raises(RecordingError, match="another fleet file"):
        replay(path, Echo())
    path.write_text("no JSON\n")
    with pytest.raises(RecordingError, match="line 1"):
        replay(path, Echo())
