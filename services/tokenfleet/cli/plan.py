"""`tokenfleet plan`: the replica targets that hold, and what has become of them."""

import argparse
import asyncio
import json

from tokenfleet.cli._nats import connected, present

_HEADER = ("SITE", "MODEL", "PLANNED", "READY", "STARTING", "DRAINING", "FAILED", "WARM", "DEMAND", "WHY")


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        help="replica targets, and what has become of them",
        description="Show FleetMind's plans that hold (`[planning]` in the fleet file) beside what the sites' agents "
        "make of them. A dash: its agent has said nothing yet.",
        epilog="User and password may stand in the URL or in TOKENFLEET_NATS_USER and TOKENFLEET_NATS_PASSWORD; "
        "reading plans takes more rights than those of the user `subscriber`.",
    )
    parser.add_argument("--site", help="only of this site")
    parser.add_argument("--nats", metavar="URL", help="nats://[user:password@]host:port (TOKENFLEET_NATS_URL)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    rows = asyncio.run(_rows(args))
    if args.json:
        print(json.dumps({"plans": rows}))
        return 0
    if not rows:
        print("no plan: `mode` of [planning] is off, no site has an actuator, or the first round is still to come")
        return 0
    table = [_HEADER, *(tuple("-" if row[key] is None else str(row[key]) for key in _KEYS) for row in rows)]
    widths = [max(len(line[n]) for line in table) for n in range(len(_HEADER))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


_KEYS = ("site", "model", "planned", "ready", "starting", "draining", "failed", "warm", "demand", "reason")


async def _rows(args: argparse.Namespace) -> list[dict[str, object]]:
    from tokenfleet_schemas.plan import PlanApplied, PlanIssued

    async with connected(args.nats, "plan") as bus:
        events = await present(bus, "plan")
    applied = {(one.site, one.model): one for one in events if isinstance(one, PlanApplied)}
    rows: list[dict[str, object]] = []
    for plan in sorted((e for e in events if isinstance(e, PlanIssued)), key=lambda e: (e.site, e.model)):
        if args.site and plan.site != args.site:
            continue
        said = applied.get((plan.site, plan.model))
        for target in plan.targets:
            counts = {
                "ready": said.replicas.get(target.version, 0) if said is not None else None,
                "starting": said.starting.get(target.version, 0) if said is not None else None,
                "draining": said.draining.get(target.version, 0) if said is not None else None,
                "failed": said.failed.get(target.version, 0) if said is not None else None,
            }
            rows.append(
                {
                    "site": plan.site,
                    "model": f"{plan.model}@{target.version}",
                    "planned": target.replicas,
                    **counts,
                    "warm": target.prewarmed,
                    "demand": target.demand,
                    "reason": target.reason,
                    "decided_unix_ms": plan.time_unix_ms,
                    "applied": said is not None and said.plan == plan.id and said.ok,
                    "detail": said.detail if said is not None else "",
                }
            )
    return rows
