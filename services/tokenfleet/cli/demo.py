"""`tokenfleet demo`: the built-in workload through TokenFleet and through round robin, on one fleet, side by side."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tokenfleet.cli._errors import CommandError, UsageError
from tokenfleet.cli.replay import ProgressLine, say

if TYPE_CHECKING:
    from tokenfleet.replay.driver import Run
    from tokenfleet.replay.page import ShownRun
    from tokenfleet.replay.plan import Planned

_START_S = 120.0
_DRAINED_S = 60.0
#: what the fleet is compared with: every allowed site and instance in turn, nobody refused; residency stays
_BASELINE = {"placement": "round-robin", "sites": "round-robin", "admission": "none"}
#: services look at a changed fleet file every 2 s, should the signal be missed
_SETTLE_S = 3.0
#: the second run's prompts must not be in the engines' caches
_OTHER_PROMPTS = 1_000_003
_CORES_OF_THE_SIZING = 2


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        help="TokenFleet against round robin, on this machine",
        description="Bring the reference fleet up, run the built-in workload through TokenFleet and then, on the very "
        "same processes, through round robin without admission control. Exit code 0 only if TokenFleet's compliance is "
        "at least 15 points higher and the driver itself kept its times.",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="arrivals, lengths and prompts (default 1)")
    parser.add_argument("--duration", type=float, metavar="S", help="seconds of arrivals per run (default 60)")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: an overload)")
    parser.add_argument("--drain", type=float, default=40.0, metavar="S", help="wait after the last arrival")
    parser.add_argument("--html", type=Path, default=Path("demo-report.html"), metavar="FILE", help="the page")
    parser.add_argument("--records", type=Path, metavar="DIR", help="keep every request's record here, a file per run")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    parser.add_argument("--keep", action="store_true", help="keep the fleet's state directory (logs, streams)")


@dataclass
class _Fleet:
    """A running `tokenfleet up` and what its ready file says."""

    data_dir: Path
    pid: int
    ready: dict[str, Any]
    keys: dict[str, str]


def run(args: argparse.Namespace) -> int:
    import msgspec

    from tokenfleet.cli.replay import load_fleet
    from tokenfleet.local.fleetfile import REFERENCE, set_policy
    from tokenfleet.replay import comparison, page, records, report, workload
    from tokenfleet.replay import plan as plans
    from tokenfleet.replay.errors import ReplayError

    if args.drain < 0:
        raise UsageError("--drain must not be below 0")
    fleet = load_fleet(REFERENCE)
    duration_s = workload.DURATION_S if args.duration is None else args.duration
    try:
        trace = workload.generate(
            seed=args.seed,
            duration_s=duration_s,
            rate_per_s=workload.RATE_PER_S if args.rate is None else args.rate,
        )
        planned = plans.plan(trace, fleet, plans.Choices())
    except ReplayError as error:
        raise UsageError(str(error)) from None
    began_s = time.monotonic()
    runs: list[ShownRun] = []
    notes = [
        f"The same {len(planned)} requests (arrivals, lengths, tenants) over {duration_s:.0f} s in both runs; other "
        "prompts in the second, so that it finds nothing in the caches.",
        "The same processes; between the runs the fleet drained, and only its policy changed.",
    ]
    say("demo: bringing the reference fleet up")
    with _running_fleet(args.keep) as up:
        say(f"demo: up after {time.monotonic() - began_s:.0f} s at {up.ready['api']}")
        for policy, prompts in (("tokenfleet", args.seed), ("round-robin", args.seed + _OTHER_PROMPTS)):
            if policy != "tokenfleet":
                _await_drained(up)
                set_policy(up.data_dir / "fleet.toml", **_BASELINE)
                _reload(up)
            ran, cores = _drive(planned, up, args.drain, prompts, policy)
            made = report.make(ran.records, fleet.classes, policy=policy, seed=args.seed, duration_s=duration_s)
            runs.append(page.ShownRun(report=made, records=ran.records))
            notes.append(_circumstances(policy, made, ran, cores))
            say(f"demo: {notes[-1]}")
            if args.records is not None:
                args.records.mkdir(parents=True, exist_ok=True)
                (args.records / f"{policy}.jsonl").write_bytes(records.encode(ran.records))
    verdict = comparison.judge(runs[0].report, runs[1].report)
    shown = page.render(
        runs,
        fleet.classes,
        title="TokenFleet and round robin on one fleet",
        verdict=verdict.sentence,
        good=verdict.passed,
        notes=notes,
    )
    try:
        args.html.write_text(shown, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{args.html}: {error.strerror}") from None
    if args.json:
        for each in runs:
            print(msgspec.json.encode(each.report).decode())
    else:
        print(report.table([each.report for each in runs]))
        print()
        print(comparison.summary(verdict, [*notes, f"plots: {args.html}"]))
    sys.stdout.flush()
    say(f"demo: {time.monotonic() - began_s:.0f} s in all")
    if not verdict.passed:
        raise CommandError(verdict.sentence)
    return 0


def _drive(
    planned: "list[Planned]", up: _Fleet, drain_s: float, prompt_seed: int, policy: str
) -> "tuple[Run, float | None]":
    """One run, and how many cores everything together used while it lasted (None: this system does not say)."""
    from tokenfleet.replay import cpu, driver
    from tokenfleet.replay.errors import ReplayError

    target = driver.Target(url=up.ready["api"], keys=up.keys, drain_s=drain_s, seed=prompt_seed)
    usage = cpu.TreeUsage(os.getpid())
    try:
        ran = driver.run(planned, target, on_progress=ProgressLine(policy))
    except ReplayError as error:
        raise CommandError(str(error)) from None
    used_s = usage.seconds()
    return ran, None if used_s is None else used_s / ran.wall_s


def _circumstances(policy: str, made: Any, ran: "Run", cores: float | None) -> str:
    lag = made.lag_ms
    used = (
        "CPU use unknown (no /proc)"
        if cores is None
        else f"{cores:.2f} cores for everything, {cores / _CORES_OF_THE_SIZING:.0%} of {_CORES_OF_THE_SIZING}"
    )
    return (
        f"{policy}: replay lag p50 {lag.p50:.1f} ms, p99 {lag.p99:.1f} ms (event loop p99 {ran.loop_lag_ms_p99:.1f} "
        f"ms), {ran.processes} driver process(es); mean {used}."
    )


# ── the fleet ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _running_fleet(keep: bool) -> Iterator[_Fleet]:
    """`tokenfleet up` on a directory of its own; afterwards nothing is left of it, which is checked."""
    from tokenfleet.local.ports import free_ports
    from tokenfleet.local.processes import Command, signal_group, spawn
    from tokenfleet.replay import cpu

    data_dir = Path(tempfile.mkdtemp(prefix="tokenfleet-demo-"))
    # Postgres refuses to run as root and drops to another user, who must reach its data below this directory.
    data_dir.chmod(0o711)
    ready_file, log = data_dir / "ready.json", data_dir / "up.log"
    argv = [sys.executable, "-P", "-m", "tokenfleet.cli", "up"]
    argv += ["--data-dir", str(data_dir / "state"), "--ready-file", str(ready_file), "--log-level", "warning"]
    # Not the usual port: a fleet of the user's may be about to take it.
    argv += ["--port", str(free_ports(1)[0])]
    env = {key: value for key, value in os.environ.items() if not key.startswith("TOKENFLEET_")}
    # Should this process be killed outright, the kernel tells the fleet to end.
    command = Command(argv=argv, env=env, cwd=str(Path.cwd()), death_signal=signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, _terminated)
    process = spawn(command, log)
    left: list[int] = []
    finished = False
    try:
        end_s = time.monotonic() + _START_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise CommandError(f"the fleet did not come up; the end of {log}:\n{_tail(log)}")
            time.sleep(0.1)
        ready = json.loads(ready_file.read_bytes())
        keys = json.loads((data_dir / "state" / "keys.json").read_bytes())
        yield _Fleet(data_dir=data_dir / "state", pid=process.pid, ready=ready, keys=keys)
        finished = True
    finally:
        say("demo: stopping the fleet")
        family = cpu.descendants(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        left = [pid for pid, started in family if cpu.alive(pid, started)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.signal(signal.SIGTERM, before)
        if keep or not finished:
            say(f"demo: the fleet's state and logs are in {data_dir}")
        else:
            shutil.rmtree(data_dir, ignore_errors=True)
    if left:
        raise CommandError(f"the fleet left processes behind (killed now): {', '.join(map(str, left))}")
    say("demo: no process is left of it")


def _terminated(_number: int, _frame: FrameType | None) -> None:
    # Unwinds like Ctrl-C does, so that the fleet is stopped.
    raise SystemExit(143)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def _reload(up: _Fleet) -> None:
    """Make every service read the changed fleet file."""
    for name, pid in up.ready["pids"].items():
        if name in up.ready["metrics"]:
            os.kill(pid, signal.SIGHUP)
    time.sleep(_SETTLE_S)


def _await_drained(up: _Fleet) -> None:
    """Until no engine runs or holds a request; a fleet that still works would slow the second run down."""
    say("demo: waiting until the fleet is drained, then switching to round robin without admission control")
    end_s = time.monotonic() + _DRAINED_S
    quiet = 0
    while quiet < 3:
        busy = [name for name, at in up.ready["emulators"].items() if _open_requests(f"{at['url']}/metrics")]
        quiet = 0 if busy else quiet + 1
        if time.monotonic() > end_s:
            raise CommandError(f"the fleet did not drain within {_DRAINED_S:.0f} s: {', '.join(busy)} still at work")
        time.sleep(0.5)


def _open_requests(metrics_url: str) -> float:
    """Requests that an engine runs or queues, as its metrics say."""
    with urllib.request.urlopen(metrics_url, timeout=5) as response:
        text = response.read().decode()
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:num_requests_waiting ")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(wanted))
