"""What a core was told and what it said, kept in a file; and the same core asked again from it.

Decides only how a recording is written and read. A core is a pure function of its inputs, so a fresh one that is told
the same at the same times must say the same, byte for byte: `replay` says where it does not. That makes a decision of
last night a test of today, and proves that nothing but its inputs went into it. Refuses to know any core.

One JSON object a line. Written when `TOKENFLEET_RECORD_DIR` is set; it grows by every message the process reads, so it
is for an hour's look, not for always. Holds no text and no keys, as the bus does not.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenfleet.effects import Effect, Publish
from tokenfleet_schemas import codec
from tokenfleet_schemas.event import Event

Call = Literal["handle", "wake", "resumed", "resign", "mark", "restore", "said", "reconfigure"]


class RecordingError(ValueError):
    """The file is no recording, or holds what cannot be told again."""


class Line(msgspec.Struct, omit_defaults=True):
    """One call, or one event that the core published."""

    call: Call
    at_ms: float = 0.0
    event: msgspec.Raw = msgspec.Raw()
    scope: str = ""
    term: int = 0
    data: str = ""


_decoder = msgspec.json.Decoder(Line)


class Recorder:
    """Appends to one file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=1 << 16)

    def write(self, call: Call, at_ms: float = 0.0, *, scope: str = "", term: int = 0, data: bytes = b"") -> None:
        """A call without an event."""
        text = base64.b64encode(data).decode()
        self._put(Line(call=call, at_ms=at_ms, scope=scope, term=term, data=text))

    def event(self, call: Literal["handle", "said"], event: Event, at_ms: float = 0.0) -> None:
        """An event that the core heard, or said."""
        self._put(Line(call=call, at_ms=at_ms, event=msgspec.Raw(codec.encode(event))))

    def _put(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Write out what is buffered."""
        self._file.close()


class Replayed(msgspec.Struct, frozen=True):
    """What a fresh core made of a recording."""

    calls: int
    #: events that the recorded core said
    said: int
    #: where the fresh one said something else: (number of the event, recorded, said now); empty: None
    differences: list[tuple[int, bytes | None, bytes | None]]


def replay(path: Path, core: Any, inputs: Sequence[type[Event]] = ()) -> Replayed:
    """Tell a fresh core what the recorded one was told. Raises `RecordingError`; the core's own errors pass.

    `inputs` are the types of what its shell told it beside messages of the bus.
    """
    own: Any = msgspec.json.Decoder(reduce(or_, inputs)) if inputs else None

    def event_of(data: bytes) -> Event:
        try:
            return codec.decode(data)
        except codec.ContractError:
            if own is None:
                raise
            found: Event = own.decode(data)
            return found

    recorded: list[bytes] = []
    said: list[bytes] = []
    calls = 0

    def perform(effects: Iterable[Effect]) -> None:
        said.extend(codec.encode(effect.event) for effect in effects if isinstance(effect, Publish))

    told: dict[str, Callable[[Line], object]] = {
        "handle": lambda line: perform(core.handle(event_of(bytes(line.event)), line.at_ms)),
        "wake": lambda line: perform(core.wake(line.at_ms)),
        "resumed": lambda line: perform(core.resumed(line.at_ms)),
        "resign": lambda line: perform(core.resign(line.scope, line.at_ms)),
        "mark": lambda line: core.mark(line.scope, line.term, line.at_ms),
        "restore": lambda line: core.restore(base64.b64decode(line.data)),
    }
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = _decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise RecordingError(f"{path}, line {number}: {error}") from None
        if line.call == "said":
            recorded.append(bytes(line.event))
            continue
        tell = told.get(line.call)
        if tell is None:
            raise RecordingError(f"{path}, line {number}: another fleet file was read; a recording does not hold it")
        calls += 1
        tell(line)
    count = max(len(recorded), len(said))
    differences = [
        (n, recorded[n] if n < len(recorded) else None, said[n] if n < len(said) else None)
        for n in range(count)
        if recorded[n : n + 1] != said[n : n + 1]
    ]
    return Replayed(calls, len(recorded), differences)
