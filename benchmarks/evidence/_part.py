"""What a part of the evidence is made of: cells to run, comparisons and goals to judge, plots to draw.

Decides only the shape. A cell is a function of a seed; nothing here knows whether it simulates, measures or drives a
live fleet.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

#: figures by name; infinite where something never came, None where there is nothing to measure
Metrics = Mapping[str, float | None]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a cell found. A cell without curves may return its metrics alone."""

    metrics: dict[str, float | None]
    #: curves by name, each a list of (x, y), for `Curves`
    series: dict[str, list[tuple[float, float]]] = {}


#: a function at the top level of a module: `run(seed, **args)`
Run = Callable[..., Figures | Metrics]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is run with every seed."""

    name: str
    run: Run
    #: arguments beside the seed, plain JSON values: with the code they are what a kept run is known by
    args: dict[str, Any] = {}
    #: instead of the part's own; `(0,)` for what no seed changes
    seeds: tuple[int, ...] | None = None
    #: measures the clock or memory: it runs after the others, with nothing beside it, and never counts as run before
    alone: bool = False


class Compare(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of one cell against another's, paired by seed.

    `theirs` may name several: the best of them by mean is what ours is compared with.
    """

    name: str
    metric: str
    ours: str
    theirs: str | tuple[str, ...]
    #: `relative`: (ours - theirs) / theirs. `absolute`: ours - theirs
    how: Literal["relative", "absolute"] = "relative"
    #: the sign that we expect of it; of several `theirs` the best is the lowest where this is -1
    expect: Literal[-1, 0, 1]
    #: goals on the mean difference (relative: -0.4 is 40% less)
    at_most: float | None = None
    at_least: float | None = None


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on the mean of one cell's metric."""

    name: str
    cell: str
    metric: str
    at_most: float | None = None
    at_least: float | None = None
    #: whether `make evidence` fails when a goal that was reached no longer is; off for what depends on the machine
    checked: bool = True


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """A plot: one metric of several cells side by side, with intervals."""

    title: str
    metric: str
    cells: tuple[str, ...]
    unit: str = ""
    scale: float = 1.0
    log: bool = False


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """A plot: a metric over something, one line per series of (x, cell)."""

    title: str
    metric: str
    series: dict[str, tuple[tuple[float, str], ...]]
    x: str
    unit: str = ""
    scale: float = 1.0
    log_x: bool = False
    log_y: bool = False


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """A plot: curves that cells returned, of their first seed."""

    title: str
    #: (cell, name of its series)
    curves: tuple[tuple[str, str], ...]
    x: str
    y: str
    log_x: bool = False


class Quick(msgspec.Struct, frozen=True, kw_only=True):
    """The subset that `make evidence` runs again: about four minutes of one core at most."""

    #: empty: all cells
    cells: tuple[str, ...] = ()
    #: how many of the first seeds; with fewer than three hardly any interval excludes zero
    seeds: int = 3
    #: merged into every cell's arguments: shorter windows, for example
    args: dict[str, Any] = {}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One question, and how it is answered."""

    title: str
    #: what is asked, and how it is found out; Markdown, goes above the tables
    question: str
    cells: tuple[Cell, ...]
    compare: tuple[Compare, ...] = ()
    goals: tuple[Goal, ...] = ()
    #: columns of the table of cells, in order: metric, or (metric, heading, factor, digits)
    columns: tuple[str | tuple[str, str, float, int], ...] = ()
    plots: tuple[Bars | Lines | Curves, ...] = ()
    seeds: tuple[int, ...] = tuple(range(1, 11))
    quick: Quick | None = Quick()
    #: traces that the cells read; those that scenarios of simulated cells name are found without
    traces: tuple[str, ...] = ()
    #: what was found, what limits it, what was tried; Markdown, goes below the tables. No figure that no table shows
    findings: str = ""

    def cell(self, name: str) -> Cell:
        """A cell by name. Raises `KeyError`."""
        for one in self.cells:
            if one.name == name:
                return one
        raise KeyError(f"no cell {name!r}; there are {', '.join(one.name for one in self.cells)}")

    def faults(self) -> list[str]:
        """What is wrong with the part itself; empty when nothing is."""
        names = [one.name for one in self.cells]
        found = [f"two cells are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
        judged = [one.name for one in self.compare] + [one.name for one in self.goals]
        found += [f"two judgements are called {n!r}" for n in sorted({n for n in judged if judged.count(n) > 1})]
        used: list[tuple[str, Sequence[str]]] = [(c.name, (c.ours, *several(c.theirs))) for c in self.compare]
        used += [(g.name, (g.cell,)) for g in self.goals]
        used += [("quick", self.quick.cells)] if self.quick is not None else []
        for plot in self.plots:
            if isinstance(plot, Bars):
                used.append((plot.title, plot.cells))
            elif isinstance(plot, Lines):
                used.append((plot.title, [cell for line in plot.series.values() for _, cell in line]))
            else:
                used.append((plot.title, [cell for cell, _ in plot.curves]))
        found += [f"{who}: no cell {cell!r}" for who, cells in used for cell in cells if cell not in names]
        found += [
            f"{goal.name}: a goal needs at_most or at_least"
            for goal in self.goals
            if goal.at_most is None and goal.at_least is None
        ]
        return found


def several(theirs: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name or several, as several."""
    return (theirs,) if isinstance(theirs, str) else theirs
