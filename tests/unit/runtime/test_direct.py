"""The client's short way from the socket to the reader: what it takes from the bytes, and what it leaves to nats-py."""

from typing import Any

import pytest

from tokenfleet.runtime import direct
from tokenfleet.runtime.direct import DirectClient, read_status

Heard = list[tuple[str, str, bytes, dict[str, str] | None]]
HEADERS = b"NATS/1.0\r\nNats-Msg-Id: e1\r\n\r\n"


def client(heard: Heard) -> DirectClient:
    """One whose subscription 7 is taken."""
    made = DirectClient()
    made._takers[b"7"] = lambda *message: heard.append(message)
    return made


def hmsg(sid: int, data: bytes, reply: str = "$JS.ACK.S.c.1.1.1.1.0") -> bytes:
    """A message with headers as the server writes it."""
    return b"HMSG tf.x %d %s %d %d\r\n%s%s\r\n" % (
        sid,
        reply.encode(),
        len(HEADERS),
        len(HEADERS) + len(data),
        HEADERS,
        data,
    )


def test_this_nats_py_has_the_parts_that_the_short_way_needs() -> None:
    """A new nats-py that renames them must be noticed here, not by twice the delay of every hop."""
    assert direct.DIRECT


def test_whole_messages_are_handed_out_in_order() -> None:
    """Several messages arrive in one read; with and without headers, with and without a reply."""
    heard: Heard = []
    data = hmsg(7, b"one") + b"MSG tf.y 7 3\r\ntwo\r\n" + b"MSG tf.z 7 r.1 5\r\nthree\r\n"
    assert client(heard)._taken(data) == len(data)
    assert heard == [
        ("tf.x", "$JS.ACK.S.c.1.1.1.1.0", b"one", None),
        ("tf.y", "", b"two", None),
        ("tf.z", "r.1", b"three", None),
    ]


def test_everything_from_the_first_foreign_or_unfinished_byte_on_is_left() -> None:
    """PING, another subscription, half a message: nats-py must see them, and what follows them, in order."""
    half = hmsg(7, b"whole")[:-1]
    ping = b"PING\r\n" + hmsg(7, b"later")
    for rest in (ping, b"MSG tf.y 8 3\r\ntwo\r\n", half, b"HMSG tf.x 7", b"+OK\r\n"):
        heard: Heard = []
        first = hmsg(7, b"one")
        assert client(heard)._taken(first + rest) == len(first)
        assert [message[2] for message in heard] == [b"one"]


def test_a_body_that_looks_like_the_protocol_is_a_body() -> None:
    """Payloads are counted, not searched."""
    heard: Heard = []
    body = b"\r\nMSG tf.x 7 1\r\nx\r\nHMSG "
    data = hmsg(7, body) + hmsg(7, b"")
    assert client(heard)._taken(data) == len(data)
    assert [message[2] for message in heard] == [body, b""]


def test_a_reader_that_fails_on_one_message_gets_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a handler must end neither the connection nor the messages behind it."""
    heard: list[bytes] = []

    def take(_subject: str, _reply: str, data: bytes, _status: Any) -> None:
        if data == b"bad":
            raise ValueError("a fault")
        heard.append(data)

    made = DirectClient()
    made._takers[b"7"] = take
    data = hmsg(7, b"bad") + hmsg(7, b"good")
    assert made._taken(data) == len(data)
    assert heard == [b"good"]
    assert "a message was not taken" in caplog.text


def test_status_messages_are_told_from_messages() -> None:
    """A heartbeat carries the last sequence; a message's own headers are no status."""
    beat = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 12\r\nNats-Last-Stream: 40\r\n\r\n"
    assert read_status(beat) == {
        "Status": "100",
        "Description": "Idle Heartbeat",
        "Nats-Last-Consumer": "12",
        "Nats-Last-Stream": "40",
    }
    assert read_status(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert read_status(HEADERS) is None


def test_nothing_is_written_without_a_connection() -> None:
    """The caller must fall back to the way that waits, or learn that the bus is down."""
    assert not DirectClient().say("tf.x", b"data", "id")
