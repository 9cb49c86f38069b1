"""nats-py's client without its queues between the socket and the reader, and between the speaker and the socket.

As nats-py has it, a message that arrives wakes the read loop, which wakes the subscription's task, which calls back;
one that leaves wakes the flusher's task. On a road of six short hops that is most of what a hop costs. Here a
subscription may take its messages in the read loop itself, and a message is written when it is said (uvloop gathers a
turn's writes into one system call).

Decides nothing about messages. Leans on inner parts of nats-py (`Client._process_msg`, `_transport`); where another
version of it has others, `DIRECT` is false and its public ways are used.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

log = logging.getLogger("tokenfleet.bus")

#: (subject, reply, data, headers of a status message): called in the order of arrival, must not wait
Take = Callable[[str, str, bytes, dict[str, str] | None], None]

#: bytes that may wait in the socket's buffer before a speaker is told to wait
_BUFFER_BYTES = 1024 * 1024
_PARAMETERS = ["self", "sid", "subject", "reply", "data", "headers"]


def _supported() -> bool:
    process = getattr(Client, "_process_msg", None)
    return (
        inspect.iscoroutinefunction(process)
        and list(inspect.signature(process).parameters) == _PARAMETERS
        and all(hasattr(Client(), name) for name in ("_subs", "_transport", "_max_payload"))
    )


#: this nats-py has the inner parts that we know
DIRECT = _supported()


class DirectClient(Client):
    """A client whose subscriptions may be taken directly, and which can write without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Take] = {}

    async def listen(self, subject: str, take: Take) -> Subscription:
        """Subscribe; every message is handed to `take`, without limit on what waits."""

        async def on_message(message: Msg) -> None:
            headers = message.headers
            status = headers if headers is not None and not message.data and "Status" in headers else None
            take(message.subject, message.reply, message.data, status)

        subscription = await self.subscribe(subject, cb=on_message, pending_msgs_limit=-1, pending_bytes_limit=-1)
        if DIRECT:
            self._takers[subscription._id] = take
        return subscription

    async def leave(self, subscription: Subscription) -> None:
        """Unsubscribe; raises `nats.errors.Error` when the connection is closed."""
        self._takers.pop(subscription._id, None)
        await subscription.unsubscribe()

    def say(self, subject: str, data: bytes, message_id: str, reply: str = "") -> bool:
        """Write one message at once; False if it cannot be done now: the caller says it by `publish`, which waits."""
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
        socket.write(b"".join((line, head, data, b"\r\n")))
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(data)
        return True

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        take = self._takers.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]  # None is meant
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        status = read_status(headers) if headers and not data else None
        try:
            take(subject.decode(), reply.decode(), data, status)
        except Exception:
            log.exception("a message was not taken", extra={"subject": subject.decode()})


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
