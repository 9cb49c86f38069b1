"""Drives one URL and times each answer.

Decides when requests leave: open loop at given times (nobody waits for an answer before sending on), or closed loop
with so many clients. A bare `asyncio.Protocol` with kept connections: what the driver costs must not show in what it
measures. Its own lateness is measured and handed out with the results. (uvloop's clock counts in whole milliseconds,
hence `perf_counter`.)
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

_FIRST = b'" tok"'
_END = b"0\r\n\r\n"


@dataclass
class Load:
    """What one phase saw. Times in ms."""

    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    lag_ms: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bool] | None = None
        self._ok = False
        self._tail = b""
        self.first_s = 0.0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self, request: bytes) -> "asyncio.Future[bool]":
        """Whether a whole answer with status 200 came."""
        assert self._transport is not None
        self._done, self._ok, self._tail, self.first_s = self._loop.create_future(), False, b"", 0.0
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        if not self._tail:
            self._ok = data.startswith(b"HTTP/1.1 200")
        seen = self._tail + data
        if not self.first_s and _FIRST in seen:
            self.first_s = time.perf_counter()
        if not self._ok or seen.endswith(_END):
            self._done.set_result(self._ok and bool(self.first_s))
        self._tail = seen[-16:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is not None and not self._done.done():
            self._done.set_result(False)


class Client:
    """Kept connections to one URL; every request is the same but for a number that makes its prompt its own."""

    def __init__(self, url: str, headers: dict[str, str], body: bytes, mark: bytes) -> None:
        """`mark` stands in the body where each request's number goes, as many digits as it has bytes."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        head = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode()
        self._body, self._mark, self._number = body, mark, 0
        self._free: list[_Connection] = []
        self._all: list[_Connection] = []

    def close(self) -> None:
        """Close the connections."""
        for one in self._all:
            if one._transport is not None:
                one._transport.close()

    async def ask(self, found: Load) -> None:
        """One request."""
        while self._free and self._free[-1].closed:
            self._free.pop()
        if self._free:
            connection = self._free.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
            self._all.append(connection)
        self._number += 1
        body = self._body.replace(self._mark, b"%0*d" % (len(self._mark), self._number))
        began_s = time.perf_counter()
        ok = await connection.send(self._head + body)
        ended_s = time.perf_counter()
        if not ok:
            found.failed += 1
            if connection._transport is not None:
                connection._transport.abort()
            return
        self._free.append(connection)
        found.first_ms.append((connection.first_s - began_s) * 1000)
        found.whole_ms.append((ended_s - began_s) * 1000)

    async def open_loop(self, rate_per_s: float, seconds: float, seed: int) -> Load:
        """Poisson arrivals; returns once everything is answered."""
        loop, dice = asyncio.get_running_loop(), random.Random(seed)
        found, running = Load(), set[asyncio.Task[None]]()
        began_s = time.perf_counter()
        due_s = began_s + dice.expovariate(rate_per_s)
        while due_s < began_s + seconds:
            await asyncio.sleep(due_s - time.perf_counter())
            found.lag_ms.append((time.perf_counter() - due_s) * 1000)
            task = loop.create_task(self.ask(found))
            running.add(task)
            task.add_done_callback(running.discard)
            due_s += dice.expovariate(rate_per_s)
        await asyncio.gather(*running)
        found.seconds = time.perf_counter() - began_s
        return found

    async def closed_loop(self, clients: int, seconds: float) -> Load:
        """As fast as so many clients get answers."""
        found = Load()
        began_s = time.perf_counter()

        async def one() -> None:
            while time.perf_counter() < began_s + seconds and found.failed < 100:
                await self.ask(found)

        await asyncio.gather(*(one() for _ in range(clients)))
        found.seconds = time.perf_counter() - began_s
        return found
