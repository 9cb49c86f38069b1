"""Which TCP ports local servers listen on. Knows nothing of who listens."""

import fcntl
import os
import random
import socket
import tempfile
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


class Claims:
    """Ports that a local fleet means to use, from their choice to its end, as other fleets of this user see it.

    Between the choice of a port and the server's `listen` lie seconds, in which a second fleet would choose the same.
    So each port is claimed by a lock on a file of its number, which the kernel drops with the process. Strangers do not
    look: for them the check in `choose_ports` is all there is.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(tempfile.gettempdir()) / f"tokenfleet-ports-{os.getuid()}"
        self._held: dict[int, int] = {}

    def take(self, port: int) -> bool:
        """Whether the port is ours now; False when another fleet has it; `PortInUseError` if none can be kept."""
        if port in self._held:
            return True
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            file = os.open(self._directory / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PortInUseError(f"port {port} cannot be claimed for this fleet: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._held[port] = file
        return True

    def keep(self, ports: set[int]) -> None:
        """Give all others back."""
        for port in set(self._held) - ports:
            os.close(self._held.pop(port))

    def close(self) -> None:
        """Give all back."""
        self.keep(set())


def choose_ports(wishes: Mapping[str, int], *, host: str = "127.0.0.1", claims: Claims | None = None) -> dict[str, int]:
    """A free port per name: the wished one if it is free (0: no wish), else any; all different.

    They lie below the kernel's ephemeral range: a server that is killed and restarted keeps its port, and a port of
    the ephemeral range may meanwhile be the source port of anybody's connection (a client that reconnects to its own
    dead server can even connect to itself). The check holds no port: other fleets are kept off by `claims`, a race with
    a stranger remains possible, and whoever binds must say clearly when it fails. Raises `PortInUseError` when nothing
    is free.
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
            return claims is None or claims.take(port)

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
    if claims is not None:
        claims.keep(set(chosen.values()))
    return {name: chosen[name] for name in wishes}


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """`count` different free ports."""
    return list(choose_ports({str(number): 0 for number in range(count)}, host=host).values())


def require_port(port: int, *, host: str = "127.0.0.1", claims: Claims | None = None) -> None:
    """Check that a port somebody asked for by number is free; raises `PortInUseError` naming it."""
    if choose_ports({"": port}, host=host, claims=claims)[""] != port:
        raise PortInUseError(f"port {port} on {host} is in use: stop what listens there or choose another one")
