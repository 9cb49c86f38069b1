"""`tokenfleet keys create|list|revoke`: who may use the API."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from tokenfleet.cli import _database
from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from tokenfleet.keys import ApiKey


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("keys", help="API keys of tenants", description="Make, list and revoke API keys.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="make a key and print it, once", description="Make a key; it is shown this once."
    )
    create.add_argument("--tenant", required=True, help="a tenant of the fleet file")
    create.add_argument(
        "--class", dest="classes", action="append", metavar="CLASS", help="may use this class only; repeatable"
    )
    create.add_argument("--label", default="", help="for people")
    _database.add_options(create, fleet=True)
    listed = actions.add_parser("list", help="all keys, without the keys themselves")
    listed.add_argument("--tenant")
    _database.add_options(listed)
    revoke = actions.add_parser("revoke", help="end a key")
    revoke.add_argument("id", metavar="ID", help="as `keys list` shows it")
    _database.add_options(revoke)
    for action in (create, listed, revoke):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return {"create": _create, "list": _list, "revoke": _revoke}[args.action](args)


def _create(args: argparse.Namespace) -> int:
    from tokenfleet import keys

    settings = _database.settings(args)
    fleet = _database.load_fleet(settings.fleet)
    tenant = fleet.tenants.get(args.tenant)
    if tenant is None:
        known = ", ".join(sorted(fleet.tenants)) or "none"
        raise UsageError(f"no tenant {args.tenant!r} in {settings.fleet}; there are: {known}")
    for name in args.classes or ():
        if name not in tenant.classes:
            raise UsageError(f"tenant {args.tenant!r} may not use class {name!r}, only {', '.join(tenant.classes)}")
    if not settings.secret:
        raise UsageError(str(keys.NoSecretError()))

    async def job() -> "tuple[ApiKey, str]":
        async with _database.checked_engine(settings.postgres_url) as engine:
            return await keys.create(
                engine, settings.secret, tenant=args.tenant, classes=args.classes, label=args.label
            )

    kept, key = _database.work(job())
    if args.json:
        print(json.dumps({"id": kept.id, "key": key, "tenant": kept.tenant}))
    else:
        print(key)
    return 0


def _list(args: argparse.Namespace) -> int:
    from tokenfleet import keys

    settings = _database.settings(args)

    async def job() -> "list[ApiKey]":
        async with _database.checked_engine(settings.postgres_url) as engine:
            return await keys.list_keys(engine, tenant=args.tenant)

    found = _database.work(job())
    if args.json:
        print(json.dumps({"keys": [_shown(key) for key in found]}))
        return 0
    rows = [("ID", "TENANT", "CLASSES", "LABEL", "CREATED", "REVOKED")]
    rows += [
        (
            key.id,
            key.tenant,
            "all" if key.classes is None else ",".join(key.classes),
            key.label or "-",
            f"{key.created_at:%Y-%m-%d %H:%M}",
            "-" if key.revoked_at is None else f"{key.revoked_at:%Y-%m-%d %H:%M}",
        )
        for key in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from tokenfleet import keys

    settings = _database.settings(args)

    async def job() -> "ApiKey":
        async with _database.checked_engine(settings.postgres_url) as engine:
            return await keys.revoke(engine, args.id)

    try:
        key = _database.work(job())
    except keys.UnknownKeyError as error:
        raise CommandError(str(error)) from None
    if args.json:
        print(json.dumps(_shown(key)))
    else:
        print(f"{key.id} of tenant {key.tenant} is revoked; gateways stop taking it within seconds")
    return 0


def _shown(key: "ApiKey") -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "classes": None if key.classes is None else list(key.classes),
        "label": key.label,
        "created_at": key.created_at.isoformat(),
        "revoked_at": None if key.revoked_at is None else key.revoked_at.isoformat(),
    }
