"""`tokenfleet db migrate|current|wait|redrive|retain`: the schema, events in quarantine, and old days of the ledger."""

import argparse
import json

from tokenfleet.cli import _database
from tokenfleet.cli._errors import CommandError


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("db", help="the database: schema, quarantine, retention")
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
    retain = actions.add_parser(
        "retain",
        help="drop old days of the ledger",
        description="Drop the ledger's partitions of days before the last N whole ones (UTC); today always stays. "
        "Meant for a daily job.",
    )
    retain.add_argument("--days", type=_days, required=True, metavar="N", help="whole days to keep; at least 1")
    retain.add_argument("--dry-run", action="store_true", help="only say what would happen")
    for action in (migrate, current, wait, redrive, retain):
        _database.add_options(action)
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    actions = {"migrate": _migrate, "current": _current, "wait": _wait, "redrive": _redrive, "retain": _retain}
    return actions[args.action](args)


def _days(word: str) -> int:
    if not word.isdigit() or not 1 <= int(word) <= 36_500:
        raise argparse.ArgumentTypeError(f"not a number of days: {word!r}; the least is 1")
    return int(word)


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


def _retain(args: argparse.Namespace) -> int:
    from tokenfleet.accountant.partitions import Retained, retain

    async def job() -> Retained:
        async with _database.checked_engine(_database.settings(args).postgres_url) as engine:
            return await retain(engine, keep_days=args.days, dry_run=args.dry_run)

    done = _database.work(job())
    if args.json:
        found = {"first_day": done.first_day.isoformat(), "dropped": done.dropped, "deleted_rows": done.deleted_rows}
        print(json.dumps(found))
    else:
        would = "would be " if args.dry_run else ""
        print(
            f"{len(done.dropped)} days before {done.first_day} {would}dropped"
            + (f", {done.deleted_rows} stray rows {would}deleted" if done.deleted_rows else "")
        )
    return 0
