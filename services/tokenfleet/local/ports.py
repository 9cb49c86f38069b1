"""Which TCP ports local servers listen on. Knows nothing of who listens."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from tokenfleet.local.errors import PortInUseError

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000


def _ephemeral_start() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def free_ports(count: int, *, host: str = "127.0.0.1", prefer: tuple[int, ...] = ()) -> list[int]:
    """`count` different ports free on `host`; those in `prefer` first, where they are free.

    They lie below the kernel's ephemeral range: a server that is killed and restarted keeps its port, and a port of
    the ephemeral range may meanwhile be the source port of anybody's connection (a client that reconnects to its own
    dead server can even connect to itself). The check holds no port, so a race with a stranger remains possible:
    whoever binds must say clearly when it fails.
    """
    found: list[int] = []
    top = _ephemeral_start()
    low = _FIRST if top > _FIRST + 2_000 else 1_024
    dice = random.SystemRandom()
    with ExitStack() as held:

        def take(port: int) -> bool:
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # what a server does too: a port that only has connections in TIME_WAIT is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
            found.append(port)
            return True

        for port in prefer:
            if len(found) < count and port not in found:
                take(port)
        tries = 0
        while len(found) < count:
            tries += 1
            if tries > 200 * count + 1_000:
                raise PortInUseError(f"no {count} free ports on {host} between {low} and {top}")
            port = dice.randrange(low, top)
            if port not in found:
                take(port)
    return found


def require_port(port: int, *, host: str = "127.0.0.1") -> None:
    """Check that a port somebody asked for by number is free; raises `PortInUseError` naming it."""
    if free_ports(1, host=host, prefer=(port,)) != [port]:
        raise PortInUseError(f"port {port} on {host} is in use: stop what listens there or choose another one")
