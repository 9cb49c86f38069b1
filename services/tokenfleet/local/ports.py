"""Which TCP ports local servers listen on. Knows nothing of who listens."""

import random
import socket
from collections.abc import Mapping
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


def choose_ports(wishes: Mapping[str, int], *, host: str = "127.0.0.1") -> dict[str, int]:
    """A free port per name: the wished one if it is free (0: no wish), else any; all different.

    They lie below the kernel's ephemeral range: a server that is killed and restarted keeps its port, and a port of
    the ephemeral range may meanwhile be the source port of anybody's connection (a client that reconnects to its own
    dead server can even connect to itself). The check holds no port, so a race with a stranger remains possible:
    whoever binds must say clearly when it fails. Raises `PortInUseError` when nothing is free.
    """
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
                # a bound socket that does not listen shares its port with another one under SO_REUSEADDR
                probe.listen(1)
            except OSError:
                return False
            return True

        chosen = {name: port for name, port in wishes.items() if port and take(port)}
        for name in wishes:
            tries = 0
            while name not in chosen:
                port = dice.randrange(low, top)
                if take(port):
                    chosen[name] = port
                tries += 1
                if tries > 1_000:
                    raise PortInUseError(f"no free port on {host} between {low} and {top}")
    return {name: chosen[name] for name in wishes}


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """`count` different free ports."""
    return list(choose_ports({str(number): 0 for number in range(count)}, host=host).values())


def require_port(port: int, *, host: str = "127.0.0.1") -> None:
    """Check that a port somebody asked for by number is free; raises `PortInUseError` naming it."""
    if choose_ports({"": port}, host=host)[""] != port:
        raise PortInUseError(f"port {port} on {host} is in use: stop what listens there or choose another one")
