"""`tokenfleet check FILE`: whether a fleet file is right, before any service reads it."""

import argparse
import json
import sys
from pathlib import Path

from tokenfleet.cli._errors import UsageError


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "check", help="validate a fleet file", description="Validate a fleet file; one finding per line."
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from tokenfleet.fleet import FleetError, parse

    try:
        data = args.file.read_bytes()
    except OSError as error:
        raise UsageError(f"{args.file}: {error.strerror}") from None
    findings: list[str] = []
    summary: dict[str, int] = {}
    try:
        fleet = parse(data, source=str(args.file))
    except FleetError as error:
        findings = error.findings
    else:
        summary = {
            "sites": len(fleet.sites),
            "instances": sum(len(site.instances) for site in fleet.sites.values()),
            "models": len(fleet.models),
            "classes": len(fleet.classes),
            "tenants": len(fleet.tenants),
        }
    if args.json:
        print(json.dumps({"file": str(args.file), "ok": not findings, "findings": findings, **summary}))
    elif findings:
        print("\n".join(findings), file=sys.stderr)
    else:
        print(f"{args.file}: right; " + ", ".join(f"{count} {what}" for what, count in summary.items()))
    return 2 if findings else 0
