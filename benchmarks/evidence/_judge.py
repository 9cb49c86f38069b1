"""Turns runs into means, intervals, signs and verdicts, and says which of them contradict what is committed.

A sign is that of a mean difference whose 95% interval (Student's t, paired by seed) excludes zero; else it is 0.
One run has no interval and so no sign.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from benchmarks.evidence._part import Cell, Compare, Figures, Goal, Part, several
from tokenfleet.simulator.experiment import estimate

Sign = Literal[-1, 0, 1]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a cell over its seeds. A value that never came is infinite and written as null."""

    mean: float | None
    ci95: float | None
    values: tuple[float | None, ...]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison as the runs found it."""

    name: str
    metric: str
    ours: str
    #: of several the best
    theirs: str
    how: str
    #: null: infinite on one side for some seed, then the sign is that of all seeds, where they agree
    mean: float | None
    ci95: float | None
    values: tuple[float | None, ...]
    sign: Sign
    #: the mean's own direction, whatever its interval
    leans: Sign
    expect: Sign
    goal: str = ""
    reached: bool | None = None
    #: whether the whole interval is beyond the goal
    surely: bool | None = None


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on one cell's metric as the runs found it."""

    name: str
    metric: str
    cell: str
    mean: float | None
    ci95: float | None
    goal: str
    reached: bool
    checked: bool = True


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A part's outcome: everything that its documents say in figures."""

    cells: dict[str, dict[str, Figure]]
    compared: tuple[Compared, ...]
    goals: tuple[Met, ...]


class UnknownMetricError(Exception):
    """A part asks for a metric that its cells do not have; names those that they have."""


def figure(values: Sequence[float | None]) -> Figure:
    """Mean and interval of one metric; unknown as soon as one seed has none or an infinite one."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    over = estimate(finite)
    return Figure(mean=over.mean, ci95=over.ci95, values=tuple(None if v is None else round(v, 6) for v in finite))


def judge(
    part: Part,
    cells: Sequence[Cell],
    runs: Mapping[tuple[str, int], Figures],
    seeds: Sequence[int],
) -> Judged:
    """Judge the runs of these cells; comparisons and goals that name others are left out."""
    names = {cell.name for cell in cells}
    of = {cell.name: tuple(cell.seeds if cell.seeds is not None else seeds) for cell in cells}

    def values(cell: str, metric: str) -> list[float | None]:
        found = []
        for seed in of[cell]:
            metrics = runs[cell, seed].metrics
            if metric not in metrics:
                raise UnknownMetricError(f"{cell} has no metric {metric!r}; it has {', '.join(sorted(metrics))}")
            found.append(metrics[metric])
        return found

    wanted: dict[str, set[str]] = {name: set() for name in names}
    heads = [column if isinstance(column, str) else column[0] for column in part.columns]
    for name in names:
        wanted[name].update(head for head in heads if head in runs[name, of[name][0]].metrics)
    for plot in part.plots:
        metric = getattr(plot, "metric", None)
        for name in names:
            if metric is not None and metric in runs[name, of[name][0]].metrics:
                wanted[name].add(metric)
    compared = []
    for one in part.compare:
        if names >= {one.ours, *several(one.theirs)}:
            compared.append(_compare(one, values, of))
            for name in (one.ours, *several(one.theirs)):
                wanted[name].add(one.metric)
    goals = []
    for goal in part.goals:
        if goal.cell in names:
            goals.append(_met(goal, values(goal.cell, goal.metric)))
            wanted[goal.cell].add(goal.metric)
    return Judged(
        cells={
            cell.name: {metric: figure(values(cell.name, metric)) for metric in sorted(wanted[cell.name])}
            for cell in cells
        },
        compared=tuple(compared),
        goals=tuple(goals),
    )


def _compare(
    one: Compare, values: Callable[[str, str], list[float | None]], of: Mapping[str, tuple[int, ...]]
) -> Compared:
    ours = values(one.ours, one.metric)

    def mean(name: str) -> float:
        known = [math.inf if value is None else value for value in values(name, one.metric)]
        return sum(known) / len(known)

    best = sorted(several(one.theirs), key=lambda name: (mean(name) * (1 if one.expect < 0 else -1), name))[0]
    if of[best] != of[one.ours]:
        raise ValueError(f"{one.name}: the two cells have different seeds, so nothing can be paired")
    pairs = list(zip(ours, values(best, one.metric), strict=True))
    differences = [_difference(a, b, one.how) for a, b in pairs]
    finite = figure([d if d is not None and math.isfinite(d) else None for d in differences])
    sign: Sign = 0
    leans: Sign = 0
    if finite.mean is not None:
        leans = _sign(finite.mean)
        if finite.ci95 is not None and abs(finite.mean) > finite.ci95:
            sign = leans
    elif all(d is not None for d in differences):
        ways = {_sign(d) for d in differences if d is not None}
        leans = ways.pop() if len(ways) == 1 else 0
        sign = leans if len(differences) > 2 else 0
    reached, surely = _bound(finite, one.at_most, one.at_least)
    if finite.mean is None and (one.at_most is not None or one.at_least is not None):
        # Without a mean, only what holds for every seed is reached.
        known = [d for d in differences if d is not None]
        reached = len(known) == len(differences) and all(
            (one.at_most is None or d <= one.at_most) and (one.at_least is None or d >= one.at_least) for d in known
        )
    return Compared(
        name=one.name,
        metric=one.metric,
        ours=one.ours,
        theirs=best,
        how=one.how,
        mean=finite.mean,
        ci95=finite.ci95,
        values=finite.values,
        sign=sign,
        leans=leans,
        expect=one.expect,
        goal=_goal(one.at_most, one.at_least, percent=one.how == "relative"),
        reached=reached,
        surely=surely,
    )


def _difference(ours: float | None, theirs: float | None, how: str) -> float | None:
    """None where either is unknown; both infinite are equal; one infinite is infinitely far away."""
    if ours is None or theirs is None:
        return None
    if math.isinf(ours) and math.isinf(theirs):
        return 0.0
    if math.isinf(theirs):
        return -1.0 if how == "relative" else -math.inf
    if how == "absolute":
        return ours - theirs
    if theirs == 0:
        return 0.0 if ours == 0 else math.copysign(math.inf, ours)
    return (ours - theirs) / abs(theirs)


def _sign(value: float) -> Sign:
    return 1 if value > 0 else -1 if value < 0 else 0


def _bound(found: Figure, at_most: float | None, at_least: float | None) -> tuple[bool | None, bool | None]:
    if at_most is None and at_least is None:
        return None, None
    if found.mean is None:
        return False, False
    half = math.inf if found.ci95 is None else found.ci95
    reached = (at_most is None or found.mean <= at_most) and (at_least is None or found.mean >= at_least)
    surely = (at_most is None or found.mean + half <= at_most) and (at_least is None or found.mean - half >= at_least)
    return reached, surely


def _goal(at_most: float | None, at_least: float | None, *, percent: bool) -> str:
    def show(value: float) -> str:
        return f"{100 * value:+g}%" if percent else f"{value:g}"

    parts = [f"≥ {show(at_least)}"] if at_least is not None else []
    parts += [f"≤ {show(at_most)}"] if at_most is not None else []
    return " and ".join(parts)


def _met(goal: Goal, values: Sequence[float | None]) -> Met:
    found = figure(values)
    reached, _ = _bound(found, goal.at_most, goal.at_least)
    return Met(
        name=goal.name,
        metric=goal.metric,
        cell=goal.cell,
        mean=found.mean,
        ci95=found.ci95,
        goal=_goal(goal.at_most, goal.at_least, percent=False),
        reached=bool(reached),
        checked=goal.checked,
    )


# ------------------------------------------------------------------------------- against what is committed


def flips(full: Judged, quick: Judged, now: Judged) -> list[str]:
    """What the quick runs of now say otherwise than the committed full and quick ones; empty when nothing.

    A sign that was there must be there again. A difference whose interval included zero may not become significant
    against what is expected of it. Where the full runs are sure, the quick ones' mean may not turn against them. A goal
    that the quick runs reached must be reached again. A judgement that is committed may not vanish.
    """
    found = []
    were = {one.name: one for one in quick.compared}
    sure = {one.name: one for one in full.compared}
    are = {one.name: one for one in now.compared}
    found += [f"{name}: is committed, and was not judged now" for name in were if name not in are]
    for name, one in are.items():
        before = were.get(name)
        if before is None:
            continue  # new since: nothing to contradict
        if before.sign and one.sign != before.sign:
            found.append(f"{name}: the sign was {before.sign:+d} and is {one.sign:+d} ({_told(before)} → {_told(one)})")
            continue
        against = one.expect or before.leans
        if not before.sign and one.sign and one.sign == -against:
            found.append(f"{name}: was undecided and is {one.sign:+d}, against what is expected ({_told(one)})")
            continue
        whole = sure.get(name)
        if whole is not None and whole.sign and before.leans == whole.sign and one.leans == -whole.sign:
            found.append(f"{name}: all seeds say {whole.sign:+d}, and the mean is now {_told(one)}")
    met = {one.name: one for one in now.goals}
    for goal in quick.goals:
        again = met.get(goal.name)
        if again is None:
            found.append(f"{goal.name}: is committed, and was not judged now")
        elif goal.checked and again.checked and goal.reached and not again.reached:
            found.append(f"{goal.name}: was reached ({goal.mean}) and no longer is ({again.mean}; {again.goal})")
    return found


def _told(one: Compared) -> str:
    if one.mean is None:
        return "infinite"
    factor, unit = (100.0, "%") if one.how == "relative" else (1.0, "")
    half = "" if one.ci95 is None else f" ±{one.ci95 * factor:.3g}"
    return f"{one.mean * factor:+.3g}{half}{unit}"
