"""nats-py's client without its queues between the socket and the reader, and between the speaker and the socket.

As nats-py has it, bytes that arrive wake the read loop, which wakes the subscription's task, which calls back; a
message that leaves wakes the flusher's task. On a road of six short hops that is most of what a hop costs. Here a
subscription may take its messages from the bytes as they come, and what is said is written with one system call at
the end of the loop's turn, or as soon as the messages that caused it are handled.

Decides nothing about messages. Whatever is not a whole message of such a subscription goes nats-py's own way. Leans on
inner parts of nats-py (`_process_msg`, `_read_loop`, `_ps`, `_transport`); where another version of it has others,
`DIRECT` is false and its public ways are used.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol import parser as protocol

log = logging.getLogger("tokenfleet.bus")

#: (subject, reply, data, headers of a status message): called in the order of arrival, must not wait
Take = Callable[[str, str, bytes, dict[str, str] | None], None]

#: bytes that may wait in the socket's buffer before a speaker is told to wait
_BUFFER_BYTES = 1024 * 1024
_MESSAGES = (b"HMSG ", b"MSG ")
#: the parser's state in which the next byte begins a line
_BETWEEN_MESSAGES = getattr(protocol, "AWAITING_CONTROL_LINE", None)
_PARAMETERS = ["self", "sid", "subject", "reply", "data", "headers"]


def _supported() -> bool:
    process = getattr(Client, "_process_msg", None)
    return (
        inspect.iscoroutinefunction(process)
        and list(inspect.signature(process).parameters) == _PARAMETERS
        and inspect.iscoroutinefunction(getattr(Client, "_read_loop", None))
        and all(hasattr(Client(), name) for name in ("_subs", "_transport", "_max_payload", "_ps"))
        and all(hasattr(Client()._ps, name) for name in ("buf", "state"))
        and _BETWEEN_MESSAGES is not None
    )


#: this nats-py has the inner parts that we know
DIRECT = _supported()


class DirectClient(Client):
    """A client whose subscriptions may be taken directly, and which can write without waiting."""

    def __init__(self) -> None:
        super().__init__()
        #: subscription's number as the server writes it → who takes its messages
        self._takers: dict[bytes, Take] = {}
        #: said and not yet written
        self._said: list[bytes] = []
        self._taking = False
        #: messages that were said and could not be written, because the connection broke meanwhile
        self.lost = 0

    async def listen(self, subject: str, take: Take) -> Subscription:
        """Subscribe; every message is handed to `take`, without limit on what waits."""

        async def on_message(message: Msg) -> None:
            headers = message.headers
            status = headers if headers is not None and not message.data and "Status" in headers else None
            take(message.subject, message.reply, message.data, status)

        subscription = await self.subscribe(subject, cb=on_message, pending_msgs_limit=-1, pending_bytes_limit=-1)
        if DIRECT:
            self._takers[b"%d" % subscription._id] = take
        return subscription

    async def leave(self, subscription: Subscription) -> None:
        """Unsubscribe; raises `nats.errors.Error` when the connection is closed."""
        self._takers.pop(b"%d" % subscription._id, None)
        await subscription.unsubscribe()

    def say(self, subject: str, data: bytes, message_id: str, reply: str = "") -> bool:
        """Write one message this turn; False if it cannot be done: the caller says it by `publish`, which waits."""
        transport = self._transport
        if not DIRECT or not self.is_connected or type(transport) is not TcpTransport:
            return False
        writer = transport._io_writer
        if writer is None or len(data) > self._max_payload:
            return False
        socket = writer.transport
        if socket.is_closing() or socket.get_write_buffer_size() > _BUFFER_BYTES:
            return False
        head = f"NATS/1.0\r\nNats-Msg-Id: {message_id}\r\n\r\n".encode()
        if head.count(b"\n") != 3:
            return False
        line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(data)}\r\n".encode()
        if not self._said and not self._taking:
            asyncio.get_running_loop().call_soon(self.write_said)
        self._said.append(b"".join((line, head, data, b"\r\n")))
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(data)
        return True

    def write_said(self) -> None:
        """Write now what was said this turn."""
        said, self._said = self._said, []
        if not said:
            return
        transport = self._transport
        writer = transport._io_writer if type(transport) is TcpTransport else None
        if writer is None or not self.is_connected or writer.transport.is_closing():
            self.lost += len(said)
        else:
            writer.transport.write(b"".join(said))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        take = self._takers.get(b"%d" % sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]  # None is meant
        else:
            self._hand(take, subject, reply, data, headers)

    def _hand(self, take: Take, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        status = read_status(headers) if headers and not data else None
        try:
            take(subject.decode(), reply.decode(), data, status)
        except Exception:
            log.exception("a message was not taken", extra={"subject": subject.decode()})

    async def _read_loop(self) -> None:
        transport = self._transport
        if DIRECT and type(transport) is TcpTransport and transport._io_reader is not None:
            self._tap(transport._io_reader)
        await super()._read_loop()

    def _tap(self, reader: asyncio.StreamReader) -> None:
        """Look at bytes before the reader gets them."""
        feed, parser = reader.feed_data, self._ps

        def tapped(data: bytes) -> None:
            # not while anything before these bytes still waits for nats-py
            if parser.buf or parser.state != _BETWEEN_MESSAGES or reader._buffer:  # type: ignore[attr-defined]
                feed(data)
                return
            self._taking = True
            try:
                end = self._taken(data)
            finally:
                self._taking = False
            self.write_said()
            if end < len(data):
                feed(data[end:] if end else data)

        reader.feed_data = tapped  # type: ignore[method-assign,assignment]  # of this one reader

    def _taken(self, data: bytes) -> int:
        """Hand out the whole messages at the front that somebody takes; returns where the rest begins."""
        at, size = 0, len(data)
        while data.startswith(_MESSAGES, at):
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            # MSG subject sid [reply] bytes | HMSG subject sid [reply] header-bytes bytes
            words = data[at:line].split()
            take = self._takers.get(words[2])
            if take is None:
                break
            begin, end = line + 2, line + 2 + int(words[-1])
            if end + 2 > size:
                break
            if words[0] == b"HMSG":
                body = begin + int(words[-2])
                headers: bytes | None = data[begin:body]
                reply = words[3] if len(words) == 6 else b""
            else:
                body, headers = begin, None
                reply = words[3] if len(words) == 5 else b""
            self._hand(take, words[1], reply, data[body:end], headers)
            at = end + 2
        return at


def read_status(headers: bytes) -> dict[str, str] | None:
    """The headers of a status message (heartbeat, flow control, end of a consumer); None if it is none.

    Source: nats-architecture-and-design ADR-4 (headers) and ADR-13 (status lines).
    """
    first, *lines = headers.decode("utf-8", "replace").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return None
    found: dict[str, Any] = {"Status": words[1]}
    if len(words) > 2:
        found["Description"] = words[2]
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found
