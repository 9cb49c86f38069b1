"""Server-sent events, cut anywhere."""

import pytest

from tokenfleet.replay.sse import Splitter

STREAM = b'data: {"a":"\xc3\xa9"}\n\n: ping\n\ndata: one\ndata:two\n\nevent: x\ndata: three\n\ndata: [DONE]\n\n'
EVENTS = ['{"a":"é"}'.encode(), b"one\ntwo", b"three", b"[DONE]"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_come_out_whole_at_every_cut(newline: bytes) -> None:
    """A proxy split the end marker over two reads and a router never saw the end: every offset is tried."""
    stream = STREAM.replace(b"\n", newline)
    for cut in range(len(stream) + 1):
        splitter = Splitter()
        assert splitter.feed(stream[:cut]) + splitter.feed(stream[cut:]) == EVENTS
        assert not splitter.pending


def test_a_cut_event_is_seen_as_pending() -> None:
    """A connection that ended inside an event did not end its answer."""
    splitter = Splitter()
    assert splitter.feed(b"data: [DONE]\n") == []
    assert splitter.pending
