"""Server-sent events from bytes, wherever the reads happen to be cut. Pure.

Decides where one event ends and which of its bytes are data. Refuses to know what the data means.
Source: WHATWG HTML, "Server-sent events", event stream interpretation (comments, CRLF, several data lines).
"""


class Splitter:
    """Bytes in, whole event data out; keeps what is not whole yet."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that these bytes complete, comments left out."""
        buffer = self._rest + data
        if b"\r" in buffer:
            # A CR at the very end may be half of a CRLF: it waits for the next read.
            held = b"\r" if buffer.endswith(b"\r") else b""
            whole = buffer[: len(buffer) - len(held)]
            buffer = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._rest = buffer.split(b"\n\n")
        return [found for event in events if (found := _data(event)) is not None]

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished event are left: at the end of a stream it was cut."""
        return bool(self._rest.strip())


def _data(event: bytes) -> bytes | None:
    lines = event.split(b"\n")
    if len(lines) == 1 and lines[0].startswith(b"data: "):
        return lines[0][6:]
    found = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(found) if found else None
