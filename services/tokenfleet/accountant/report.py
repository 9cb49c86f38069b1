"""Goodput from the ledger: the figures of docs/metrics.md over a stretch of time, for any grouping.

Decides how rows become figures; what a row is worth was decided when it was written. Rows are attributed by the time
at which they finished, rates are over the whole stretch. Percentiles are nearest-rank, over offered requests for
TTFT: what got no first token counts as +∞ and is said as null. Sites cost what their GPUs cost whether they work or
not; groups bear a site's cost by their share of the tokens that it delivered.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncEngine

from tokenfleet.database import uncancelled
from tokenfleet.fleet import Fleet

#: what can be grouped by → column of the ledger
DIMENSIONS = {
    "class": "service_class",
    "tenant": "tenant",
    "site": "served_site",
    "model": "model",
    "version": "version",
    "task": "task",
    "instance": "instance",
    "gateway": "gateway",
}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one group."""

    group: dict[str, str]
    offered: int
    completed: int
    refused: int
    cancelled: int
    failed: int
    #: the ledger knows ends only; open requests are in the services' metrics
    unfinished: int = 0
    compliant: int
    #: attempts that were not final
    repeated: int
    ttft_ms: dict[str, float | None]
    ttft_completed_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    output_tokens: int
    compliant_tokens: int
    offered_tokens: int
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    #: compliant tokens over offered tokens; None when none were offered
    compliance: float | None
    #: part of the offered tokens was never delivered and is the learned median
    compliance_estimated: bool
    #: compliant over offered requests; None when nothing was offered
    compliance_requests: float | None
    wasted_tokens: dict[str, int]
    #: of the priced sites that served it, in the currency of the fleet file; None without any
    cost: float | None = None
    #: None without prices or without compliant tokens at a priced site
    cost_per_million_compliant_tokens: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    since_s: float
    by: tuple[str, ...]
    overall: Result
    groups: tuple[Result, ...]
    #: site → what it costs an hour, for sites with a price
    hourly_costs: dict[str, float] = {}


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time and a class, for a plot."""

    #: seconds before the end of the report at which the stretch ends
    ago_s: float
    service_class: str
    output_tokens: int
    compliant_tokens: int


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How long the first token of one class's offered requests took, for a plot."""

    service_class: str
    objective_ms: float | None
    #: at 1 %, 2 % … 100 % of the offered requests; None: never
    ttft_ms: list[float | None]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What a page shows beside the figures."""

    bin_s: float
    bins: list[Bin]
    spreads: list[Spread]


def hourly_costs(fleet: Fleet) -> dict[str, float]:
    """What each site with a price costs an hour: its GPUs, or those of its declared instances if these are more."""
    return {
        name: site.gpu_hour_price * max(site.gpus, sum(instance.gpus for instance in site.instances.values()))
        for name, site in fleet.sites.items()
        if site.gpu_hour_price is not None
    }


async def goodput(
    engine: AsyncEngine, *, since_s: float, by: Sequence[str] = (), costs: Mapping[str, float] | None = None
) -> Report:
    """The figures of the last `since_s` seconds, with costs where `hourly_costs` are given.

    KeyError for a dimension that there is not.
    """
    columns = [DIMENSIONS[name] for name in by]
    costs = dict(costs or {})

    async def work() -> Report:
        async with engine.connect() as connection:
            # one moment for all of them, or they would not add up
            await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
            found = (await connection.execute(text(_figures(columns)), {"since_s": since_s})).all()
            wasted = (await connection.execute(text(_wasted(columns)), {"since_s": since_s})).all()
            served = (await connection.execute(text(_served(columns)), {"since_s": since_s})).all() if costs else []
        report = _report(found, wasted, since_s, tuple(by))
        return _with_costs(report, served, costs) if costs else report

    return await uncancelled(work())


async def course(engine: AsyncEngine, *, since_s: float, bins: int = 60) -> Course:
    """How it went over the last `since_s` seconds."""
    bin_s = since_s / bins

    async def work() -> Course:
        async with engine.connect() as connection:
            found = await connection.execute(text(_BINS), {"since_s": since_s, "bin_s": bin_s})
            series = [
                Bin(
                    ago_s=int(row.nth) * bin_s,
                    service_class=row.service_class,
                    output_tokens=int(row.output_tokens),
                    compliant_tokens=int(row.compliant_tokens),
                )
                for row in found
            ]
            spreads = [
                Spread(
                    service_class=row.service_class,
                    objective_ms=row.objective_ms,
                    ttft_ms=[None if math.isinf(value) else value for value in row.ttft],
                )
                for row in await connection.execute(text(_SPREADS), {"since_s": since_s})
            ]
        return Course(bin_s=bin_s, bins=series, spreads=spreads)

    return await uncancelled(work())


def _sets(columns: Sequence[str]) -> tuple[str, str]:
    """(columns to select, GROUP BY clause): every group, and all of them together."""
    selected = ", ".join(columns) + ", " if columns else ""
    bits = f"GROUPING({', '.join(columns)})" if columns else "0"
    grouped = f"GROUPING SETS (({', '.join(columns)}), ())" if columns else "GROUPING SETS (())"
    return f"{selected}{bits} AS together", grouped


def _figures(columns: Sequence[str]) -> str:
    selected, grouped = _sets(columns)
    quantiles = "ARRAY[" + ", ".join(map(str, QUANTILES.values())) + "]::double precision[]"
    return f"""
    WITH rows AS (
        SELECT * FROM attempts WHERE finished_at > now() - make_interval(secs => :since_s)
    ), medians AS (
        -- for rows that were written before any length was known
        SELECT service_class AS median_class, percentile_disc(0.5) WITHIN GROUP (ORDER BY output_tokens) AS median
        FROM rows WHERE final AND outcome = 'completed' GROUP BY service_class
    )
    SELECT {selected},
        count(*) FILTER (WHERE final) AS offered,
        count(*) FILTER (WHERE final AND outcome = 'completed') AS completed,
        count(*) FILTER (WHERE final AND outcome = 'refused') AS refused,
        count(*) FILTER (WHERE final AND outcome IN ('cancelled', 'client_stalled')) AS cancelled,
        count(*) FILTER (WHERE compliant) AS compliant,
        count(*) FILTER (WHERE NOT final) AS repeated,
        coalesce(sum(output_tokens), 0) AS output_tokens,
        coalesce(sum(output_tokens) FILTER (WHERE compliant), 0) AS compliant_tokens,
        coalesce(sum(coalesce(offered_output_tokens, median, output_tokens)) FILTER (WHERE final), 0) AS offered_tokens,
        coalesce(bool_or(offered_estimated) FILTER (WHERE final), false) AS estimated,
        percentile_disc({quantiles}) WITHIN GROUP (ORDER BY coalesce(ttft_ms, 'Infinity')) FILTER (WHERE final)
            AS ttft,
        percentile_disc({quantiles}) WITHIN GROUP (ORDER BY ttft_ms) FILTER (WHERE final AND outcome = 'completed')
            AS ttft_completed,
        percentile_disc({quantiles}) WITHIN GROUP (ORDER BY tpot_ms)
            FILTER (WHERE final AND outcome = 'completed' AND output_tokens > 1) AS tpot
    FROM rows LEFT JOIN medians ON median_class = service_class
    GROUP BY {grouped}
    ORDER BY together, {", ".join(columns) or "together"}
    """


def _wasted(columns: Sequence[str]) -> str:
    selected, _ = _sets(columns)
    sets = f"(({', '.join(columns)}, wasted_cause), (wasted_cause))" if columns else "((wasted_cause))"
    return f"""
    SELECT {selected}, wasted_cause, sum(wasted_tokens) AS tokens
    FROM attempts
    WHERE finished_at > now() - make_interval(secs => :since_s) AND wasted_tokens > 0
    GROUP BY GROUPING SETS {sets}
    ORDER BY wasted_cause
    """


def _served(columns: Sequence[str]) -> str:
    selected = ", ".join(columns) + ", " if columns else ""
    grouped = ", ".join([*columns, "served_site"])
    return f"""
    SELECT {selected}served_site AS at_site, sum(output_tokens) AS output_tokens,
        coalesce(sum(output_tokens) FILTER (WHERE compliant), 0) AS compliant_tokens
    FROM attempts WHERE finished_at > now() - make_interval(secs => :since_s) AND served_site <> ''
    GROUP BY {grouped}
    """


_BINS = """
    SELECT floor(extract(epoch FROM now() - finished_at) / :bin_s) AS nth, service_class,
        sum(output_tokens) AS output_tokens,
        coalesce(sum(output_tokens) FILTER (WHERE compliant), 0) AS compliant_tokens
    FROM attempts
    WHERE finished_at > now() - make_interval(secs => :since_s) AND finished_at <= now()
    GROUP BY nth, service_class ORDER BY nth DESC, service_class
"""
_SPREADS = """
    SELECT service_class, max(ttft_objective_ms) AS objective_ms,
        percentile_disc(ARRAY(SELECT n / 100.0::double precision FROM generate_series(1, 100) AS n))
            WITHIN GROUP (ORDER BY coalesce(ttft_ms, 'Infinity')) AS ttft
    FROM attempts
    WHERE final AND finished_at > now() - make_interval(secs => :since_s)
    GROUP BY service_class ORDER BY service_class
"""


def _with_costs(report: Report, served: Sequence[Row[Any]], costs: Mapping[str, float]) -> Report:
    """Lay the sites' costs over the groups."""
    hours = report.since_s / 3600
    width = len(report.by)
    delivered: dict[str, int] = {}
    for row in served:
        delivered[row.at_site] = delivered.get(row.at_site, 0) + int(row.output_tokens)
    borne: dict[tuple[str, ...], float] = {}
    tokens: dict[tuple[str, ...], int] = {}
    for row in served:
        if row.at_site in costs:
            key = tuple(str(value) for value in row[:width])
            share = int(row.output_tokens) / delivered[row.at_site] if delivered[row.at_site] else 0.0
            borne[key] = borne.get(key, 0.0) + share * costs[row.at_site] * hours
            tokens[key] = tokens.get(key, 0) + int(row.compliant_tokens)

    def priced(result: Result, cost: float, compliant_tokens: int) -> Result:
        each = cost / compliant_tokens * 1e6 if compliant_tokens else None
        return msgspec.structs.replace(
            result,
            cost=round(cost, 6),
            cost_per_million_compliant_tokens=None if each is None else round(each, 6),
        )

    groups = []
    for result in report.groups:
        key = tuple(result.group[name] for name in report.by)
        groups.append(priced(result, borne[key], tokens[key]) if key in borne else result)
    return msgspec.structs.replace(
        report,
        # of all sites, idle ones too
        overall=priced(report.overall, sum(costs.values()) * hours, sum(tokens.values())),
        groups=tuple(groups),
        hourly_costs=dict(sorted(costs.items())),
    )


def _report(found: Sequence[Row[Any]], wasted: Sequence[Row[Any]], since_s: float, by: tuple[str, ...]) -> Report:
    def group(row: Row[Any]) -> dict[str, str] | None:
        """None for all together."""
        if not by or row.together:
            return None
        return {name: str(row[index]) for index, name in enumerate(by)}

    waste: dict[str, dict[str, int]] = {}
    for row in wasted:
        waste.setdefault(repr(group(row)), {})[row.wasted_cause] = int(row.tokens)
    overall: Result | None = None
    groups: list[Result] = []
    for row in found:
        key = group(row)
        result = _result(row, key or {}, waste.get(repr(key), {}), since_s)
        if key is None:
            overall = result
        else:
            groups.append(result)
    assert overall is not None  # the empty grouping set always has its row
    return Report(since_s=since_s, by=by, overall=overall, groups=tuple(groups))


def _result(row: Row[Any], group: dict[str, str], wasted: dict[str, int], since_s: float) -> Result:
    offered, offered_tokens, compliant_tokens = int(row.offered), int(row.offered_tokens), int(row.compliant_tokens)
    return Result(
        group=group,
        offered=offered,
        completed=row.completed,
        refused=row.refused,
        cancelled=row.cancelled,
        failed=offered - row.completed - row.refused - row.cancelled,
        compliant=row.compliant,
        repeated=row.repeated,
        ttft_ms=_quantiles(row.ttft),
        ttft_completed_ms=_quantiles(row.ttft_completed),
        tpot_ms=_quantiles(row.tpot),
        output_tokens=int(row.output_tokens),
        compliant_tokens=compliant_tokens,
        offered_tokens=offered_tokens,
        output_tokens_per_s=round(int(row.output_tokens) / since_s, 3),
        goodput_tokens_per_s=round(compliant_tokens / since_s, 3),
        compliance=round(compliant_tokens / offered_tokens, 6) if offered_tokens else None,
        compliance_estimated=bool(row.estimated),
        compliance_requests=round(row.compliant / offered, 6) if offered else None,
        wasted_tokens=wasted,
    )


def _quantiles(values: Sequence[float | None] | None) -> dict[str, float | None]:
    """Infinity and nothing at all are both null: JSON has neither."""
    return {
        name: None if value is None or math.isinf(value) else round(value, 3)
        for name, value in zip(QUANTILES, values or [None] * len(QUANTILES), strict=True)
    }


async def attempts_of(engine: AsyncEngine, request_id: str) -> list[dict[str, Any]]:
    """The ledger rows of one request, by attempt."""

    async def work() -> list[dict[str, Any]]:
        async with engine.connect() as connection:
            found = await connection.execute(
                text("SELECT * FROM attempts WHERE request_id = :request_id ORDER BY attempt"),
                {"request_id": request_id},
            )
            return [dict(row._mapping) for row in found]

    return await uncancelled(work())
