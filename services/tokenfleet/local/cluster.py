"""A whole fleet on this machine: servers, emulated engines and every service as a process of its own.

Decides which processes a fleet file needs, their ports and the order of starting and stopping. Knows of the services
only their settings (`tokenfleet.runtime.settings`) and that /readyz says when they are ready.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenfleet.fleet import Fleet, parse
from tokenfleet.local.errors import LocalError, NotReadyError
from tokenfleet.local.fleetfile import emulated, resolve, write_fleet
from tokenfleet.local.nats import NatsServer
from tokenfleet.local.ports import Claims, choose_ports, require_port
from tokenfleet.local.postgres import PostgresServer
from tokenfleet.local.processes import Command
from tokenfleet.local.server import Server
from tokenfleet.local.state_dir import StateDir
from tokenfleet.local.supervisor import Spec, Supervisor, answers
from tokenfleet.runtime.permissions import ADMIN, FLEET_SERVICES, nats_users, user_name, user_names

#: where the API listens if nobody says otherwise and it is free
PREFERRED_API_PORT = 8080
#: variables that a service process inherits although they begin with TOKENFLEET_
_INHERITED = ("TOKENFLEET_CREDENTIAL_", "TOKENFLEET_RECORD_DIR")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One service process of the fleet."""

    name: str
    service: str
    site: str = ""
    api: bool = False
    database: bool = False


def members(fleet: Fleet) -> list[Member]:
    """The service processes that a fleet needs on one machine, in the order of starting. Raises `LocalError`."""
    entries = [name for name, site in fleet.sites.items() if site.entry]
    if not entries:
        raise LocalError("the fleet has no entry site: no gateway would run (sites.NAME.entry = true)")
    found = [Member(name="emulator", service="emulator")] if emulated(fleet) else []
    for name, site in fleet.sites.items():
        if site.instances:
            found.append(Member(name=f"siteagent-{name}", service="siteagent", site=name))
            found.append(Member(name=f"tokenpilot-{name}", service="tokenpilot", site=name))
    found += [
        Member(name="fleetmind", service="fleetmind", site=entries[0]),
        Member(name="slomax", service="slomax", site=entries[0]),
        Member(name="accountant", service="accountant", site=entries[0], database=True),
        Member(name="gateway", service="gateway", site=entries[0], api=True, database=True),
    ]
    found += [
        Member(name=f"gateway-{name}", service="gateway", site=name, api=True, database=True) for name in entries[1:]
    ]
    return found


@dataclass(frozen=True, kw_only=True)
class BusUsers:
    """Who may do what on the bus: the server's list, and whose name each process bears."""

    users: list[dict[str, Any]]
    #: (service, site) → (user, password)
    of: Callable[[str, str], tuple[str, str]]


def bus_users(fleet: Fleet, passwords: Callable[[list[str]], dict[str, str]]) -> BusUsers:
    """The bus's users for this fleet, each with its own subjects only; `passwords` keeps one per user name."""
    known = passwords(user_names(fleet))

    def of(service: str, site: str) -> tuple[str, str]:
        user = user_name(service, "" if service in FLEET_SERVICES or service == ADMIN else site)
        return user, known[user]

    return BusUsers(users=[user.entry() for user in nats_users(fleet, known)], of=of)


@dataclass
class LocalFleet:
    """Starts and stops one fleet in one state directory, which the caller holds.

    `say` hears of progress in words for people. `api_port` 0: the one used last, else `PREFERRED_API_PORT`, else any.
    """

    state: StateDir
    fleet_text: str
    api_port: int = 0
    log_level: str = "info"
    say: Callable[[str], None] = lambda _text: None
    #: called with `ready()` whenever a process was started again after the fleet was up
    on_change: Callable[[], None] = lambda: None
    _up: bool = field(default=False, init=False)
    #: from the choice of ports to the end of the last server
    _claims: Claims = field(default_factory=Claims, init=False)

    def __post_init__(self) -> None:
        source = parse(self.fleet_text.encode())
        self.members = members(source)
        self.ports = self._choose_ports(source)
        self.state.write("state.json", {"ports": self.ports})
        self.fleet = write_fleet(self.state.fleet_file, resolve(self.fleet_text, ports=self.ports))
        self.users = bus_users(self.fleet, self.state.passwords)
        self.nats = NatsServer(
            self.state.nats,
            port=self.ports["nats"],
            monitor_port=self.ports["nats.monitor"],
            users=self.users.users,
            log=self.state.logs / "nats.log",
        )
        self.postgres = PostgresServer(
            self.state.postgres, port=self.ports["postgres"], log=self.state.logs / "postgres.log"
        )
        self.keys: dict[str, str] = {}
        self.supervisor = Supervisor(self.state.logs, on_event=self._on_event)

    def _choose_ports(self, fleet: Fleet) -> dict[str, int]:
        names = ["nats", "nats.monitor", "postgres"]
        for instance in emulated(fleet):
            names += [instance, f"{instance}.admin"]
        for member in self.members:
            names += [f"{member.name}.metrics"] + ([f"{member.name}.api"] if member.api else [])
        used = self.state.read("state.json").get("ports", {})
        wishes = {name: int(used.get(name, 0)) for name in names}
        if self.api_port:
            require_port(self.api_port, claims=self._claims)
            wishes["gateway.api"] = self.api_port
        elif not wishes["gateway.api"]:
            wishes["gateway.api"] = PREFERRED_API_PORT
        return choose_ports(wishes, claims=self._claims)

    # ── what the outside sees ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def api_url(self) -> str:
        """The OpenAI-compatible API of the first entry site."""
        return f"http://127.0.0.1:{self.ports['gateway.api']}/v1"

    @property
    def key(self) -> str:
        """The API key of the first tenant."""
        return self.keys[next(iter(self.fleet.tenants))]

    def ready(self) -> dict[str, Any]:
        """What `--ready-file` holds."""
        return {
            "api": self.api_url,
            "key": self.key,
            "metrics": {m.name: f"http://127.0.0.1:{self.ports[f'{m.name}.metrics']}/metrics" for m in self.members},
            "nats": self.nats.url_for(ADMIN),
            "postgres": self.postgres.url,
            "emulators": {
                name: {
                    "url": f"http://127.0.0.1:{self.ports[name]}",
                    "admin": f"http://127.0.0.1:{self.ports[f'{name}.admin']}",
                }
                for name in emulated(self.fleet)
            },
            "pids": self.supervisor.pids(),
        }

    # ── starting and stopping ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Bring everything up; returns once all of it answers. Raises `LocalError`."""
        self.say("NATS and Postgres")
        for server in (self.nats, self.postgres):
            server.prepare()
        await self.supervisor.start(*(self._server_spec(s) for s in (self.nats, self.postgres)), timeout_s=60)
        self.say("database schema and streams")
        await asyncio.gather(
            self.supervisor.run_once("migrate", self._command(["db", "migrate"], {}, database=True)),
            self.supervisor.run_once("provision", self._command(["bus", "provision"], self._bus_settings(ADMIN))),
        )
        self.say(f"{len(self.members)} services")
        specs = [self._spec(m) for m in self.members]
        await asyncio.gather(self._make_keys(), self.supervisor.start(*specs, timeout_s=90))
        await self._await_api()
        self._up = True

    async def stop(self) -> None:
        """End everything in order: who takes requests first, who keeps facts last."""
        self._up = False
        names = [m.name for m in self.members]
        gateways = [n for n in names if n.startswith("gateway")]
        deciders = [n for n in names if n not in gateways and n not in ("accountant", "emulator")]
        await self.supervisor.stop(gateways, deciders, ["accountant", "emulator"], ["postgres", "nats"])
        self._claims.close()

    def _on_event(self, name: str, what: str) -> None:
        # starts are the normal course; ends and restarts are what an operator wants to see
        if not what.startswith("started"):
            self.say(f"{name} {what}")
        elif self._up:
            self.say(f"{name} {what}")
            self.on_change()

    def _server_spec(self, server: Server) -> Spec:
        async def ready(pid: int) -> bool:
            return server.is_ready(pid)

        return Spec(name=server.name, command=server.command, ready=ready, grace_s=15.0)

    def _spec(self, member: Member) -> Spec:
        port = self.ports[f"{member.name}.metrics"]

        async def ready(_pid: int) -> bool:
            return await answers(f"http://127.0.0.1:{port}/readyz")

        return Spec(name=member.name, command=lambda: self._service_command(member), ready=ready)

    def _service_command(self, member: Member) -> Command:
        settings = {
            "TOKENFLEET_METRICS_PORT": str(self.ports[f"{member.name}.metrics"]),
            "TOKENFLEET_SITE": member.site,
        }
        if member.service != "emulator":
            settings |= self._bus_settings(member.service, member.site)
        if member.api:
            settings["TOKENFLEET_API_PORT"] = str(self.ports[f"{member.name}.api"])
        return self._command(["run", member.service], settings, database=member.database)

    def _bus_settings(self, service: str, site: str = "") -> dict[str, str]:
        user, password = self.users.of(service, site)
        return {
            "TOKENFLEET_NATS_URL": self.nats.bare_url,
            "TOKENFLEET_NATS_USER": user,
            "TOKENFLEET_NATS_PASSWORD": password,
        }

    def _command(self, words: Sequence[str], settings: Mapping[str, str], *, database: bool = False) -> Command:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_") or k.startswith(_INHERITED)}
        env |= {
            "PYTHONUNBUFFERED": "1",
            "TOKENFLEET_FLEET": str(self.state.fleet_file),
            "TOKENFLEET_HOST": "127.0.0.1",
            "TOKENFLEET_LOG_LEVEL": self.log_level,
            "TOKENFLEET_SECRET": self.state.secret(),
        }
        if database:
            env["TOKENFLEET_POSTGRES_URL"] = self.postgres.url
        # -P: a file of the user's directory must not shadow a package
        argv = [sys.executable, "-P", "-m", "tokenfleet.cli", *words]
        return Command(argv=argv, env={**env, **settings}, cwd=str(Path.cwd()))

    async def _make_keys(self) -> None:
        """One key per tenant, made once and kept in the state directory."""
        kept = {str(t): str(k) for t, k in self.state.read("keys.json").items()}
        missing = [tenant for tenant in self.fleet.tenants if tenant not in kept]
        for tenant in missing:
            command = self._command(
                ["keys", "create", "--tenant", tenant, "--label", "up", "--json"], {}, database=True
            )
            kept[tenant] = str((await _json_of(command))["key"])
        if missing:
            self.state.write("keys.json", kept)
        if not self.fleet.tenants:
            raise LocalError("the fleet has no tenants: nobody could use the API")
        self.keys = kept

    async def _await_api(self) -> None:
        """The API answers a client of ours, not merely its own health check."""
        headers = {"Authorization": f"Bearer {self.key}"}
        await _until(lambda: answers(f"{self.api_url}/models", headers=headers), 30, f"{self.api_url} does not answer")


async def _json_of(command: Command) -> dict[str, Any]:
    """What a command prints as JSON; raises `LocalError` with its error output."""
    process = await asyncio.create_subprocess_exec(
        *command.argv,
        env=dict(command.env),
        cwd=command.cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise LocalError(f"{' '.join(command.argv[4:6])} failed: {err.decode('utf-8', 'replace').strip()}")
    found: dict[str, Any] = json.loads(out)
    return found


async def _until(check: Callable[[], Awaitable[bool]], timeout_s: float, problem: str) -> None:
    """Ask until the answer is yes; raises `NotReadyError`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not await check():
        if loop.time() > end:
            raise NotReadyError(problem)
        await asyncio.sleep(0.1)
