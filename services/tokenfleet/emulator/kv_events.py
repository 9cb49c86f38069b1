"""KV events of an emulated engine, as vLLM 0.32 publishes them: ZMQ PUB, a numbered buffer, replay over a ROUTER.

Decides how the engine model's journal of blocks reads on the wire. Refuses to know what is cached and why. Without
pyzmq there are no KV events, as on an engine that was started without them.

Source: vLLM 0.32 `vllm/distributed/kv_events.py`: frames `[topic, 8-byte big-endian sequence, payload]`, payload
`[ts, events, dp_rank]`; a DEALER asks `["", first sequence]` and hears `["", topic, sequence, payload]` up to -1.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable, Iterable
from itertools import groupby
from typing import Any

import msgspec

from tokenfleet.emulator.wire import BYTE_OFFSET
from tokenfleet.engine_model import Sequence

try:
    import zmq
    import zmq.asyncio
except ImportError:  # an emulator without the extra's library: engines without KV events
    AVAILABLE = False
else:
    AVAILABLE = True

log = logging.getLogger("tokenfleet.emulator")

#: batches and bytes kept for replay (vLLM keeps 10,000 batches; emulated engines share one process)
BUFFER_STEPS, BUFFER_BYTES = 10_000, 16 * 1024 * 1024
HIGH_WATER_MARK = 100_000
_END = (-1).to_bytes(8, "big", signed=True)
_IDS = bytes((byte + BYTE_OFFSET) & 0xFF for byte in range(256))

#: (sequence, number of its block): stored; (None, name): removed; (None, None): all cleared
Entry = tuple[Sequence | None, Any]


class Publisher:
    """One engine's KV events on two ports of its own."""

    def __init__(self, name: str, model: str, block_tokens: int) -> None:
        self.topic = f"kv@{name}@{model}"
        self._block_tokens = block_tokens
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered = 0
        self._sockets: list[Any] = []
        self._ports: tuple[int, int] = (0, 0)
        self._answering: asyncio.Task[None] | None = None

    def start(self, context: Any, host: str) -> None:
        """Listen on two free ports of an interface."""
        where = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        events = context.socket(zmq.PUB, socket_class=zmq.Socket)
        replays = context.socket(zmq.ROUTER)
        self._sockets = [events, replays]
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.IPV6, ":" in host)
            socket.bind(where)
        port_of = [int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]) for socket in self._sockets]
        self._ports = (port_of[0], port_of[1])
        self._answering = asyncio.get_running_loop().create_task(self._answer(replays))

    async def stop(self) -> None:
        """Close both."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        for socket in self._sockets:
            socket.close()
        self._sockets = []

    def restart(self) -> None:
        """The engine's process began anew: numbers start at 0, nothing can be replayed, and nobody is told."""
        self._sequence, self._buffered = 0, 0
        self._buffer.clear()

    def source(self) -> dict[str, Any]:
        """What `/kv_event_sources` says of this publisher."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._ports[0]}",
            "replay_endpoint": f"tcp://*:{self._ports[1]}",
            "buffer_steps": BUFFER_STEPS,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": self.topic,
        }

    def publish(self, entries: Iterable[Entry]) -> None:
        """One step's journal as one batch."""
        events = list(self._events(entries))
        if not events or not self._sockets:
            return
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._buffer.append((sequence, payload))
        self._buffered += len(payload)
        while len(self._buffer) > BUFFER_STEPS or self._buffered > BUFFER_BYTES:
            self._buffered -= len(self._buffer.popleft()[1])
        # A PUB drops for slow readers and never waits.
        self._sockets[0].send_multipart([self.topic.encode(), sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _events(self, entries: Iterable[Entry]) -> Iterable[dict[str, Any]]:
        for seq, group in groupby(entries, key=lambda entry: entry[0]):
            if seq is None:
                names = [name for _, name in group]
                while names:
                    cleared = names.index(None) if None in names else len(names)
                    if cleared:
                        hashes = [_number(name) for name in names[:cleared]]
                        yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
                    if cleared < len(names):
                        yield {"type": "AllBlocksCleared"}
                    names = names[cleared + 1 :]
                continue
            # Neighbours travel together, each after the first being the next one's parent.
            for _, run in groupby(enumerate(index for _, index in group), key=lambda pair: pair[1] - pair[0]):
                indices = [index for _, index in run]
                yield self._stored(seq, indices[0], indices[-1] + 1)

    def _stored(self, seq: Sequence, first: int, last: int) -> dict[str, Any]:
        call, text, size = seq.owner.call, seq.owner.text, self._block_tokens
        data = call.prompt if last * size <= len(call.prompt) else call.prompt + text.encode()
        # As vLLM: the adapter's name with every block, the salt with a prompt's first.
        named = [call.adapter] if call.adapter else []
        extra: list[list[str] | None] = [[*named] or None for _ in range(last - first)]
        if first == 0 and call.salt:
            extra[0] = [*named, call.salt.decode()]
        names = seq.hashes
        return {
            "type": "BlockStored",
            "block_hashes": [_number(name) for name in names[first:last]],
            "parent_block_hash": _number(names[first - 1]) if first else None,
            "token_ids": list(data[first * size : last * size].translate(_IDS)),
            "block_size": size,
            "lora_id": 1 if call.adapter else None,
            "medium": "GPU",
            "lora_name": call.adapter or None,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    async def _answer(self, socket: Any) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a replay request of %d frames is not answered", len(frames))
                continue
            peer, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._buffer):
                if sequence >= start:
                    await socket.send_multipart([peer, b"", self.topic.encode(), sequence.to_bytes(8, "big"), payload])
            await socket.send_multipart([peer, b"", b"", _END, b""])


def context() -> Any:
    """What the sockets of one emulator live in."""
    return zmq.asyncio.Context()


def _number(name: Hashable) -> int:
    assert isinstance(name, bytes)
    return int.from_bytes(name, "big")
