"""How site agents measure the network between them: round trips by TCP connections, bandwidth by a timed transfer.

Decides how a connection and a transfer become numbers. What is measured is what a transfer of that size gets, TCP's
slow start included: a prompt's body gets no more. Refuses to know what follows from the numbers.
"""

import asyncio
import socket
from urllib.parse import urlsplit

import aiohttp

#: a transfer is cut after this; what came until then is the measurement, s
TRANSFER_S_MAX = 10.0


async def throughput(session: aiohttp.ClientSession, url: str, size: int) -> float | None:
    """Bytes/s that a transfer of `size` bytes from another site's agent gets; None where nothing was measured."""
    loop = asyncio.get_running_loop()
    first_s = last_s = 0.0
    first = taken = 0
    try:
        async with asyncio.timeout(TRANSFER_S_MAX):
            limits = aiohttp.ClientTimeout(total=None)
            async with session.get(f"{url.rstrip('/')}/probe", params={"bytes": str(size)}, timeout=limits) as answer:
                if answer.status != 200:
                    return None
                async for chunk in answer.content.iter_any():
                    last_s = loop.time()
                    taken += len(chunk)
                    if not first:
                        first_s, first = last_s, taken
                    if taken >= size:
                        break
    except TimeoutError:
        last_s = loop.time()
    except (aiohttp.ClientError, OSError):
        return None
    # the clock runs from the first piece: the way there and the other's thinking are not bandwidth
    if taken <= first:
        # nothing after it in all that time, or all in one piece
        return taken / TRANSFER_S_MAX if 0 < taken < size else None
    return (taken - first) / max(last_s - first_s, 1e-4)


async def connect_ms(url: str, timeout_ms: float) -> float | None:
    """How long a TCP connection to a URL's host takes, ms: one round trip, and a refusal is one too. None: lost."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            # the name is looked up before the clock starts
            family, kind, number, _, address = (await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM))[
                0
            ]
            with socket.socket(family, kind, number) as connection:
                connection.setblocking(False)
                began_s = loop.time()
                try:
                    await loop.sock_connect(connection, address)
                except ConnectionRefusedError:
                    pass  # the host answered
                return (loop.time() - began_s) * 1000
    except (OSError, TimeoutError):
        return None
