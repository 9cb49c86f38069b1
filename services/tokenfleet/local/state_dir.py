"""The directory in which `tokenfleet up` keeps everything, so that a second `up` goes on where the first one ended.

    up.lock        held while an `up` runs; its process id
    state.json     the ports that were used last
    secret         the fleet's secret (mode 600)
    passwords.json of the bus's users (mode 600)
    keys.json      tenant → API key (mode 600)
    fleet.toml     the fleet file with local addresses
    env            addresses and secrets as shell variables, for the other verbs (mode 600)
    nats/ postgres/ logs/

Decides names and modes; knows nothing of who uses them.
"""

import fcntl
import json
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenfleet.local.errors import DataDirError
from tokenfleet.local.nats import write_private


def default_data_dir() -> Path:
    """`$XDG_STATE_HOME/tokenfleet`, else `~/.local/state/tokenfleet`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # the specification: a relative path is invalid and to be ignored
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "tokenfleet"


class StateDir:
    """One directory of state, owned by this process while the context lasts.

    Raises `DataDirError` on entry when another process owns it or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.fleet_file = self.root / "fleet.toml"
        self.logs = self.root / "logs"
        self.nats = self.root / "nats"
        self.postgres = self.root / "postgres"
        self._lock: int | None = None

    def __enter__(self) -> "StateDir":
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.root / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirError(f"cannot use {self.root} for state: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            self._lock = None
            raise DataDirError(
                f"another `tokenfleet up` (process {owner}) runs on {self.root}: stop it, or choose another --data-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def secret(self) -> str:
        """The fleet's secret: made once, 256 bits."""
        path = self.root / "secret"
        if not path.exists():
            write_private(path, secrets.token_hex(32) + "\n")
        return path.read_text(encoding="ascii").strip()

    def read(self, name: str) -> dict[str, Any]:
        """A JSON object kept here; empty if there is none. Raises `DataDirError` if it is damaged."""
        path = self.root / name
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DataDirError(f"{path} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise DataDirError(f"{path} is damaged: not an object")
        return found

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Replace a JSON object kept here, mode 600."""
        write_private(self.root / name, json.dumps(value, indent=2) + "\n")

    def passwords(self, users: list[str]) -> dict[str, str]:
        """A password per bus user, the same ones every time."""
        kept = self.read("passwords.json")
        known = {user: str(kept.get(user) or secrets.token_hex(24)) for user in users}
        if any(kept.get(user) != known[user] for user in users):
            self.write("passwords.json", {**kept, **known})
        return known
