"""`tokenfleet bus provision|config`: the bus's streams, and its users with what each may do."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from tokenfleet.fleet import Fleet
    from tokenfleet.runtime.settings import Settings


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("bus", help="the bus: streams and users")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    provision = actions.add_parser(
        "provision",
        help="create or update every stream and bucket",
        description="Create or update every stream and bucket, as the bus's admin (TOKENFLEET_NATS_USER). "
        "Services with users of their own wait for it.",
    )
    provision.add_argument("--json", action="store_true", help="print one JSON object")
    config = actions.add_parser(
        "config",
        help="print a configuration for nats-server",
        description="Print a configuration for nats-server: one user per service and site, each with its own subjects. "
        "Passwords are left to the environment: $TF_NATS_PASSWORD_<USER>, for instance TF_NATS_PASSWORD_GATEWAY_A; "
        "they must begin with a letter, or nats-server takes them for numbers.",
    )
    config.add_argument("--fleet", metavar="FILE", help="the fleet file (TOKENFLEET_FLEET)")
    config.add_argument("--listen", default="0.0.0.0:4222", metavar="HOST:PORT")
    config.add_argument("--monitor", default="0.0.0.0:8222", metavar="HOST:PORT")
    config.add_argument("--store-dir", default="/data", metavar="DIR", help="where JetStream keeps its files")


def run(args: argparse.Namespace) -> int:
    return {"provision": _provision, "config": _config}[args.action](args)


def _provision(args: argparse.Namespace) -> int:
    import asyncio

    from tokenfleet.runtime.bus import Bus, BusError
    from tokenfleet.runtime.clock import Clock
    from tokenfleet_schemas.streams import STREAMS

    settings = _settings()

    async def job() -> None:
        bus = Bus(settings, Clock(), settings.replica_of("provision"))
        try:
            await bus.connect()
            await bus.provision()
        finally:
            await bus.close()

    try:
        asyncio.run(job())
    except (BusError, OSError) as error:
        raise CommandError(str(error)) from None
    names = [spec.name for spec in STREAMS]
    print(json.dumps({"streams": names}) if args.json else f"{len(names)} streams are there: {', '.join(names)}")
    return 0


def _config(args: argparse.Namespace) -> int:
    from tokenfleet.local.nats import render_config
    from tokenfleet.runtime.permissions import nats_users, user_names

    fleet = _fleet(args.fleet or _settings().fleet)
    variables = {name: f"TF_NATS_PASSWORD_{name.upper().replace('-', '_')}" for name in user_names(fleet)}
    # references must stand without quotes, which JSON cannot say
    marks = {name: f"<<{variable}>>" for name, variable in variables.items()}
    text = render_config(
        listen=args.listen,
        monitor=args.monitor,
        store_dir=args.store_dir,
        server_name="tokenfleet",
        users=[user.entry() for user in nats_users(fleet, marks)],
    )
    for name, mark in marks.items():
        text = text.replace(f'"{mark}"', f"${variables[name]}")
    print(f"# Written by `tokenfleet bus config`; the permissions come from the message contract.\n{text}", end="")
    return 0


def _settings() -> "Settings":
    from tokenfleet.runtime.settings import Settings, SettingsError

    try:
        return Settings.load()
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _fleet(path: str) -> "Fleet":
    from tokenfleet.fleet import FleetError, parse

    try:
        return parse(Path(path).read_bytes(), source=path)
    except OSError as error:
        raise UsageError(f"no fleet file {path}: {error.strerror} (TOKENFLEET_FLEET)") from None
    except FleetError as error:
        raise UsageError(str(error)) from None
