"""`tokenfleet db migrate|current|wait|redrive`: the schema, and events in quarantine."""

import argparse
import json

from tokenfleet.cli import _database
from tokenfleet.cli._errors import CommandError


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("db", help="the database: schema and quarantine")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    migrate = actions.add_parser(
        "migrate",
        help="bring the schema to this version's head",
        description="Bring the schema to this version's head. Any number may run at once: one does it.",
    )
    current = actions.add_parser("current", help="compare the schema with this version; exit code 1 if they differ")
    wait = actions.add_parser("wait", help="wait until the database answers and has this version's schema")
    wait.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    redrive = actions.add_parser(
        "redrive",
        help="take up quarantined events again",
        description="Write the ledger rows of quarantined events that can be read now, and drop them from quarantine.",
    )
    redrive.add_argument("--dry-run", action="store_true", help="only say what would happen")
    for action in (migrate, current, wait, redrive):
        _database.add_options(action)
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return {"migrate": _migrate, "current": _current, "wait": _wait, "redrive": _redrive}[args.action](args)


def _migrate(args: argparse.Namespace) -> int:
    from tokenfleet.database import migrate

    before, after = _database.work(migrate(_database.settings(args).postgres_url))
    if args.json:
        print(json.dumps({"from": before.found, "to": after.found, "changed": before.found != after.found}))
    elif before.found == after.found:
        print(f"schema is at {after.found}: nothing to do")
    else:
        print(f"schema brought from {before.found or 'nothing'} to {after.found}")
    return 0


def _current(args: argparse.Namespace) -> int:
    from tokenfleet.database import SchemaState, create_engine, schema_state

    async def job() -> SchemaState:
        engine = create_engine(_database.settings(args).postgres_url, pool_size=1)
        try:
            return await schema_state(engine)
        finally:
            await engine.dispose()

    state = _database.work(job())
    verdict = "current" if state.current else "ahead" if state.ahead else "behind"
    if args.json:
        print(json.dumps({"found": state.found, "head": state.head, "verdict": verdict}))
    else:
        print(f"database {state.found or '(none)'}, this version {state.head}: {verdict}")
    return 0 if state.current else 1


def _wait(args: argparse.Namespace) -> int:
    from tokenfleet.database import wait_for_schema

    state = _database.work(wait_for_schema(_database.settings(args).postgres_url, timeout_s=args.timeout))
    print(json.dumps({"found": state.found}) if args.json else f"schema is at {state.found}")
    return 0


def _redrive(args: argparse.Namespace) -> int:
    from tokenfleet.accountant.store import Redriven, redrive

    async def job() -> Redriven:
        async with _database.checked_engine(_database.settings(args).postgres_url) as engine:
            return await redrive(engine, dry_run=args.dry_run)

    done = _database.work(job())
    if args.json:
        print(json.dumps({"redriven": done.redriven, "duplicates": done.duplicates, "left": done.left}))
    else:
        print(f"{done.redriven} written, {done.duplicates} already in the ledger, {len(done.left)} left in quarantine")
        for key, reason in done.left.items():
            print(f"  {key}: {reason}")
    if done.left:
        raise CommandError(f"{len(done.left)} events still cannot be read")
    return 0
