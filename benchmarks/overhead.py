"""What the control plane adds to a request, beside the least that its architecture must add.

Three roads to the same engine that takes no time, in turns within one run, at each rate:

- direct:  the driver asks the engine.
- bare:    an aiohttp relay and one Python process per hop say the very same messages over the same NATS (`bare.py`).
- fleet:   TokenFleet, every service a process of its own, as `tokenfleet up` starts it.

CPU is what the kernel counted for the processes of a road and for NATS while a phase lasted, less what the same
processes use when nothing is asked. Not counted: Postgres, the engine, the driver. Added latency is a road's median
less that of the direct road in the same rounds. Decides whether the goals are met (`GOALS`) and exits 1 if not.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import uvloop
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from benchmarks.bare import MESSAGES, PREFIX, ROLES
from benchmarks.load import Client, Load
from tokenfleet.local.cluster import LocalFleet
from tokenfleet.local.errors import LocalError
from tokenfleet.local.processes import Command, spawn, stop
from tokenfleet.local.state_dir import StateDir
from tokenfleet_schemas import codec
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import subject_filter
from tokenfleet_schemas.streams import STREAMS

MODEL = "bench"
#: road → processes that are not counted
_NOT_COUNTED = ("postgres", "emulator")
#: after a phase, until what follows an answer (outcomes, ledger) is done
_TAIL_S = 1.0
MARK = b"#########"
CPU_RATIO_MAX = 2.0
LATENCY_RATIO_MAX = 2.0
ADDED_P99_MS_MAX = 20.0
CAPACITY_PER_S_MIN = 200.0

FLEET = """
[fleet]
name = "bench"
default_class = "chat"
[models.bench]
versions = ["1"]
default_version = "1"
max_model_len = 16384
tokenizer = "bytes"
[sites.a]
zone = "eu"
entry = true
homes = {{ bench = ["b"] }}
[sites.b]
zone = "eu"
gpus = 2
[sites.b.instances]
b-1 = {{ model = "bench", version = "1", url = "{url}", token_budget = 8192, max_sequences = 256, kv_tokens = 1000000 }}
b-2 = {{ model = "bench", version = "1", url = "{url}", token_budget = 8192, max_sequences = 256, kv_tokens = 1000000 }}
[network.rtt_ms]
a-b = 1
[classes.chat]
ttft_ms = 2000
tpot_ms = 100
tier = 1
patience_ms = 15000
[tenants.bench]
zones = ["*"]
classes = ["chat"]
"""


class BenchError(RuntimeError):
    """The benchmark could not be run; says nothing about the fleet's speed."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's living threads, by the scheduler's nanoseconds. Source: proc(5), schedstat.

    Raises `BenchError` when it is gone.
    """
    total = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError):
                total += int(Path(task.path, "schedstat").read_text().split(maxsplit=1)[0])
    except FileNotFoundError:
        raise BenchError(f"process {pid} ended while it was measured") from None
    return total / 1e9


@dataclass
class Phase:
    """One road at one rate for some seconds."""

    load: Load
    #: process → CPU seconds
    cpu: dict[str, float]
    #: seconds over which the CPU was taken
    seconds: float


@dataclass
class Figures:
    """All rounds of one road at one rate."""

    phases: list[Phase] = field(default_factory=list)

    def cpu_ms(self, idle: dict[str, float], names: Sequence[str]) -> dict[str, float]:
        """Median over the rounds: CPU ms per request of each process, its idle use subtracted."""
        return {
            name: statistics.median(
                (p.cpu[name] - idle[name] * p.seconds) * 1000 / max(1, len(p.load.whole_ms)) for p in self.phases
            )
            for name in names
        }

    def total_cpu_ms(self, idle: dict[str, float], names: Sequence[str]) -> float:
        """Median over the rounds of the sum over processes, ms per request."""
        return statistics.median(
            sum(p.cpu[name] - idle[name] * p.seconds for name in names) * 1000 / max(1, len(p.load.whole_ms))
            for p in self.phases
        )

    def ms(self, what: Callable[[Load], list[float]], share: float) -> float:
        """A quantile over all rounds together."""
        return quantile([value for p in self.phases for value in what(p.load)], share)

    @property
    def failed(self) -> int:
        """Requests without a whole answer."""
        return sum(p.load.failed for p in self.phases)

    @property
    def requests(self) -> int:
        """Requests answered."""
        return sum(len(p.load.whole_ms) for p in self.phases)


def quantile(values: list[float], share: float) -> float:
    """The value below which this share lies (nearest rank); NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Road:
    """Where a road begins and which processes make it."""

    def __init__(self, name: str, client: Client, processes: dict[str, int]) -> None:
        self.name, self.client, self.processes = name, client, processes


class Bench:
    """Everything that runs."""

    def __init__(self, args: argparse.Namespace, fleet: LocalFleet, roads: list[Road], nats_pid: int) -> None:
        self.args, self.fleet, self.roads = args, fleet, roads
        self.pids = {"nats": nats_pid}
        for road in roads:
            self.pids |= {f"{road.name}:{name}": pid for name, pid in road.processes.items()}

    def names(self, road: Road) -> list[str]:
        """What counts for a road."""
        return ["nats", *(f"{road.name}:{name}" for name in road.processes)]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of every counted process."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    async def idle(self, seconds: float) -> dict[str, float]:
        """CPU seconds per second of every process while nothing is asked."""
        before, began_s = self.cpu(), asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        after, took_s = self.cpu(), asyncio.get_running_loop().time() - began_s
        return {name: (after[name] - before[name]) / took_s for name in before}

    async def phase(self, road: Road, rate: float, seed: int) -> Phase:
        """One road at one rate."""
        loop = asyncio.get_running_loop()
        before, began_s = self.cpu(), loop.time()
        load = await road.client.open_loop(rate, self.args.seconds, seed)
        await asyncio.sleep(_TAIL_S)
        after = self.cpu()
        return Phase(load, {name: after[name] - before[name] for name in before}, loop.time() - began_s)


async def measure(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all phases; the result as data."""
    args = bench.args
    for road in bench.roads:
        await road.client.open_loop(30, 3, 0)
    found: dict[tuple[str, float], Figures] = {}
    idle: list[dict[str, float]] = []
    for turn in range(args.rounds):
        idle.append(await bench.idle(args.idle_seconds))
        for rate in args.rates:
            order = bench.roads if turn % 2 == 0 else bench.roads[::-1]
            for road in order:
                say(f"round {turn + 1} of {args.rounds}: {road.name} at {rate:g}/s")
                phase = await bench.phase(road, rate, seed=turn * 1000 + int(rate))
                found.setdefault((road.name, rate), Figures()).phases.append(phase)
    idle.append(await bench.idle(args.idle_seconds))
    rest = {name: statistics.median(one[name] for one in idle) for name in idle[0]}
    result: dict[str, Any] = {"idle_cpu_ms_per_s": {name: value * 1000 for name, value in rest.items()}, "rates": {}}
    for rate in args.rates:
        result["rates"][f"{rate:g}"] = {
            road.name: _summary(found[road.name, rate], rest, bench.names(road)) for road in bench.roads
        }
    say(f"closed loop with {args.clients} clients through one gateway")
    fleet_road = bench.roads[-1]
    load = await fleet_road.client.closed_loop(args.clients, args.seconds)
    result["capacity"] = {
        "clients": args.clients,
        "requests_per_s": len(load.whole_ms) / load.seconds,
        "p50_ms": quantile(load.whole_ms, 0.5),
        "p99_ms": quantile(load.whole_ms, 0.99),
        "failed": load.failed,
    }
    return result


def _summary(figures: Figures, idle: dict[str, float], names: Sequence[str]) -> dict[str, Any]:
    return {
        "requests": figures.requests,
        "failed": figures.failed,
        "cpu_ms": figures.total_cpu_ms(idle, names),
        "cpu_ms_by_process": figures.cpu_ms(idle, names),
        "p50_ms": figures.ms(lambda load: load.whole_ms, 0.5),
        "p99_ms": figures.ms(lambda load: load.whole_ms, 0.99),
        "first_p50_ms": figures.ms(lambda load: load.first_ms, 0.5),
        "first_p99_ms": figures.ms(lambda load: load.first_ms, 0.99),
        "lag_p99_ms": figures.ms(lambda load: load.lag_ms, 0.99),
    }


def judge(result: dict[str, Any]) -> list[tuple[str, float, str, float, bool]]:
    """(what, value, relation, goal, met) for every goal."""
    goals: list[tuple[str, float, str, float, bool]] = []

    def at_most(what: str, value: float, limit: float) -> None:
        goals.append((what, value, "<=", limit, value <= limit))

    for rate, roads in result["rates"].items():
        direct, bare, fleet = roads["direct"], roads["bare"], roads["fleet"]
        at_most(f"CPU per request, fleet / bare, at {rate}/s", fleet["cpu_ms"] / bare["cpu_ms"], CPU_RATIO_MAX)
        for key, words in (("first_p50_ms", "first token"), ("p50_ms", "whole answer")):
            added, least = fleet[key] - direct[key], bare[key] - direct[key]
            at_most(f"added p50 ({words}), fleet / bare, at {rate}/s", added / least, LATENCY_RATIO_MAX)
        at_most(f"added p99 (whole answer), ms, at {rate}/s", fleet["p99_ms"] - direct["p99_ms"], ADDED_P99_MS_MAX)
        at_most(f"requests without an answer at {rate}/s", float(sum(r["failed"] for r in roads.values())), 0.0)
    capacity = result["capacity"]
    per_s = capacity["requests_per_s"]
    goals.append(("requests/s through one gateway", per_s, ">=", CAPACITY_PER_S_MIN, per_s >= CAPACITY_PER_S_MIN))
    at_most("requests without an answer, closed loop", float(capacity["failed"]), 0.0)
    return goals


def show(result: dict[str, Any], goals: list[tuple[str, float, str, float, bool]]) -> str:
    """Tables for people."""
    machine = result["machine"]
    lines = [
        f"{machine['cores']} cores, load {machine['load_before']:.1f} before and {machine['load_after']:.1f} after, "
        f"Python {machine['python']}; {result['tokens']} tokens a stream, prompts of {result['prompt_bytes']} bytes",
        "",
        f"{'':>8} {'req/s':>6} {'n':>6} {'p50 ms':>8} {'p99 ms':>8} {'first p50':>10} {'first p99':>10} "
        f"{'CPU ms/req':>11} {'driver lag p99':>15}",
    ]
    for rate, roads in result["rates"].items():
        for name, row in roads.items():
            cpu = f"{row['cpu_ms']:11.2f}" if name != "direct" else f"{'-':>11}"
            lines.append(
                f"{name:>8} {rate:>6} {row['requests']:>6} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f} "
                f"{row['first_p50_ms']:10.2f} {row['first_p99_ms']:10.2f} {cpu} {row['lag_p99_ms']:15.2f}"
            )
    lines += ["", "CPU ms per request by process (idle subtracted; ms per second when idle):"]
    for name in ("bare", "fleet"):
        for process in next(iter(result["rates"].values()))[name]["cpu_ms_by_process"]:
            cells = " ".join(f"{roads[name]['cpu_ms_by_process'][process]:7.3f}" for roads in result["rates"].values())
            label = process if ":" in process else f"{name}:{process}"
            lines.append(f"  {label:<22} {cells}   idle {result['idle_cpu_ms_per_s'][process]:6.2f}")
    capacity = result["capacity"]
    lines += [
        "",
        f"one gateway, {capacity['clients']} clients: {capacity['requests_per_s']:.0f} requests/s, "
        f"p50 {capacity['p50_ms']:.1f} ms, p99 {capacity['p99_ms']:.1f} ms",
        "",
    ]
    for what, value, sign, goal, met in goals:
        lines.append(f"{'met   ' if met else 'MISSED'}  {what}: {value:.2f} {sign} {goal:g}")
    return "\n".join(lines)


# ── what runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _start(words: list[str], env: dict[str, str], log: Path, started: list[Any]) -> int:
    """Start one of our processes; the port that it prints."""
    command = Command(
        argv=[sys.executable, "-m", *words],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        cwd=str(Path(__file__).parents[1]),
    )
    process = spawn(command, log)
    started.append((process, command))
    for _ in range(400):
        said = await asyncio.to_thread(log.read_text)
        first, newline, _ = said.partition("\n")
        if newline and first.isdigit():
            return int(first)
        if newline or process.poll() is not None:
            raise BenchError(f"{' '.join(words)} did not start: {said}")
        await asyncio.sleep(0.05)
    raise BenchError(f"{' '.join(words)} did not start in 20 s")


async def _capture(nc: Nats, client: Client, into: Path) -> None:
    """Ask the fleet once and keep every message of that road."""
    heard: dict[type[Event], bytes] = {}
    complete = asyncio.Event()

    async def on_message(message: Msg) -> None:
        try:
            event = codec.decode(message.data)
        except codec.ContractError:
            return
        heard.setdefault(type(event), message.data)
        if len(heard) == len(MESSAGES):
            complete.set()

    subscriptions = [await nc.subscribe(subject_filter(kind), cb=on_message) for kind in MESSAGES]
    for _ in range(20):
        await client.ask(Load())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await complete.wait()
        if complete.is_set():
            break
    for subscription in subscriptions:
        await subscription.unsubscribe()
    if not complete.is_set():
        raise BenchError(f"the fleet did not say {[m.__name__ for m in MESSAGES if m not in heard]}")
    for kind, data in heard.items():
        (into / kind.__name__).write_bytes(data)


async def _streams(nc: Nats) -> None:
    """The bare road's streams: like the fleet's."""
    js = nc.jetstream()
    for spec in STREAMS:
        if spec.family in ("request", "admission", "placement", "outcome"):
            await js.add_stream(
                StreamConfig(
                    name="BENCH_" + spec.family.upper(),
                    subjects=[f"{PREFIX}.*.{spec.family}.>"],
                    storage=StorageType.FILE,
                    max_age=float(spec.max_age_s),
                    max_bytes=spec.max_bytes,
                    discard=DiscardPolicy(spec.discard),
                    duplicate_window=float(spec.duplicate_window_s),
                    allow_direct=True,
                )
            )


def body_of(prompt_bytes: int) -> bytes:
    """A chat request whose prompt begins with a number of its own, so that no two share more than a few tokens."""
    prompt = MARK.decode() + " " + "the quick brown fox jumps over the lazy dog " * (prompt_bytes // 44 + 1)
    message = {"role": "user", "content": prompt[:prompt_bytes]}
    return json.dumps({"model": MODEL, "messages": [message], "stream": True, "max_tokens": 64}).encode()


@contextlib.asynccontextmanager
async def running(args: argparse.Namespace, root: Path, say: Callable[[str], None]) -> AsyncIterator[Bench]:
    """Everything up; down again at the end."""
    started: list[Any] = []
    body = body_of(args.prompt_bytes)
    with StateDir(root / "state") as state:
        fleet: LocalFleet | None = None
        nc: Nats | None = None
        try:
            port = await _start(["benchmarks.engine", MODEL, str(args.tokens)], {}, root / "engine.log", started)
            engine = f"http://127.0.0.1:{port}"
            fleet = LocalFleet(state=state, fleet_text=FLEET.format(url=engine), say=say)
            await fleet.start()
            ready = fleet.ready()
            key = {"Authorization": f"Bearer {ready['key']}"}
            through = Client(f"{ready['api']}/chat/completions", key, body, MARK)
            nc = await nats.connect(ready["nats"])
            messages = root / "messages"
            messages.mkdir()
            await _capture(nc, through, messages)
            await _streams(nc)
            env = {"BENCH_NATS": ready["nats"], "BENCH_ENGINE": engine, "BENCH_MESSAGES": str(messages)}
            bare: dict[str, int] = {}
            relay_port = 0
            for role in ROLES:
                relay_port = await _start(["benchmarks.bare", role], env, root / f"{role}.log", started) or relay_port
                bare[role] = started[-1][0].pid
            pids = ready["pids"]
            counted = {name: pid for name, pid in pids.items() if name not in (*_NOT_COUNTED, "nats")}
            roads = [
                Road("direct", Client(f"{engine}/v1/chat/completions", {}, body, MARK), {}),
                Road("bare", Client(f"http://127.0.0.1:{relay_port}/v1/chat/completions", {}, body, MARK), bare),
                Road("fleet", through, counted),
            ]
            yield Bench(args, fleet, roads, pids["nats"])
            for road in roads:
                road.client.close()
        finally:
            if nc is not None:
                await nc.close()
            if fleet is not None:
                await fleet.stop()
            for process, command in reversed(started):
                stop(process, command)


async def _run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tokenfleet-bench-") as root:
        async with running(args, Path(root), say) as bench:
            if args.hold:
                print(json.dumps({"pids": bench.pids, "roads": [r.name for r in bench.roads]}), flush=True)
            result = await measure(bench, say)
    result |= {
        "tokens": args.tokens,
        "prompt_bytes": args.prompt_bytes,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    }
    return result


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rates", type=_numbers, default=[20.0, 50.0], metavar="R,R", help="requests per second")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all roads (default 5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a phase (default 8)")
    parser.add_argument("--idle-seconds", type=float, default=6.0, help="length of an idle phase (default 6)")
    parser.add_argument("--tokens", type=int, default=20, help="tokens of an answer (default 20)")
    parser.add_argument("--prompt-bytes", type=int, default=1000, help="bytes of a prompt (default 1000)")
    parser.add_argument("--clients", type=int, default=32, help="clients of the closed loop (default 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    parser.add_argument("--hold", action="store_true", help="print process ids, for a profiler")
    return parser


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run it; 0 all goals met, 1 some missed or it could not be run."""
    args = _parser().parse_args()
    try:
        result = uvloop.run(_run(args, _say))
    except (BenchError, LocalError) as error:
        _say(str(error))
        return 1
    goals = judge(result)
    result["goals"] = [
        {"what": what, "value": value, "relation": sign, "goal": goal, "met": met}
        for what, value, sign, goal, met in goals
    ]
    print(show(result, goals))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(met for *_, met in goals) else 1
