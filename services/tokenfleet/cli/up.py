"""`tokenfleet up`: the whole fleet on this machine, until Ctrl-C."""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from tokenfleet.local.cluster import LocalFleet
    from tokenfleet.local.state_dir import StateDir


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "up",
        help="the whole fleet on this machine",
        description="NATS, Postgres, emulated engines and every service as processes on this machine, until Ctrl-C. "
        "A second `up` on the same directory goes on where the first one ended.",
    )
    parser.add_argument("--fleet", type=Path, metavar="FILE", help="a fleet file (default: the reference fleet)")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="keeps all state (default: ~/.local/state/tokenfleet)"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="the API's port (default: 8080, if free)")
    parser.add_argument(
        "--ready-file", type=Path, metavar="PATH", help="write addresses, key and process ids here once all answers"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.epilog = "DIR/env holds this fleet's addresses and secrets for a shell and the other verbs: `. DIR/env`."


def run(args: argparse.Namespace) -> int:
    import asyncio

    from tokenfleet.fleet import FleetError
    from tokenfleet.local.errors import LocalError
    from tokenfleet.local.fleetfile import REFERENCE, read_fleet_text
    from tokenfleet.local.state_dir import StateDir, default_data_dir

    if not 0 <= args.port <= 65535:
        raise UsageError(f"not a port: {args.port}")
    if args.ready_file is not None:
        if not args.ready_file.parent.is_dir():
            raise UsageError(f"no directory {args.ready_file.parent}")
        # one of an earlier run would be believed
        args.ready_file.unlink(missing_ok=True)
    try:
        text = read_fleet_text(args.fleet or REFERENCE)
        with StateDir(args.data_dir or default_data_dir()) as state:
            return asyncio.run(_run(args, state, text))
    except FleetError as error:
        print("\n".join(error.findings), file=sys.stderr)
        raise UsageError("the fleet file is wrong") from None
    except LocalError as error:
        raise CommandError(str(error)) from None


def _say(text: str) -> None:
    print(f"up: {text}", file=sys.stderr, flush=True)


async def _run(args: argparse.Namespace, state: "StateDir", text: str) -> int:
    import asyncio
    import json
    import signal

    from tokenfleet.local.cluster import LocalFleet
    from tokenfleet.local.nats import write_private

    fleet = LocalFleet(state=state, fleet_text=text, api_port=args.port, log_level=args.log_level, say=_say)

    def write_ready() -> None:
        write_private(state.root / "env", _environment(fleet))
        if args.ready_file is not None:
            write_private(args.ready_file, json.dumps(fleet.ready(), indent=2) + "\n")

    fleet.on_change = write_ready
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            # the second time means: now
            fleet.supervisor.kill_all()
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    # interrupted before anything answered: nobody should take that for a success
    code = 130
    starting = asyncio.create_task(fleet.start())
    waiting = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            write_ready()
            _print(fleet)
            code = 0
            await waiting
    finally:
        for task in (starting, waiting):
            task.cancel()
        # what went wrong while starting has been raised above
        await asyncio.gather(starting, waiting, return_exceptions=True)
        if args.ready_file is not None:
            args.ready_file.unlink(missing_ok=True)
        _say("stopping")
        await fleet.stop()
    _say(f"stopped; all state is in {state.root}")
    return code


def _environment(fleet: "LocalFleet") -> str:
    """A file for a shell to read: what the other verbs and an OpenAI client need to find this fleet."""
    import shlex

    ready = fleet.ready()
    variables = {
        "OPENAI_BASE_URL": ready["api"],
        "OPENAI_API_KEY": ready["key"],
        "TOKENFLEET_FLEET": str(fleet.state.fleet_file),
        "TOKENFLEET_SECRET": fleet.state.secret(),
        "TOKENFLEET_NATS_URL": ready["nats"],
        "TOKENFLEET_POSTGRES_URL": ready["postgres"],
    }
    # /metrics, /readyz and /healthz are beside each other: METRICS_GATEWAY, METRICS_TOKENPILOT_B
    for name, url in ready["metrics"].items():
        variables[f"METRICS_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"] = url
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(["# Written by `tokenfleet up`; it contains secrets.", *lines]) + "\n"


def _print(fleet: "LocalFleet") -> None:
    import shlex

    ready = fleet.ready()
    tenants = fleet.fleet.tenants
    print(f"\nAPI        {ready['api']}")
    print(f"key        {ready['key']}   (tenant {next(iter(tenants))}; of all tenants: {fleet.state.root}/keys.json)")
    print(f"models     {', '.join(fleet.fleet.models)}")
    print(f"NATS       {ready['nats']}")
    print(f"Postgres   {ready['postgres']}")
    print(f"state      {fleet.state.root} (logs/, fleet.toml)")
    print(f"shell      . {shlex.quote(str(fleet.state.root / 'env'))}   (for curl, openai and the other verbs)")
    for name, url in ready["metrics"].items():
        print(f"metrics    {url}   {name}")
    print("\nCtrl-C ends it; the next `up` goes on where this one ended.\n", flush=True)
