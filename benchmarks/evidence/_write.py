"""Writes what a part found: `<part>.md` to be read, `<part>.json` to be compared with, and its plots.

Decides how figures are shown, never what they are. Nothing here depends on when or how fast it was run: the same code
and seeds write the same bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.evidence._judge import Compared, Figure, Judged, Met
from benchmarks.evidence._part import Bars, Curves, Figures, Lines, Part

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_COLOURS = (
    "#1f6feb",
    "#d1701f",
    "#2da44e",
    "#8250df",
    "#b5534a",
    "#53a3a0",
    "#e0a83a",
    "#7a8b99",
    "#a45fa0",
    "#256d5b",
)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """`<part>.json`."""

    part: str
    command: str
    #: the revision that made the runs; `+` where the tree had changes on top
    commit: str
    seeds: tuple[int, ...]
    full: Judged
    #: what the quick subset says by the same code; `make evidence` compares with this
    quick: Judged | None = None


def load(path: Path) -> Kept | None:
    """The committed outcome of a part; None where there is none yet."""
    return msgspec.json.decode(path.read_bytes(), type=Kept) if path.is_file() else None


def write(folder: Path, name: str, part: Part, kept: Kept, runs: Mapping[tuple[str, int], Figures]) -> list[Path]:
    """Write a part's files into `folder`; what was drawn for it before and no longer is goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}-*.svg"):
        old.unlink()
    drawn: list[tuple[str, Path]] = []
    for nth, plot in enumerate(part.plots, start=1):
        path = folder / f"{name}-{nth}.svg"
        _save(_draw(part, plot, kept, runs), path)
        drawn.append((plot.title, path))
    (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    (folder / f"{name}.md").write_text(markdown(name, part, kept, [(title, path.name) for title, path in drawn]))
    return [folder / f"{name}.md", folder / f"{name}.json", *(path for _, path in drawn)]


def markdown(name: str, part: Part, kept: Kept, plots: Sequence[tuple[str, str]] = ()) -> str:
    """The document of a part."""
    seeds = f"seeds {kept.seeds[0]} to {kept.seeds[-1]}" if len(kept.seeds) > 1 else f"seed {kept.seeds[0]}"
    lines = [
        f"# {part.title}",
        "",
        f"`{kept.command}` at commit `{kept.commit}`, {seeds}. Figures are means ± half their 95% confidence interval "
        "(Student's t over seeds); differences are paired by seed. *never*: a seed has no such value, because what it "
        f"counts did not come. This file is written by the command: change `benchmarks/evidence/{name}.py` instead.",
        "",
        part.question.strip(),
        "",
    ]
    if kept.full.compared:
        lines += ["## Comparisons", "", *_comparisons(kept.full.compared), ""]
    if kept.full.goals:
        lines += ["## Goals", "", *_goals(kept.full.goals), ""]
    lines += ["## Figures", "", *_cells(part, kept.full), ""]
    for title, file in plots:
        lines += [f"![{title}]({file})", ""]
    if part.findings.strip():
        lines += ["## Findings", "", part.findings.strip(), ""]
    return "\n".join(lines)


def _comparisons(compared: Sequence[Compared]) -> list[str]:
    lines = [
        "| comparison | metric | ours | theirs | difference | sign | expected | goal | reached |",
        "|---|---|---|---|--:|:-:|:-:|--:|---|",
    ]
    for one in compared:
        factor, unit, digits = (100.0, "%", 1) if one.how == "relative" else (1.0, "", 3)
        told = (
            "infinite"
            if one.mean is None
            else f"{one.mean * factor:+.{digits}f}{_half(one.ci95, factor, digits)}{unit}"
        )
        reached = "" if one.reached is None else _reached(one)
        lines.append(
            f"| {one.name} | {one.metric} | {one.ours} | {one.theirs} | {told} "
            f"| {_mark(one.sign)} | {_mark(one.expect)} | {one.goal} | {reached} |"
        )
    return lines


def _reached(one: Compared) -> str:
    if not one.reached:
        return "**no**"
    return "yes" if one.surely else "in the mean"


def _mark(sign: int) -> str:
    return {1: "+", -1: "−", 0: "0"}[sign]


def _goals(goals: Sequence[Met]) -> list[str]:
    lines = ["| goal | cell | metric | found | goal | reached |", "|---|---|---|--:|--:|---|"]
    for one in goals:
        found = "never" if one.mean is None else f"{one.mean:.4g}{_half(one.ci95, 1.0, 3)}"
        lines.append(
            f"| {one.name} | {one.cell} | {one.metric} | {found} | {one.goal} | {'yes' if one.reached else '**no**'} |"
        )
    return lines


def _half(half: float | None, factor: float, digits: int) -> str:
    return "" if half is None else f" ±{half * factor:.{digits}f}"


def _columns(part: Part, judged: Judged) -> list[tuple[str, str, float, int]]:
    if part.columns:
        return [_column(one) for one in part.columns]
    names: list[str] = []
    for figures in judged.cells.values():
        names += [name for name in figures if name not in names]
    return [_column(name) for name in names]


def _column(one: str | tuple[str, str, float, int]) -> tuple[str, str, float, int]:
    if not isinstance(one, str):
        return one
    if one.endswith(("compliance", "compliance_requests", "_share", "prefix_hit")):
        return (one, f"{one} %", 100.0, 1)
    return (one, one, 1.0, 0 if one.endswith(("_per_s", "offered")) else 3)


def _cells(part: Part, judged: Judged) -> list[str]:
    columns = _columns(part, judged)
    lines = [
        "| cell | " + " | ".join(heading for _, heading, _, _ in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for name, figures in judged.cells.items():
        cells = [_cell(figures.get(metric), factor, digits) for metric, _, factor, digits in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(found: Figure | None, factor: float, digits: int) -> str:
    if found is None:
        return ""
    if found.mean is None:
        return "never"
    return f"{found.mean * factor:.{digits}f}{_half(found.ci95, factor, digits)}"


# ---------------------------------------------------------------------------------------------- plots


def _draw(part: Part, plot: Bars | Lines | Curves, kept: Kept, runs: Mapping[tuple[str, int], Figures]) -> "Drawing":
    # Only here: whoever only checks signs need not have matplotlib.
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(8, 3.6), layout="constrained")
    axes = drawing.subplots()
    cells = kept.full.cells
    if isinstance(plot, Bars):
        names = [name for name in plot.cells if plot.metric in cells[name]]
        means, halves = _means([cells[name][plot.metric] for name in names], plot.scale)
        axes.barh(names, means, xerr=halves, color=_COLOURS[0], height=0.6, ecolor="#5c6670", capsize=3)
        axes.invert_yaxis()
        axes.set_xlabel(plot.unit or plot.metric)
        if plot.log:
            axes.set_xscale("log")
    elif isinstance(plot, Lines):
        for nth, (label, points) in enumerate(plot.series.items()):
            means, halves = _means([cells[cell][plot.metric] for _, cell in points], plot.scale)
            axes.errorbar(
                [x for x, _ in points], means, yerr=halves, marker="o", capsize=3, label=label, color=_COLOURS[nth % 10]
            )
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.unit or plot.metric)
        if plot.log_x:
            axes.set_xscale("log")
        if plot.log_y:
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8.5)
    else:
        for nth, (cell, series) in enumerate(plot.curves):
            seed = min(seed for name, seed in runs if name == cell)
            points_xy = runs[cell, seed].series[series]
            label = cell if len({name for name, _ in plot.curves}) > 1 else series
            axes.plot([x for x, _ in points_xy], [y for _, y in points_xy], label=label, color=_COLOURS[nth % 10])
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        if plot.log_x:
            axes.set_xscale("log")
        axes.legend(frameon=False, fontsize=8.5)
    axes.set_title(plot.title, loc="left", fontsize=10.5, fontweight="bold")
    axes.grid(color="#e8ebee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return drawing


def _means(figures: Sequence[Figure], scale: float) -> tuple[list[float], list[float]]:
    nothing = float("nan")  # a gap in the plot: what never came has no height
    means = [nothing if one.mean is None else one.mean * scale for one in figures]
    return means, [0.0 if one.ci95 is None else one.ci95 * scale for one in figures]


def _save(drawing: "Drawing", path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tokenfleet", "font.family": "DejaVu Sans", "font.size": 9.5}):
        drawing.savefig(path, format="svg", metadata={"Date": None})
