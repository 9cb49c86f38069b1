"""The verdict on a run: how many of the offered requests kept their promises, and at what speed.

Decides what counts as compliant and over what every figure is taken. Everything is over what was *offered*: a refused,
failed or unfinished request weighs as much as a served one, so shedding load can never look like serving it. Refuses to
know how requests were sent or placed. Pure.

Definitions: DistServe (Zhong et al., OSDI 2024) for goodput; MLPerf Inference for TTFT and TPOT; quantiles by nearest
rank, because interpolation has no meaning next to an infinity.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tokenfleet.fleet import ServiceClass
from tokenfleet.replay.errors import ReportError
from tokenfleet.replay.records import OUTCOMES, Record, nearest_rank

#: the site of a request that reached none
NO_SITE = "none"


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds by nearest rank; null where the rank falls on something that never came."""

    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one group of requests (all, a class, a tenant, a site)."""

    offered: int
    completed: int
    refused: int
    cancelled: int
    failed: int
    unfinished: int
    #: completed with an objective missed; what was put off until it was late anyway (relegated) ends here
    late: int
    #: over offered: what got no first token counts as +infinity
    ttft_ms: Quantiles
    ttft_completed_ms: Quantiles
    #: over completed answers of two tokens or more
    tpot_ms: Quantiles
    #: delivered tokens, also of broken answers, by the window
    output_tokens_per_s: float
    #: delivered tokens of compliant requests, by the window
    goodput_tokens_per_s: float
    #: output tokens of compliant requests over those of all offered ones, both as the trace states them
    compliance: float
    compliance_requests: float


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's run, in the shape that `--json` prints."""

    policy: str
    seed: int
    duration_s: float
    overall: Result
    classes: dict[str, Result]
    tenants: dict[str, Result]
    sites: dict[str, Result]
    #: Jain's index of the tenants' compliance, and of the classes': 1 when all are served alike, 1/n when only one is
    jain_tenants: float
    jain_classes: float
    #: the driver's own lateness in sending: judge the run by it before the run is judged
    lag_ms: Quantiles


def complies(record: Record, objectives: ServiceClass) -> bool:
    """Whether a request kept every promise that its class makes, and its own deadline, which may only tighten that.

    A threshold that the class does not set is kept. An answer without tokens has no first token: it is judged by its
    end alone. One that did not complete never complies.
    """
    if record.outcome != "completed" or record.e2e_ms is None:
        return False
    ends = [limit for limit in (objectives.e2e_ms, record.deadline_ms) if limit is not None]
    if ends and record.e2e_ms > min(ends):
        return False
    ttft_ms, tpot_ms = record.ttft_ms, record.tpot_ms
    if objectives.ttft_ms is not None and ttft_ms is not None and ttft_ms > objectives.ttft_ms:
        return False
    return objectives.tpot_ms is None or tpot_ms is None or tpot_ms <= objectives.tpot_ms


def window_s(planned_span_s: float, records: Sequence[Record]) -> float:
    """The window that rates are taken over, seconds: the span over which the trace offered its requests.

    Fixed by the trace and not by the run, so that a policy which drags its tail out is not measured over more time. A
    trace that offers everything at once (under a second) is measured until its last end.
    """
    if planned_span_s >= 1.0:
        return planned_span_s
    ends = [record.ended_ms for record in records if record.ended_ms is not None]
    return max([planned_span_s, *(end / 1000 for end in ends)]) or 1.0


def make(
    records: Sequence[Record],
    classes: Mapping[str, ServiceClass],
    *,
    policy: str,
    seed: int,
    duration_s: float,
) -> RunReport:
    """The report of one run over a window of `duration_s`.

    Raises `ReportError` for a request of a class without objectives: leaving it out would flatter the rest.
    """
    if duration_s <= 0:
        raise ReportError(f"the window must be longer than {duration_s} s")
    unknown = sorted({record.cls for record in records} - set(classes))
    if unknown:
        raise ReportError(f"no objectives for class {', '.join(unknown)}: name the fleet file")

    def result(group: Sequence[Record]) -> Result:
        return _result(group, classes, duration_s)

    lags = sorted(record.lag_ms for record in records)
    by_class = {k: result(v) for k, v in grouped(records, lambda r: r.cls).items()}
    by_tenant = {k: result(v) for k, v in grouped(records, lambda r: r.tenant).items()}
    return RunReport(
        policy=policy,
        seed=seed,
        duration_s=duration_s,
        overall=result(records),
        classes=by_class,
        tenants=by_tenant,
        sites={k: result(v) for k, v in grouped(records, lambda r: r.site or NO_SITE).items()},
        jain_tenants=round(jain([one.compliance for one in by_tenant.values()]), 6),
        jain_classes=round(jain([one.compliance for one in by_class.values()]), 6),
        lag_ms=quantiles(lags),
    )


def grouped(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Records by a key, keys in order."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return dict(sorted(groups.items()))


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe 1984); 1 of nothing or of nothing but zeros: nobody is worse off."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def quantiles(ordered: Sequence[float]) -> Quantiles:
    """Quantiles of sorted milliseconds; an infinity becomes null, as JSON has none."""

    def at(quantile: float) -> float | None:
        value = nearest_rank(ordered, quantile)
        return None if value is None or math.isinf(value) else round(value, 3)

    return Quantiles(p50=at(0.5), p90=at(0.9), p95=at(0.95), p99=at(0.99), p999=at(0.999))


def _result(records: Sequence[Record], classes: Mapping[str, ServiceClass], duration_s: float) -> Result:
    counts = dict.fromkeys(OUTCOMES, 0)
    ttft_all: list[float] = []
    ttft_completed: list[float] = []
    tpot: list[float] = []
    delivered = compliant_delivered = compliant_stated = stated = compliant = 0
    for record in records:
        counts[record.outcome] += 1
        delivered += record.output_tokens
        stated += record.stated_output_tokens
        ttft_ms = record.ttft_ms
        ttft_all.append(math.inf if ttft_ms is None else ttft_ms)
        if record.outcome == "completed":
            if ttft_ms is not None:
                ttft_completed.append(ttft_ms)
            if record.tpot_ms is not None:
                tpot.append(record.tpot_ms)
        if complies(record, classes[record.cls]):
            compliant += 1
            compliant_delivered += record.output_tokens
            compliant_stated += record.stated_output_tokens
    offered = len(records)
    return Result(
        offered=offered,
        completed=counts["completed"],
        refused=counts["refused"],
        cancelled=counts["cancelled"],
        failed=counts["failed"],
        unfinished=counts["unfinished"],
        late=counts["completed"] - compliant,
        ttft_ms=quantiles(sorted(ttft_all)),
        ttft_completed_ms=quantiles(sorted(ttft_completed)),
        tpot_ms=quantiles(sorted(tpot)),
        output_tokens_per_s=round(delivered / duration_s, 3),
        goodput_tokens_per_s=round(compliant_delivered / duration_s, 3),
        compliance=round(compliant_stated / stated, 6) if stated else 0.0,
        compliance_requests=round(compliant / offered, 6) if offered else 0.0,
    )


_COLUMNS: tuple[tuple[str, int, Callable[[Result], str]], ...] = (
    ("compliance", 6, lambda r: f"{100 * r.compliance:.1f}%"),
    ("goodput", 6, lambda r: f"{r.goodput_tokens_per_s:.0f}"),
    ("output", 6, lambda r: f"{r.output_tokens_per_s:.0f}"),
    ("completed", 5, lambda r: str(r.completed)),
    ("refused", 4, lambda r: str(r.refused)),
    ("lost", 4, lambda r: str(r.cancelled + r.failed + r.unfinished)),
    ("TTFT p50 s", 6, lambda r: _seconds(r.ttft_ms.p50)),
    ("TTFT p99 s", 6, lambda r: _seconds(r.ttft_ms.p99)),
)
_TAIL: tuple[tuple[str, int, Callable[[Result], str]], ...] = (
    ("late", 5, lambda r: str(r.late)),
    ("p99.9 s", 6, lambda r: _seconds(r.ttft_ms.p999)),
)


def table(reports: Sequence[RunReport], *, tail: bool = False) -> str:
    """The runs side by side as plain text: one line per group, under each figure one column per run, in their order.

    Goodput and output are tokens/s; `lost` is cancelled + failed + unfinished; TTFT is over offered requests, and
    `never` says that the rank falls on a request that got no token. With `tail`, who was late and who starved too:
    completed with an objective missed, P99.9, and Jain's index of compliance.
    """
    if not reports:
        raise ReportError("no run to print")
    scopes: list[tuple[str, list[Result | None]]] = [("overall", [r.overall for r in reports])]
    for title, groups in (
        ("class", [r.classes for r in reports]),
        ("tenant", [r.tenants for r in reports]),
        ("site", [r.sites for r in reports]),
    ):
        names = sorted({name for group in groups for name in group})
        scopes += [(f"{title} {name}", [group.get(name) for group in groups]) for name in names]
    label_width = max(len(label) for label, _ in scopes)
    marks = [chr(ord("A") + nth) for nth in range(len(reports))] if len(reports) > 1 else [""]
    columns = (*_COLUMNS, *_TAIL) if tail else _COLUMNS
    widths = [max(width, -(-len(title) // len(reports)) - 1) for title, width, _ in columns]
    head, under = " " * label_width + "  offered", " " * (label_width + 9)
    for (title, _, _), width in zip(columns, widths, strict=True):
        head += " |" + title.rjust((width + 1) * len(reports))
        under += " |" + "".join(f"{mark:>{width + 1}}" for mark in marks)
    lines = [f"{mark} = {report.policy}" for mark, report in zip(marks, reports, strict=True) if mark]
    lines += [head] + ([under] if len(reports) > 1 else [])
    kind = ""
    for label, results in scopes:
        if label.split(" ")[0] != kind:
            kind = label.split(" ")[0]
            lines.append("-" * len(head))
        counts = [0 if result is None else result.offered for result in results]
        offered = str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))
        line = f"{label:<{label_width}}{offered:>9}"
        for (_, _, show), width in zip(columns, widths, strict=True):
            line += " |" + "".join(f"{'-' if r is None else show(r):>{width + 1}}" for r in results)
        lines.append(line)
    if tail:
        lines.append("-" * len(head))
        lines.append(f"Jain's index of tenants: {' '.join(f'{one.jain_tenants:.3f}' for one in reports)}")
        lines.append(f"Jain's index of classes: {' '.join(f'{one.jain_classes:.3f}' for one in reports)}")
    return "\n".join(lines)


def _seconds(value_ms: float | None) -> str:
    return "never" if value_ms is None else f"{value_ms / 1000:.2f}"
