"""`tokenfleet simulate SCENARIO`: the services' own cores on a virtual clock, policies on the same arrivals."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenfleet.simulator.experiment import Task
    from tokenfleet.simulator.scenario import Scenario
    from tokenfleet.simulator.search import Probe


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="compare policies on a virtual clock",
        description="Run a scenario through the services' own cores and modelled engines on a virtual clock, once per "
        "policy and seed, each policy on the identical arrivals; report as `tokenfleet replay` does.",
        epilog="A policy is a name, or PLACEMENT/SITES/ADMISSION such as least-work/home-first/none; a part left empty "
        "is the default's. With several seeds, figures are means with 95% confidence intervals.",
    )
    parser.add_argument(
        "scenario", metavar="SCENARIO", nargs="?", help="a .toml file, or the name of a packaged scenario"
    )
    parser.add_argument("--list", action="store_true", help="list packaged scenarios and policies")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="policies, repeatable (default: the scenario's)"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per policy (default 1)")
    parser.add_argument("--seed", type=int, metavar="S", help="first seed (default: the scenario's)")
    parser.add_argument("--speed", type=float, metavar="X", help="multiply the speed of every trace by X")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where traces are ($TOKENFLEET_SHARED/traces)")
    parser.add_argument(
        "--knee",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="instead of one report per policy, find its stable load and its knee between two multiples of the speed",
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="print, per seed, what nobody could exceed who knew every arrival and length beforehand; runs no policy",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="runs at once (default: one per core)")
    out = parser.add_argument_group("report")
    out.add_argument("--json", action="store_true", help="print one JSON object per run")
    out.add_argument("--summary", type=Path, metavar="FILE", help="write means and intervals over seeds as JSON")
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots of the first seed")
    out.add_argument("--records", type=Path, metavar="DIR", help="write the first seed's requests, a file per policy")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from tokenfleet.replay import page, records, report
    from tokenfleet.replay.errors import ReplayError
    from tokenfleet.simulator import experiment, policies, scenario
    from tokenfleet.simulator.errors import ScenarioError, SimulationError, UnknownPolicyError

    if args.list:
        print("scenarios: " + ", ".join(scenario.packaged()))
        print("policies: " + ", ".join(policies.known()))
        return 0
    if args.scenario is None:
        raise UsageError("which scenario? `tokenfleet simulate --list` names the packaged ones")
    if args.seeds < 1:
        raise UsageError("--seeds must be at least 1")
    if args.processes is not None and args.processes < 1:
        raise UsageError("--processes must be at least 1")
    if args.speed is not None and args.speed <= 0:
        raise UsageError("--speed must be above 0")
    if args.knee is not None and not 0 < args.knee[0] < args.knee[1]:
        raise UsageError("--knee takes two speeds, the lower one first")
    try:
        what = scenario.load(args.scenario, trace_dir=args.traces, speed=args.speed)
        names = list(dict.fromkeys(args.policy or what.info.policies))
        for name in names:
            policies.choose(name)
    except (ScenarioError, UnknownPolicyError) as error:
        raise UsageError(str(error)) from None
    first = what.info.seed if args.seed is None else args.seed
    if args.bound:
        return _bound(args, what, range(first, first + args.seeds))
    if args.knee is not None:
        return _knee(args, what, names, range(first, first + args.seeds))
    keep = args.html is not None or args.records is not None
    progress = _Progress(len(names) * args.seeds)
    try:
        done = experiment.run_all(
            what,
            names,
            range(first, first + args.seeds),
            processes=args.processes,
            keep_records="first" if keep else "none",
            on_progress=progress,
        )
        progress.end(sum(one.events for one in done))
        if args.html is not None:
            shown = [page.ShownRun(report=one.report, records=one.records) for one in done if one.records]
            title = f"Simulation of {what.info.name}"
            _write(args.html, page.render(shown, what.fleet.classes, title=title).encode())
    except ScenarioError as error:
        raise UsageError(str(error)) from None
    except (SimulationError, ReplayError) as error:
        raise CommandError(str(error)) from None
    if args.records is not None:
        for one in done:
            if one.records:
                name = one.report.policy.replace("/", "_")
                _write(args.records / f"{name}.jsonl", records.encode(one.records))
    summaries = experiment.summarise(done)
    if args.summary is not None:
        _write(args.summary, msgspec.json.format(msgspec.json.encode(summaries), indent=2) + b"\n")
    if args.json:
        for one in done:
            print(msgspec.json.encode(one.report).decode())
    elif args.seeds == 1:
        print(report.table([one.report for one in done], tail=True))
    else:
        print(experiment.table(summaries))
    for one in done:
        if one.findings:
            print(f"{one.report.policy}, seed {one.report.seed}: {'; '.join(one.findings[:5])}", file=sys.stderr)
    return 0


def _bound(args: argparse.Namespace, what: "Scenario", seeds: "Sequence[int]") -> int:
    import msgspec

    from tokenfleet.simulator import clairvoyant
    from tokenfleet.simulator.errors import ScenarioError

    for seed in seeds:
        try:
            found = clairvoyant.bound(what, seed)
        except ScenarioError as error:
            raise UsageError(str(error)) from None
        if args.json:
            print(msgspec.json.encode(found).decode(), flush=True)
        else:
            print(
                f"seed {seed}: no policy exceeds {100 * found.compliance:.1f}% compliance of tokens, "
                f"{100 * found.compliance_requests:.1f}% of requests, {found.goodput_tokens_per_s:.0f} tokens/s",
                flush=True,
            )
    return 0


def _knee(args: argparse.Namespace, what: "Scenario", policies: "Sequence[str]", seeds: "Sequence[int]") -> int:
    import msgspec

    from tokenfleet.simulator import experiment
    from tokenfleet.simulator.errors import ScenarioError, SimulationError

    low, high = args.knee
    for policy in policies:

        def say(speed: float, probes: "Sequence[Probe]", policy: str = policy) -> None:
            seconds = " ".join(f"{one.ttft_ms_p95 / 1000:.2f}" for one in probes)
            print(f"{policy}: speed {speed:g}, TTFT p95 {seconds} s", file=sys.stderr, flush=True)

        try:
            found = experiment.search(
                what, policy, seeds, lowest=low, highest=high, processes=args.processes, on_speed=say
            )
        except ScenarioError as error:
            raise UsageError(str(error)) from None
        except SimulationError as error:
            raise CommandError(str(error)) from None
        if args.json:
            print(msgspec.json.encode(found).decode(), flush=True)
        else:
            stable = f"below {low:g}" if found.stable is None else f"{found.stable:g}"
            knee = f"above {high:g}" if found.knee is None else f"{found.knee:g}"
            print(f"{policy}: stable load {stable}, knee {knee} (× the scenario's speed)", flush=True)
    return 0


class _Progress:
    """Says on stderr how far all runs are: one line rewritten on a terminal, one every ten seconds elsewhere."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._shares: dict[tuple[str, int], float] = {}
        self._began_s = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next_s = self._began_s + (0.5 if self._terminal else 10.0)

    def __call__(self, task: "Task", ended: int, offered: int) -> None:
        self._shares[task.policy, task.seed] = ended / offered
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (0.5 if self._terminal else 10.0)
        whole = sum(1 for share in self._shares.values() if share >= 1)
        share = sum(self._shares.values()) / self._runs
        line = f"{now_s - self._began_s:4.0f} s  {share:4.0%}  {whole} of {self._runs} runs"
        if self._terminal:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self, events: int) -> None:
        """All runs are made."""
        line = f"{self._runs} runs, {events} events in {time.monotonic() - self._began_s:.1f} s"
        print(f"\r{line}\x1b[K" if self._terminal else line, file=sys.stderr, flush=True)


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
