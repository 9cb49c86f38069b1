"""How long simulating takes: goals on two fleets, and how it grows with requests and with instances."""

import gc
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._memory import peak_rss_bytes
from benchmarks.evidence import Cell, Curves, Figures, Goal, Part, Quick, simulate
from tokenfleet.simulator.experiment import Done

#: pools of the scenario `ten-sites`
_POOLS = 30


def _timed(seed: int, args: Mapping[str, Any]) -> tuple[Done, float, float]:
    """A run, with the CPU time and the time on the wall that it took."""
    gc.collect()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    done = simulate(seed, **args)
    return done, time.process_time() - began_cpu_s, time.perf_counter() - began_s


def measured(seed: int, **args: Any) -> Figures:
    """One run: what it took, in a process of its own."""
    done, cpu_s, wall_s = _timed(seed, args)
    requests = done.messages["RequestReceived"]
    return Figures(
        metrics={
            "requests": float(requests),
            "reports": float(done.messages["CapacityReported"]),
            "messages": float(sum(done.messages.values())),
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "ms_per_request": 1000.0 * cpu_s / requests,
            "peak_mib": peak_rss_bytes() / 2**20,
            "compliance_requests": done.report.overall.compliance_requests,
        }
    )


def over_requests(seed: int, *, policy: str, durations_s: Sequence[float], count: int, rate_per_s: float) -> Figures:
    """The same fleet and rate for longer and longer: CPU time over requests, and its power of them."""
    points = []
    for duration_s in durations_s:
        done, cpu_s, _ = _timed(seed, _ten_sites(policy, duration_s, count, rate_per_s))
        points.append((float(done.messages["RequestReceived"]), cpu_s))
    return Figures(
        metrics={"exponent": _power(points), "cpu_s": sum(cpu for _, cpu in points)}, series={"requests": points}
    )


def over_instances(seed: int, *, policy: str, duration_s: float, counts: Sequence[int], rate_per_s: float) -> Figures:
    """The same requests on larger and larger fleets: CPU time over instances, and its power of them."""
    points = []
    for count in counts:
        _, cpu_s, _ = _timed(seed, _ten_sites(policy, duration_s, count, rate_per_s))
        points.append((float(_POOLS * count), cpu_s))
    return Figures(
        metrics={"exponent": _power(points), "cpu_s": sum(cpu for _, cpu in points)}, series={"instances": points}
    )


def _ten_sites(policy: str, duration_s: float, count: int, rate_per_s: float) -> dict[str, Any]:
    overrides = {
        "scenario": {"duration_s": duration_s, "warmup_s": duration_s / 10},
        "workload": {"rate_per_s": rate_per_s},
        "pools": {"count": count},
    }
    return {"scenario": "ten-sites", "policy": policy, "overrides": overrides}


def _power(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of y ~ x^e that fits best: the slope of the logarithms."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


QUESTION = """
Is the simulator fast enough to plan with? Two runs with `tokenfleet`, each in a process of its own on one core:
sixteen 8B instances under the 30-minute slice of Mooncake's conversation trace (goal: 30 s), and the fleet of the
packaged scenario `ten-sites` as it is: five minutes of 2,000 instances in ten sites under 2,000 requests/s (goals:
15 minutes, 8 GiB). Goals are on CPU time, so that waiting for other programs does not count; beside it stands what
the clock said. CPU time still grows where others use the same caches and memory. Sites are never simulated apart: one
world, one clock, one process.

Growth: the ten sites with 180 instances under 180 requests/s for longer and longer, and 4,000 requests on larger and
larger fleets. The exponent is the slope of the logarithms: 1 is linear.
"""

FINDINGS = """
What a request costs is spread over its dozen messages and their readers; no single place is left that dominates. The
largest are TokenPilot's choice among a pool's instances, FleetMind's ranking of ten sites, SLOMax's admission, and
what is learned from an outcome.

What helped, by profile: instances that can serve are found once per report instead of once per request (before,
FleetMind and SLOMax looked at all 2,000 for each request), permitted sites once per fleet file; a site's reports
travel together; sums over bookings are kept; TokenPilot looks at the offers, bookings and models that changed, and
mirrors what an instance teaches its equals for all of them at once; prompts' blocks move in bulk; the garbage
collector looks rarely; arrivals and time-outs wait in rows of their own, so that the heap of events stays small (it
held 600,000); a prompt's digests go into the prefix index in half the vector operations; who can serve a kind of
request is found for all sites at once; figures of an explanation are rounded without a detour by their digits; what
was only asked about is not mirrored. Every step gave byte-identical reports.

What limits it: Python objects and one core. Beside busy programs the same run takes more CPU time: measure it alone.
Sites could be simulated in processes of their own between messages, because no message travels between sites in less
than half a round trip; that was not tried.
"""

PART = Part(
    title="What simulating costs",
    question=QUESTION,
    cells=(
        Cell(
            name="16 instances, conversation",
            run=measured,
            args={"scenario": "conversation-8b", "policy": "tokenfleet"},
            alone=True,
        ),
        Cell(
            name="over requests",
            run=over_requests,
            args={"policy": "tokenfleet", "durations_s": [5.0, 10.0, 20.0, 40.0], "count": 6, "rate_per_s": 180.0},
            alone=True,
        ),
        Cell(
            name="over instances",
            run=over_instances,
            args={"policy": "tokenfleet", "duration_s": 20.0, "counts": [6, 12, 25, 67], "rate_per_s": 200.0},
            alone=True,
        ),
        Cell(
            name="2,000 instances, 5 minutes",
            run=measured,
            args={"scenario": "ten-sites", "policy": "tokenfleet"},
            alone=True,
        ),
    ),
    goals=(
        Goal(
            name="conversation on one core, s",
            cell="16 instances, conversation",
            metric="cpu_s",
            at_most=30.0,
            checked=False,
        ),
        Goal(
            name="ten sites on one core, s",
            cell="2,000 instances, 5 minutes",
            metric="cpu_s",
            at_most=900.0,
            checked=False,
        ),
        Goal(
            name="memory of ten sites, MiB",
            cell="2,000 instances, 5 minutes",
            metric="peak_mib",
            at_most=8192.0,
            checked=False,
        ),
        Goal(name="near-linear in requests", cell="over requests", metric="exponent", at_most=1.2),
        Goal(name="sub-linear in instances", cell="over instances", metric="exponent", at_most=0.8),
    ),
    columns=(
        ("requests", "requests", 1.0, 0),
        ("reports", "capacity reports", 1.0, 0),
        ("messages", "messages", 1.0, 0),
        ("cpu_s", "CPU s", 1.0, 1),
        ("wall_s", "clock s", 1.0, 1),
        ("ms_per_request", "CPU ms per request", 1.0, 2),
        ("peak_mib", "peak MiB", 1.0, 0),
        ("exponent", "exponent", 1.0, 2),
        "compliance_requests",
    ),
    plots=(
        Curves(
            title="CPU time over requests, 180 instances",
            curves=(("over requests", "requests"),),
            x="requests",
            y="CPU s",
        ),
        Curves(
            title="CPU time over instances, 4,000 requests",
            curves=(("over instances", "instances"),),
            x="instances",
            y="CPU s",
        ),
    ),
    seeds=(1,),
    quick=Quick(cells=("over instances",), seeds=1),
    findings=FINDINGS,
)
