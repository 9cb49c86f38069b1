"""`tokenfleet replay TRACE`: drive an OpenAI-compatible URL with a trace, open-loop, and report its goodput."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from tokenfleet.fleet import Fleet
    from tokenfleet.replay.driver import Progress
    from tokenfleet.replay.plan import Choices
    from tokenfleet.replay.traces import Trace

BUILTIN = "builtin"


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "replay",
        help="drive a URL with a trace and report goodput",
        description="Send a trace's requests at their own times to an OpenAI-compatible URL, whatever it does (open "
        "loop, no retries), and report how many kept their class' objectives.",
        epilog="A row without a class gets one by input length; by default `chat<=4096,document` where the fleet has "
        "both classes, else its default class; rows of type batch are of class batch if there is one.",
    )
    parser.add_argument(
        "trace", metavar="TRACE", help=f"a .jsonl or .jsonl.gz trace, or `{BUILTIN}` for the generated workload"
    )
    to = parser.add_argument_group("where to")
    to.add_argument("--url", required=True, help="base URL, such as http://127.0.0.1:8000/v1")
    to.add_argument(
        "--key", default=os.environ.get("TOKENFLEET_KEY", ""), help="API key (TOKENFLEET_KEY) of tenants without one"
    )
    to.add_argument("--keys", type=Path, metavar="FILE", help="JSON object: tenant to API key")
    to.add_argument("--model", default="", help="ask for this model in every request")
    to.add_argument(
        "--model-map", action="append", default=[], metavar="TRACE=FLEET", help="rename a trace's model; repeatable"
    )
    to.add_argument(
        "--emulated",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the engines are emulators: tell them each answer's length (ignored by real engines)",
    )
    what = parser.add_argument_group("what")
    what.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    what.add_argument("--speed", type=float, default=1.0, metavar="X", help="divide every gap by X (default 1)")
    what.add_argument("--class", dest="cls", default="", help="class of every request")
    what.add_argument("--class-rule", default="", metavar="RULE", help="class by input length: chat<=4096,document")
    what.add_argument("--tenant", default="", help="tenant of every request (whose key is sent)")
    what.add_argument("--duration", type=float, metavar="S", help=f"{BUILTIN}: seconds of arrivals")
    what.add_argument("--rate", type=float, metavar="R", help=f"{BUILTIN}: requests per second")
    what.add_argument("--seed", type=int, default=1, metavar="N", help=f"prompts, and arrivals of {BUILTIN}")
    what.add_argument("--prompt-seed", type=int, metavar="N", help="other prompts for the same arrivals")
    how = parser.add_argument_group("how")
    how.add_argument("--fleet", type=Path, metavar="FILE", help="fleet file with the objectives (TOKENFLEET_FLEET)")
    how.add_argument("--timeout", type=float, default=600.0, metavar="S", help="give a request up after S seconds")
    how.add_argument(
        "--drain",
        type=float,
        default=360.0,
        metavar="S",
        help="what is still open S seconds after the last arrival is unfinished (default 360: a fleet may hold a "
        "request for 300); a run ends as soon as nothing is open",
    )
    how.add_argument("--processes", type=int, metavar="N", help="driver processes (default: by rate)")
    out = parser.add_argument_group("report")
    out.add_argument("--policy", default="live", metavar="NAME", help="what the report calls this run")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    out.add_argument("--records", type=Path, metavar="FILE", help="write one JSON line per request")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from tokenfleet.replay import driver, page, records, report
    from tokenfleet.replay import plan as plans
    from tokenfleet.replay.errors import ReplayError

    if args.limit is not None and args.limit < 1:
        raise UsageError("--limit must be at least 1")
    if args.processes is not None and args.processes < 1:
        raise UsageError("--processes must be at least 1")
    if args.timeout <= 0 or args.drain < 0:
        raise UsageError("--timeout must be above 0 and --drain not below it")
    fleet = load_fleet(args.fleet)
    try:
        trace = _trace(args)
        planned = plans.plan(trace, fleet, _choices(args))
        keys = driver.key_map(_keys(args.keys))
        missing = plans.missing_keys(planned, keys, args.key)
    except ReplayError as error:
        raise UsageError(str(error)) from None
    if missing:
        raise UsageError(f"no key for tenant {', '.join(missing)}: give --key or --keys")
    target = driver.Target(
        url=args.url,
        keys=keys,
        key=args.key,
        emulated=args.emulated,
        timeout_s=args.timeout,
        drain_s=args.drain,
        seed=args.seed if args.prompt_seed is None else args.prompt_seed,
        block_tokens=trace.block_tokens,
    )
    say(f"{trace.name}: {len(planned)} requests over {trace.span_s:.0f} s to {target.endpoint}")
    if trace.tick_s:
        say(f"arrivals were stamped by a clock of {trace.tick_s:g} s: spread evenly inside its ticks")
    try:
        ran = driver.run(planned, target, processes=args.processes, on_progress=ProgressLine())
        made = report.make(
            ran.records,
            fleet.classes,
            policy=args.policy,
            seed=args.seed,
            duration_s=report.window_s(args.duration or trace.span_s, ran.records),
        )
    except ReplayError as error:
        raise CommandError(str(error)) from None
    lag = made.lag_ms
    say(
        f"driver: {ran.processes} process(es), lag p50 {lag.p50:.1f} ms, p99 {lag.p99:.1f} ms, "
        f"loop p99 {ran.loop_lag_ms_p99:.1f} ms, {ran.cpu_s / ran.wall_s:.0%} of a core"
    )
    if args.records is not None:
        _write(args.records, records.encode(ran.records))
    if args.html is not None:
        shown = page.render(
            [page.ShownRun(report=made, records=ran.records)], fleet.classes, title=f"Replay of {trace.name}"
        )
        _write(args.html, shown.encode())
    print(msgspec.json.encode(made).decode() if args.json else report.table([made]))
    unreachable = {"connection"} == {record.error_code for record in ran.records}
    if unreachable:
        raise CommandError(f"nothing answers at {target.endpoint}")
    return 0


def load_fleet(path: Path | None) -> "Fleet":
    """The fleet file that a run is judged by: the one named, TOKENFLEET_FLEET, or the reference fleet's."""
    from importlib import resources

    from tokenfleet.fleet import FleetError, parse

    named = path or (Path(os.environ["TOKENFLEET_FLEET"]) if os.environ.get("TOKENFLEET_FLEET") else None)
    try:
        if named is None:
            packaged = resources.files("tokenfleet.local") / "reference.fleet.toml"
            return parse(packaged.read_bytes(), source="reference.fleet.toml")
        return parse(named.read_bytes(), source=str(named))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    except FleetError as error:
        raise UsageError(str(error)) from None


class ProgressLine:
    """Says on stderr where a run stands: one line rewritten on a terminal, one line every ten seconds elsewhere."""

    def __init__(self, label: str = "") -> None:
        self._label = f"{label}: " if label else ""
        self._every_s = 0.5 if sys.stderr.isatty() else 10.0
        self._next_s = 0.0
        self._ended = False

    def __call__(self, now: "Progress") -> None:
        whole = now.ended == now.total
        if self._ended or (time.monotonic() < self._next_s and not whole):
            return
        self._ended = whole
        self._next_s = time.monotonic() + self._every_s
        line = f"{self._label}{now.elapsed_s:4.0f} s  sent {now.sent}/{now.total}  open {now.sent - now.ended}"
        if sys.stderr.isatty():
            print(f"\r{line}\x1b[K", end="\n" if whole else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _trace(args: argparse.Namespace) -> "Trace":
    from tokenfleet.replay import traces, workload

    if args.trace != BUILTIN:
        if args.duration is not None or args.rate is not None:
            raise UsageError(f"--duration and --rate are for `{BUILTIN}`; a trace takes --limit and --speed")
        return traces.read(Path(args.trace), limit=args.limit, speed=args.speed)
    made = workload.generate(
        seed=args.seed,
        duration_s=workload.DURATION_S if args.duration is None else args.duration,
        rate_per_s=workload.RATE_PER_S if args.rate is None else args.rate,
    )
    return traces.parse(traces.encode(made), source=BUILTIN, limit=args.limit, speed=args.speed)


def _choices(args: argparse.Namespace) -> "Choices":
    from tokenfleet.replay.plan import Choices, parse_steps

    pairs = [pair.partition("=") for pair in args.model_map]
    wrong = [pair for pair, (left, _, right) in zip(args.model_map, pairs, strict=True) if not (left and right)]
    if wrong:
        raise UsageError(f"--model-map {wrong[0]!r} is not TRACE=FLEET")
    return Choices(
        model=args.model,
        model_map={left: right for left, _, right in pairs},
        cls=args.cls,
        steps=parse_steps(args.class_rule) if args.class_rule else (),
        tenant=args.tenant,
    )


def _keys(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise UsageError(f"{path}: must be one JSON object of tenant to key")
    return content


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
