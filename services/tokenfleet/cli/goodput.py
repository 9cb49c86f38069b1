"""`tokenfleet goodput`: what the fleet was good for, from the ledger."""

import argparse
import csv
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.cli import _database
from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from tokenfleet.accountant.report import Course, Report, Result

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "goodput",
        help="goodput, compliance and waste from the ledger",
        description="Goodput of finished requests, by the time at which they finished. docs/metrics.md defines it all.",
    )
    parser.add_argument("--since", default="1h", metavar="SPAN", help="30s, 15m, 1h, 7d; default: 1h")
    parser.add_argument(
        "--by",
        default="class",
        metavar="LIST",
        help="comma-separated: class, tenant, site, model, version, task, instance, gateway; empty for the total only",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--csv", action="store_true", help="print one line a group")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots (needs matplotlib)")
    _database.add_options(parser, fleet=True)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from tokenfleet.accountant import report

    since_s = span_s(args.since)
    by = [name.strip() for name in args.by.split(",") if name.strip()]
    for name in by:
        if name not in report.DIMENSIONS:
            raise UsageError(f"--by knows {', '.join(report.DIMENSIONS)}; not {name!r}")
    if len(set(by)) < len(by):
        raise UsageError("--by names something twice")
    settings = _database.settings(args)
    # prices are a convenience: without a fleet file there are none, but a file that was named must be there
    known = bool(args.fleet) or Path(settings.fleet).is_file()
    costs = report.hourly_costs(_database.load_fleet(settings.fleet)) if known else {}

    async def job() -> "tuple[Report, Course | None]":
        async with _database.checked_engine(settings.postgres_url) as engine:
            found = await report.goodput(engine, since_s=since_s, by=by, costs=costs)
            return found, await report.course(engine, since_s=since_s) if args.html else None

    found, course = _database.work(job())
    if course is not None:
        _write_page(args.html, found, course)
    if args.json:
        print(msgspec.json.encode(found).decode())
    elif args.csv:
        _print_csv(found)
    else:
        _print_table(found)
    return 0


def _write_page(path: Path, found: "Report", course: "Course") -> None:
    try:
        from tokenfleet.cli._goodput_page import render

        path.write_text(render(found, course), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise CommandError(f"--html needs {error.name}: pip install 'tokenfleet[replay]'") from None
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def span_s(word: str) -> float:
    """`90`, `30s`, `15m`, `1h`, `7d` in seconds. Raises `UsageError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"not a span of time: {word!r}; say 30s, 15m, 1h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


_COLUMNS = ("offered", "completed", "refused", "cancelled", "failed", "repeated", "compliant")
_RATES = ("output_tokens_per_s", "goodput_tokens_per_s", "compliance", "compliance_estimated", "compliance_requests")


def _print_csv(found: "Report") -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    quantiles = [(field, name) for field in ("ttft_ms", "tpot_ms") for name in ("p50", "p95", "p99")]
    costs = ("cost", "cost_per_million_compliant_tokens") if found.hourly_costs else ()
    times = [f"{field}_{name}" for field, name in quantiles]
    out.writerow([*found.by, *_COLUMNS, *_RATES, "wasted_tokens", *times, *costs])
    for result in found.groups or (found.overall,):
        out.writerow(
            [
                *(result.group.get(name, "") for name in found.by),
                *(getattr(result, name) for name in _COLUMNS),
                *(getattr(result, name) for name in _RATES),
                sum(result.wasted_tokens.values()),
                *(getattr(result, field)[name] for field, name in quantiles),
                *(getattr(result, name) for name in costs),
            ]
        )


def _print_table(found: "Report") -> None:
    head = [
        *(name.upper() for name in found.by or ("",)), "OFFERED", "COMPLETED", "REFUSED", "CANCELLED", "FAILED",
        "COMPLIANT", "TOKENS", "GOODPUT t/s", "OUTPUT t/s", "WASTED", "TTFT p50", "TTFT p99", "TPOT p50",
    ]  # fmt: skip
    if found.hourly_costs:
        head.append("COST/M")
    rows = [head]
    for result in (*found.groups, found.overall):
        together = not result.group
        names = ["all", *[""] * (len(found.by) - 1)] if together else [result.group[n] or "-" for n in found.by]
        rows.append([*names, *_cells(result)])
        if found.hourly_costs:
            each = result.cost_per_million_compliant_tokens
            rows[-1].append("-" if each is None else f"{each:.3f}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    labels = len(found.by) or 1
    for row in rows:
        cells = [
            cell.ljust(width) if column < labels else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    if found.hourly_costs:
        print(f"COST/M: per million compliant tokens, of {', '.join(found.hourly_costs)}")
    if found.overall.compliance_estimated:
        print("~ part of the offered tokens was never delivered and is estimated by the median of its class and model")


def _cells(result: "Result") -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    def milliseconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.0f} ms"

    return [
        str(result.offered),
        str(result.completed),
        str(result.refused),
        str(result.cancelled),
        str(result.failed),
        share(result.compliance_requests),
        ("~" if result.compliance_estimated else "") + share(result.compliance),
        f"{result.goodput_tokens_per_s:.1f}",
        f"{result.output_tokens_per_s:.1f}",
        str(sum(result.wasted_tokens.values())),
        milliseconds(result.ttft_ms["p50"]),
        milliseconds(result.ttft_ms["p99"]),
        "-" if result.tpot_ms["p50"] is None else milliseconds(result.tpot_ms["p50"]),
    ]
