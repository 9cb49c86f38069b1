"""Policies × seeds: runs them, on as many processes as there are cores, and says what they have in common.

Every policy meets the identical arrivals of a seed. What is said over seeds is a mean with its 95% confidence interval
(Student's t): one run is an anecdote. Results do not depend on how many processes made them.
"""

import gc
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.queues import Queue as ProcessQueue
from queue import Empty
from typing import Any, Literal

import msgspec

from tokenfleet.replay import report
from tokenfleet.replay.records import Record
from tokenfleet.replay.report import Result, RunReport
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import Scenario
from tokenfleet.simulator.search import Found, Probe, Search, probe
from tokenfleet.simulator.world import World

#: two-sided 95% quantiles of Student's t by degrees of freedom (then the normal one's, to two digits right above 120)
_T95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086,
    25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip


class Task(msgspec.Struct, frozen=True):
    """One run to be made."""

    policy: str
    seed: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One run that was made, as far as it is needed further on."""

    report: RunReport
    #: counted requests; empty unless they were asked for
    records: list[Record]
    events: int
    messages: dict[str, int]
    notes: dict[str, int]
    prefix_hit: float
    #: what must hold at a run's end and did not; empty in any sound run
    findings: list[str]


#: (task, ended, offered) of a run under way, or of one that is done
OnProgress = Callable[[Task, int, int], None]


def make(scenario: Scenario, task: Task, *, keep_records: bool = False, on_progress: OnProgress | None = None) -> Done:
    """Make one run and judge it: requests that arrive in the warm-up are not counted.

    Raises `SimulationError` when a core fails, `UnknownPolicyError`, `ScenarioError`.
    """

    def progress(ended: int, offered: int, _virtual_ms: float) -> None:
        if on_progress is not None:
            on_progress(task, ended, offered)

    with _rarely_collected():
        world = World(scenario, choose(task.policy), task.seed, on_progress=progress)
        run = world.run()
    warmup_ms = scenario.info.warmup_s * 1000.0
    counted = [record for record in run.records if record.planned_ms >= warmup_ms]
    return Done(
        report=report.make(
            counted,
            scenario.fleet.classes,
            policy=task.policy,
            seed=task.seed,
            duration_s=window_s(scenario, counted),
        ),
        records=counted if keep_records else [],
        events=run.events,
        messages=run.messages,
        notes=run.notes,
        prefix_hit=run.prefix_hit,
        findings=world.findings(),
    )


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """A run makes hardly any cycles and millions of objects that stay: looking through them all the time finds none."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def window_s(scenario: Scenario, counted: Sequence[Record]) -> float:
    """The window that rates are taken over: the time in which counted requests were offered, whatever came of them."""
    info = scenario.info
    if info.duration_s:
        return info.duration_s - info.warmup_s
    return max(record.planned_ms for record in counted) / 1000.0 - info.warmup_s if counted else 1.0


_queue: "ProcessQueue[tuple[Task, int, int]] | None" = None


def _begin_worker(queue: "ProcessQueue[tuple[Task, int, int]]") -> None:
    global _queue
    _queue = queue


def _work(scenario: Scenario, task: Task, keep_records: bool) -> Done:
    assert _queue is not None
    queue = _queue
    last = -1

    def tell(task: Task, ended: int, offered: int) -> None:
        nonlocal last
        if ended * 50 // offered > last:
            last = ended * 50 // offered
            queue.put((task, ended, offered))

    return make(scenario, task, keep_records=keep_records, on_progress=tell)


def run_all(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    processes: int | None = None,
    keep_records: Literal["none", "first", "all"] = "none",
    on_progress: OnProgress | None = None,
) -> list[Done]:
    """Every policy with every seed, in the order policy by policy; records of no, the first or every seed are kept.

    Raises what `make` raises, also when it happened in another process.
    """
    tasks = [Task(policy, seed) for policy in policies for seed in seeds]
    for policy in policies:
        choose(policy)  # a wrong name fails before anything runs
    workers = min(len(tasks), processes or os.cpu_count() or 1)

    def keeps(task: Task) -> bool:
        return keep_records == "all" or (keep_records == "first" and task.seed == seeds[0])

    if workers == 1:
        return [make(scenario, task, keep_records=keeps(task), on_progress=on_progress) for task in tasks]
    context = multiprocessing.get_context("spawn")
    queue: ProcessQueue[tuple[Task, int, int]] = context.Queue()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(queue,)) as pool:
        futures = [pool.submit(_work, scenario, task, keeps(task)) for task in tasks]
        open_: set[Future[Done]] = set(futures)
        while open_:
            done, open_ = wait(open_, timeout=0.5, return_when=FIRST_COMPLETED)
            _drain(queue, on_progress)
            failed = next((future for future in done if future.exception() is not None), None)
            if failed is not None:
                for future in open_:
                    future.cancel()
                failed.result()
        return [future.result() for future in futures]


def _drain(queue: "ProcessQueue[tuple[Task, int, int]]", on_progress: OnProgress | None) -> None:
    while True:
        try:
            said = queue.get_nowait()
        except Empty:
            return
        if on_progress is not None:
            on_progress(*said)


def search(
    scenario: Scenario,
    policy: str,
    seeds: Sequence[int],
    *,
    lowest: float,
    highest: float,
    processes: int | None = None,
    on_speed: Callable[[float, Sequence[Probe]], None] | None = None,
) -> Found:
    """Stable load and knee of a policy on a scenario; speeds are multiples of the scenario's own.

    Raises what `make` raises.
    """

    def at(speed: float) -> list[Probe]:
        faster = scenario.faster(speed)
        done = run_all(faster, [policy], seeds, processes=processes, keep_records="all")
        probes = []
        for one in done:
            begin_ms = faster.info.warmup_s * 1000.0
            probes.append(probe(one.records, begin_ms, begin_ms + one.report.duration_s * 1000.0))
        if on_speed is not None:
            on_speed(speed, probes)
        return probes

    return Search(at, lowest=lowest, highest=highest).find(policy)


# ---------------------------------------------------------------------------------------------- over seeds


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds and the half width of its 95% confidence interval; null where a seed has no value."""

    mean: float | None
    ci95: float | None


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One group (all, a class, a tenant, a site) of one policy over all seeds."""

    offered: Estimate
    compliance: Estimate
    compliance_requests: Estimate
    goodput_tokens_per_s: Estimate
    output_tokens_per_s: Estimate
    refused: Estimate
    unfinished: Estimate
    #: completed with an objective missed
    late: Estimate
    ttft_ms_p50: Estimate
    ttft_ms_p95: Estimate
    ttft_ms_p99: Estimate
    ttft_ms_p999: Estimate
    tpot_ms_p50: Estimate


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over all seeds."""

    policy: str
    seeds: tuple[int, ...]
    #: Jain's index of the tenants' compliance: 1 when all tenants are served alike, 1/n when only one is
    jain_tenants: Estimate
    #: the same of the classes' compliance
    jain_classes: Estimate
    prefix_hit: Estimate
    overall: GroupSummary
    classes: dict[str, GroupSummary]
    tenants: dict[str, GroupSummary]
    sites: dict[str, GroupSummary]


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and 95% half width; a single value has no interval, and a missing one makes the mean unknowable."""
    known = [value for value in values if value is not None]
    if not known or len(known) != len(values):
        return Estimate(None, None)
    mean = sum(known) / len(known)
    if len(known) < 2:
        return Estimate(round(mean, 6), None)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    free = len(known) - 1
    t = _T95.get(free) or next((q for f, q in sorted(_T95.items(), reverse=True) if f <= free), 1.96)
    return Estimate(round(mean, 6), round(t * deviation / math.sqrt(len(known)), 6))


def summarise(done: Sequence[Done]) -> list[Summary]:
    """The runs by policy, in the order in which policies first appear."""
    by_policy: dict[str, list[Done]] = {}
    for one in done:
        by_policy.setdefault(one.report.policy, []).append(one)
    return [_summary(policy, runs) for policy, runs in by_policy.items()]


def _summary(policy: str, runs: Sequence[Done]) -> Summary:
    reports = [run.report for run in runs]

    def groups(of: Callable[[RunReport], dict[str, Result]]) -> dict[str, GroupSummary]:
        names = sorted({name for one in reports for name in of(one)})
        return {name: _group([of(one).get(name) for one in reports]) for name in names}

    return Summary(
        policy=policy,
        seeds=tuple(one.seed for one in reports),
        jain_tenants=estimate([one.jain_tenants for one in reports]),
        jain_classes=estimate([one.jain_classes for one in reports]),
        prefix_hit=estimate([run.prefix_hit for run in runs]),
        overall=_group([one.overall for one in reports]),
        classes=groups(lambda one: one.classes),
        tenants=groups(lambda one: one.tenants),
        sites=groups(lambda one: one.sites),
    )


def _group(results: Sequence[Result | None]) -> GroupSummary:
    def over(of: Callable[[Result], float | None], nothing: float | None = None) -> Estimate:
        return estimate([nothing if result is None else of(result) for result in results])

    return GroupSummary(
        offered=over(lambda r: r.offered, 0),
        compliance=over(lambda r: r.compliance),
        compliance_requests=over(lambda r: r.compliance_requests),
        goodput_tokens_per_s=over(lambda r: r.goodput_tokens_per_s, 0.0),
        output_tokens_per_s=over(lambda r: r.output_tokens_per_s, 0.0),
        refused=over(lambda r: r.refused, 0),
        unfinished=over(lambda r: r.unfinished, 0),
        late=over(lambda r: r.late, 0),
        ttft_ms_p50=over(lambda r: r.ttft_ms.p50),
        ttft_ms_p95=over(lambda r: r.ttft_ms.p95),
        ttft_ms_p99=over(lambda r: r.ttft_ms.p99),
        ttft_ms_p999=over(lambda r: r.ttft_ms.p999),
        tpot_ms_p50=over(lambda r: r.tpot_ms.p50),
    )


_COLUMNS: tuple[tuple[str, float, int, str], ...] = (
    ("compliance_requests", 100.0, 1, "compliant %"),
    ("compliance", 100.0, 1, "of tokens %"),
    ("goodput_tokens_per_s", 1.0, 0, "goodput tok/s"),
    ("output_tokens_per_s", 1.0, 0, "output tok/s"),
    ("refused", 1.0, 0, "refused"),
    ("unfinished", 1.0, 0, "unfinished"),
    ("late", 1.0, 0, "late"),
    ("ttft_ms_p50", 0.001, 2, "TTFT p50 s"),
    ("ttft_ms_p95", 0.001, 2, "p95 s"),
    ("ttft_ms_p99", 0.001, 2, "p99 s"),
    ("ttft_ms_p999", 0.001, 2, "p99.9 s"),
)


def table(summaries: Sequence[Summary]) -> str:
    """The policies group by group as plain text, `mean ±half width`; `never`: a rank fell on what got no token."""
    rows: list[list[str]] = [["", "policy", *(title for *_, title in _COLUMNS)]]
    rows += [["overall" if not n else "", s.policy, *_cells(s.overall)] for n, s in enumerate(summaries)]
    scopes: tuple[tuple[str, Callable[[Summary], dict[str, GroupSummary]]], ...] = (
        ("class", lambda s: s.classes),
        ("tenant", lambda s: s.tenants),
        ("site", lambda s: s.sites),
    )
    for title, of in scopes:
        rows.append([])
        for name in sorted({name for summary in summaries for name in of(summary)}):
            for n, summary in enumerate(summaries):
                group = of(summary).get(name)
                cells = ["-"] * len(_COLUMNS) if group is None else _cells(group)
                rows.append([f"{title} {name}" if not n else "", summary.policy, *cells])
    rows.append([])
    rows.append(["Jain's index: tenants, classes; prefix hit %", ""])
    for summary in summaries:
        fair = (_cell(summary.jain_tenants, 1.0, 3), _cell(summary.jain_classes, 1.0, 3))
        rows.append(["", summary.policy, *fair, _cell(summary.prefix_hit, 100.0, 1)])
    widths = [max(len(row[n]) for row in rows if len(row) > n) for n in range(len(_COLUMNS) + 2)]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[n]) if n < 2 else cell.rjust(widths[n]) for n, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cells(group: Any) -> list[str]:
    return [_cell(getattr(group, name), scale, digits) for name, scale, digits, _ in _COLUMNS]


def _cell(value: Estimate, scale: float, digits: int) -> str:
    if value.mean is None:
        return "never"
    text = f"{value.mean * scale:.{digits}f}"
    return text if value.ci95 is None else f"{text} ±{value.ci95 * scale:.{digits}f}"
