"""One HTML file that shows runs side by side: figures first, then plots, nothing loaded from elsewhere.

Decides how a result is drawn, never what it is: every number comes from `report`. Needs matplotlib (extra `replay`),
drawn without a display.
"""

import base64
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenfleet.fleet import ServiceClass
from tokenfleet.replay.errors import ReportError
from tokenfleet.replay.records import Record, nearest_rank
from tokenfleet.replay.report import Result, RunReport, complies, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RUN_COLOURS = ("#1f6feb", "#d1701f", "#2da44e", "#8250df", "#b5534a", "#53a3a0", "#8a6d00", "#5c6670")
_CLASS_COLOURS = ("#2f6fb7", "#53a3a0", "#e0a83a", "#a45fa0", "#7a8b99", "#b5534a")
_SITE_COLOURS = ("#256d5b", "#4fa58a", "#9bd0b5", "#c7e3c9", "#6f8f3f", "#3f6f8f")
_LATE, _REFUSED, _LOST = "#e3b341", "#b8bfc7", "#c4443b"
_INK, _MUTED = "#1c2430", "#5c6670"
#: a run is drawn in so many steps of time at most, none shorter than this; quantiles need longer ones
_STEPS_MAX, _BIN_S = 150, 2.0
_QUANTILE_STEPS_MAX, _QUANTILE_BIN_S = 40, 5.0
#: plots side by side
_COLUMNS_MAX = 4


class ShownRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with the records that its report was made from."""

    report: RunReport
    records: list[Record]


def render(
    runs: Sequence[ShownRun],
    classes: Mapping[str, ServiceClass],
    *,
    title: str,
    verdict: str = "",
    good: bool = True,
    notes: Sequence[str] = (),
) -> str:
    """The page as text. `verdict` is one sentence above everything, green when `good`; `notes` go to the foot.

    Raises `ReportError` without runs.
    """
    if not runs:
        raise ReportError("no run to show")
    # Only here: whoever wants figures and no plots need not have matplotlib.
    import matplotlib

    with matplotlib.rc_context(
        {
            "font.size": 9.5,
            "font.family": "DejaVu Sans",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#b8bfc7",
            "axes.labelcolor": _MUTED,
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e8ebee",
            "xtick.color": _MUTED,
            "ytick.color": _MUTED,
            "text.color": _INK,
            "legend.frameon": False,
            "svg.hashsalt": "tokenfleet",
        }
    ):
        plots = [
            (
                "Goodput over time",
                "Output tokens of answers that kept their objectives, per second, at the time they ended, stacked by "
                "class. The dashed line is what the trace offered; the gap to it is what was lost.",
                _image(_goodput(runs, classes)),
            ),
            (
                "Time to first token over time",
                "The 95th percentile over the requests that arrived then, by class; a cross at the top where it fell "
                "on a request without a token. The dotted line is the class' objective.",
                _image(_ttft_over_time(runs, classes)),
            ),
            (
                "Time to first token, over offered requests",
                "Share of all offered requests that had their first token by then. A curve that ends below 100% never "
                "answered the rest. The vertical line is the class' objective.",
                _image(_ttft(runs, classes)),
            ),
            (
                "Time per output token, over completed answers",
                "Share of a class's completed answers of two tokens or more whose mean time per token after the first "
                "was at most that. The vertical line is the class' objective.",
                _image(_tpot(runs, classes)),
            ),
            (
                "Load by site",
                "Requests open at a time, by the site that served them in the end; at the top those that no site ever "
                "served.",
                _image(_load(runs)),
            ),
            (
                "What went where",
                "Every offered request of a class: kept its objectives at a site, came late, was refused, or was lost "
                "(failed, cancelled, unfinished).",
                _image(_placement(runs, classes)),
            ),
        ]
    body = [f"<h1>{html.escape(title)}</h1>"]
    if verdict:
        kind = "good" if good else "bad"
        body.append(f'<p class="verdict {kind}">{html.escape(verdict)}</p>')
    body.append('<div class="tiles">' + "".join(map(_tile, range(len(runs)), runs)) + "</div>")
    body.append(_figures(runs))
    for heading, caption, image in plots:
        body.append(
            f"<section><h2>{html.escape(heading)}</h2><p>{html.escape(caption)}</p>"
            f'<img alt="{html.escape(heading)}" src="{image}"></section>'
        )
    if notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        body.append(f"<section><h2>How it was measured</h2><ul>{items}</ul></section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tile(nth: int, run: ShownRun) -> str:
    colour = _RUN_COLOURS[nth % len(_RUN_COLOURS)]
    overall = run.report.overall
    lost = overall.cancelled + overall.failed + overall.unfinished
    return (
        f'<div class="tile" style="border-top-color:{colour}"><h3>{html.escape(run.report.policy)}</h3>'
        f'<div class="big">{100 * overall.compliance:.1f}%<small> compliance</small></div>'
        f"<div><b>{overall.goodput_tokens_per_s:,.0f}</b> goodput tokens/s of "
        f"{overall.output_tokens_per_s:,.0f} delivered</div>"
        f"<div><b>{overall.completed}</b> completed, {overall.refused} refused, {lost} lost, "
        f"of {overall.offered} offered; <b>{overall.late}</b> late</div>"
        f"<div>Jain's index of compliance: tenants <b>{run.report.jain_tenants:.3f}</b>, "
        f"classes <b>{run.report.jain_classes:.3f}</b></div></div>"
    )


_CELLS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("compliance", lambda r: f"{100 * r.compliance:.1f}%"),
    ("goodput tok/s", lambda r: f"{r.goodput_tokens_per_s:,.0f}"),
    ("completed", lambda r: str(r.completed)),
    ("refused", lambda r: str(r.refused)),
    ("lost", lambda r: str(r.cancelled + r.failed + r.unfinished)),
    ("late", lambda r: str(r.late)),
    ("TTFT p50", lambda r: _time(r.ttft_ms.p50)),
    ("TTFT p99", lambda r: _time(r.ttft_ms.p99)),
    ("TTFT p99.9", lambda r: _time(r.ttft_ms.p999)),
    ("TPOT p99", lambda r: "–" if r.tpot_ms.p99 is None else f"{r.tpot_ms.p99:.0f} ms"),
)


def _figures(runs: Sequence[ShownRun]) -> str:
    heads = "".join(f'<th colspan="{len(runs)}">{title}</th>' for title, _ in _CELLS)
    under = "".join(
        f'<th class="run" title="{html.escape(run.report.policy)}">{_dot(nth)}</th>'
        for _ in _CELLS
        for nth, run in enumerate(runs)
    )
    legend = "&emsp;".join(f"{_dot(nth)} {html.escape(run.report.policy)}" for nth, run in enumerate(runs))
    rows: list[str] = []
    groups: list[tuple[str, Callable[[RunReport], dict[str, Result]]]] = [
        ("", lambda r: {"overall": r.overall}),
        ("by class", lambda r: r.classes),
        ("by tenant", lambda r: r.tenants),
        ("by site", lambda r: r.sites),
    ]
    width = 2 + len(_CELLS) * len(runs)
    for title, of in groups:
        if title:
            rows.append(f'<tr class="group"><th colspan="{width}">{title}</th></tr>')
        for name in sorted({name for run in runs for name in of(run.report)}):
            results = [of(run.report).get(name) for run in runs]
            counts = [0 if result is None else result.offered for result in results]
            offered = str(counts[0]) if len(set(counts)) == 1 else " / ".join(map(str, counts))
            cells = "".join(
                f'<td class="{"first" if nth == 0 else ""}">{"–" if result is None else show(result)}</td>'
                for _, show in _CELLS
                for nth, result in enumerate(results)
            )
            rows.append(f"<tr><th>{html.escape(name)}</th><td>{offered}</td>{cells}</tr>")
    return (
        f'<section class="wide"><p>{legend}</p><table><thead><tr><th></th><th>offered</th>{heads}</tr>'
        f"<tr><th></th><th></th>{under}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "<p>TTFT is over offered requests: <i>never</i> means that the rank falls on a request without a token.</p>"
        "</section>"
    )


def _dot(nth: int) -> str:
    return f'<span style="color:{_RUN_COLOURS[nth % len(_RUN_COLOURS)]}">&#9679;</span>'


def _time(value_ms: float | None) -> str:
    return "never" if value_ms is None else f"{value_ms / 1000:.2f} s"


def _figure(width: float, height: float, columns: int, **more: Any) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    rows = -(-columns // _COLUMNS_MAX)
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    axes = figure.subplots(rows, -(-columns // rows), squeeze=False, **more)
    flat = [ax for row in axes for ax in row]
    for spare in flat[columns:]:
        spare.set_visible(False)
    return figure, flat[:columns]


def _image(figure: "Figure") -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def _names(runs: Sequence[ShownRun]) -> list[str]:
    return sorted({record.cls for run in runs for record in run.records})


def _goodput(runs: Sequence[ShownRun], classes: Mapping[str, ServiceClass]) -> "Figure":
    names = _names(runs)
    span_s = _span_s(runs)
    bin_s = max(_BIN_S, span_s / _STEPS_MAX)
    bins = int(span_s // bin_s) + 1
    figure, axes = _figure(11, 3.4, len(runs), sharey=True)
    middle = [(n + 0.5) * bin_s for n in range(bins)]
    for ax, run in zip(axes, runs, strict=True):
        series = {name: [0.0] * bins for name in names}
        offered = [0.0] * bins
        for record in run.records:
            offered[min(bins - 1, int(record.planned_ms / 1000 / bin_s))] += record.stated_output_tokens / bin_s
            if record.ended_ms is not None and complies(record, classes[record.cls]):
                place = min(bins - 1, max(0, int(record.ended_ms / 1000 / bin_s)))
                series[record.cls][place] += record.output_tokens / bin_s
        colours = [_CLASS_COLOURS[n % len(_CLASS_COLOURS)] for n in range(len(names))]
        ax.stackplot(middle, *series.values(), labels=names, colors=colours, step="mid", linewidth=0)
        ax.step(middle, offered, where="mid", color=_INK, linewidth=1, linestyle="--", label="offered")
        ax.set_title(run.report.policy)
        ax.set_xlabel("seconds")
        ax.set_xlim(0, span_s)
    axes[0].set_ylabel("output tokens/s")
    axes[0].set_ylim(bottom=0)  # once all are drawn: their scale is one
    axes[0].legend(loc="upper right", ncols=2, fontsize=8.5)
    return figure


def _span_s(runs: Sequence[ShownRun]) -> float:
    """From the beginning of all runs to the end of the last answer of any."""
    ends = [r.ended_ms for run in runs for r in run.records if r.ended_ms is not None]
    return max([*(run.report.duration_s for run in runs), *(end / 1000 for end in ends)])


def _ttft_over_time(runs: Sequence[ShownRun], classes: Mapping[str, ServiceClass]) -> "Figure":
    names = _names(runs)
    span_s = max([1.0, *(record.planned_ms / 1000 for run in runs for record in run.records)])
    bin_s = max(_QUANTILE_BIN_S, span_s / _QUANTILE_STEPS_MAX)
    bins = int(span_s // bin_s) + 1
    figure, axes = _figure(11, 3.0, len(names))
    for ax, name in zip(axes, names, strict=True):
        for nth, run in enumerate(runs):
            found: list[list[float]] = [[] for _ in range(bins)]
            for record in run.records:
                if record.cls == name:
                    ttft_ms = record.ttft_ms
                    place = min(bins - 1, int(record.planned_ms / 1000 / bin_s))
                    found[place].append(math.inf if ttft_ms is None else max(1.0, ttft_ms))
            at_s = [(n + 0.5) * bin_s for n in range(bins)]
            p95 = [nearest_rank(sorted(times), 0.95) for times in found]
            colour = _RUN_COLOURS[nth % len(_RUN_COLOURS)]
            # A gap where nothing arrived, or the rank fell on what never came.
            line = [math.nan if value is None or math.isinf(value) else value / 1000 for value in p95]
            ax.plot(at_s, line, color=colour, linewidth=1.6, marker=".", markersize=4, label=run.report.policy)
            never = [at for at, value in zip(at_s, p95, strict=True) if value is not None and math.isinf(value)]
            ax.plot(
                never,
                [0.98 - 0.05 * nth] * len(never),
                color=colour,
                marker="x",
                linestyle="",
                markersize=5,
                transform=ax.get_xaxis_transform(),
            )
        limit_ms = classes[name].ttft_ms
        if limit_ms is not None:
            ax.axhline(limit_ms / 1000, color=_LOST, linewidth=1, linestyle=":")
        ax.set_yscale("log")
        ax.set_xlim(0, span_s)
        ax.set_title(name)
        ax.set_xlabel("arrival, seconds")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    axes[0].set_ylabel("P95 of TTFT, seconds")
    _legend(figure, axes[0])
    return figure


def _tpot(runs: Sequence[ShownRun], classes: Mapping[str, ServiceClass]) -> "Figure":
    names = _names(runs)
    figure, axes = _figure(11, 3.0, len(names), sharey=True)
    for ax, name in zip(axes, names, strict=True):
        for nth, run in enumerate(runs):
            group = [r for r in run.records if r.cls == name and r.outcome == "completed"]
            times = sorted(r.tpot_ms for r in group if r.tpot_ms is not None)
            shares = [100 * (place + 1) / len(times) for place in range(len(times))]
            colour = _RUN_COLOURS[nth % len(_RUN_COLOURS)]
            ax.step(times, shares, where="post", color=colour, linewidth=1.8, label=run.report.policy)
        limit_ms = classes[name].tpot_ms
        if limit_ms is not None:
            ax.axvline(limit_ms, color=_LOST, linewidth=1, linestyle=":")
        ax.set_xlim(left=0)
        ax.set_ylim(0, 102)
        ax.set_title(name if limit_ms is not None else f"{name} (no objective)")
        ax.set_xlabel("ms per token")
    axes[0].set_ylabel("% of completed answers")
    _legend(figure, axes[0])
    return figure


def _load(runs: Sequence[ShownRun]) -> "Figure":
    sites = sorted({r.site for run in runs for r in run.records if r.site})
    span_s = _span_s(runs)
    bin_s = max(_BIN_S, span_s / _STEPS_MAX)
    bins = int(span_s // bin_s) + 1
    middle = [(n + 0.5) * bin_s for n in range(bins)]
    figure, axes = _figure(11, 3.0, len(runs), sharey=True)
    for ax, run in zip(axes, runs, strict=True):
        series = {site: [0.0] * bins for site in (*sites, "")}
        for record in run.records:
            ended_ms = span_s * 1000 if record.ended_ms is None else record.ended_ms
            first = int(record.sent_ms / 1000 / bin_s)
            for place in range(first, min(bins - 1, int(ended_ms / 1000 / bin_s)) + 1):
                within_ms = min(ended_ms, (place + 1) * bin_s * 1000) - max(record.sent_ms, place * bin_s * 1000)
                series[record.site][place] += within_ms / (bin_s * 1000)
        colours = [_SITE_COLOURS[n % len(_SITE_COLOURS)] for n in range(len(sites))]
        labels = [*sites, "no site"]
        ax.stackplot(middle, *series.values(), labels=labels, colors=[*colours, _REFUSED], step="mid", linewidth=0)
        ax.set_title(run.report.policy)
        ax.set_xlabel("seconds")
        ax.set_xlim(0, span_s)
    axes[0].set_ylabel("open requests")
    axes[0].set_ylim(bottom=0)
    _legend(figure, axes[0])
    return figure


def _legend(figure: "Figure", ax: "Axes") -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)), fontsize=8.5)


def _ttft(runs: Sequence[ShownRun], classes: Mapping[str, ServiceClass]) -> "Figure":
    names = _names(runs)
    figure, axes = _figure(11, 3.1, len(names), sharey=True)
    for ax, name in zip(axes, names, strict=True):
        latest = 100.0
        for nth, run in enumerate(runs):
            group = [record for record in run.records if record.cls == name]
            times = sorted(r.ttft_ms for r in group if r.ttft_ms is not None)
            latest = max([latest, *times])
            shares = [100 * (place + 1) / len(group) for place in range(len(times))]
            ax.step(
                [max(1.0, time) / 1000 for time in times],
                shares,
                where="post",
                color=_RUN_COLOURS[nth % len(_RUN_COLOURS)],
                linewidth=1.8,
                label=run.report.policy,
            )
        limit_ms = classes[name].ttft_ms
        if limit_ms is not None:
            ax.axvline(limit_ms / 1000, color=_LOST, linewidth=1, linestyle=":")
            latest = max(latest, limit_ms)
        ax.set_xscale("log")
        ax.set_xlim(0.01, latest / 1000 * 1.3)
        ax.set_ylim(0, 102)
        ax.set_title(name if limit_ms is not None else f"{name} (no objective)")
        ax.set_xlabel("seconds")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("% of offered requests")
    _legend(figure, axes[0])
    return figure


def _placement(runs: Sequence[ShownRun], classes: Mapping[str, ServiceClass]) -> "Figure":
    names = _names(runs)
    sites = sorted({r.site for run in runs for r in run.records if r.site})
    figure, axes = _figure(11, 1.1 + 0.45 * len(names), len(runs), sharey=True)
    for ax, run in zip(axes, runs, strict=True):
        groups = grouped(run.records, lambda record: record.cls)
        left = dict.fromkeys(names, 0.0)

        def bar(
            label: str,
            colour: str,
            wanted: Callable[[Record], bool],
            ax: "Axes" = ax,
            groups: dict[str, list[Record]] = groups,
            left: dict[str, float] = left,
        ) -> None:
            shares = [
                100 * sum(map(wanted, groups.get(name, []))) / max(1, len(groups.get(name, []))) for name in names
            ]
            ax.barh(names, shares, left=list(left.values()), color=colour, label=label, height=0.66)
            for name, share in zip(names, shares, strict=True):
                left[name] += share

        def kept(record: Record) -> bool:
            return complies(record, classes[record.cls])

        for nth, site in enumerate(sites):
            bar(
                f"kept at {site}",
                _SITE_COLOURS[nth % len(_SITE_COLOURS)],
                lambda r, site=site: r.site == site and kept(r),  # type: ignore[misc]  # a bound default
            )
        bar("kept, site unknown", "#8fb8de", lambda r: not r.site and kept(r))
        bar("late", _LATE, lambda r: r.outcome == "completed" and not kept(r))
        bar("refused", _REFUSED, lambda r: r.outcome == "refused")
        bar("lost", _LOST, lambda r: r.outcome in {"cancelled", "failed", "unfinished"})
        ax.set_title(run.report.policy)
        ax.set_xlabel("% of offered requests")
        ax.set_xlim(0, 100)
        ax.grid(axis="y", visible=False)
        ax.invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    shown = [
        (handle, label)
        for handle, label in zip(handles, labels, strict=True)
        if label != "kept, site unknown" or not sites
    ]
    figure.legend(
        [handle for handle, _ in shown],
        [label for _, label in shown],
        loc="outside lower center",
        ncols=min(8, len(shown)),
        fontsize=8.5,
    )
    return figure


_STYLE = """
body{margin:0;background:#f4f6f8;color:#1c2430;font:15px/1.5 system-ui,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 48px}
h1{font-size:24px;margin:0 0 14px}h2{font-size:17px;margin:0 0 2px}h3{font-size:15px;margin:0 0 4px}
section{background:#fff;border:1px solid #e1e5e9;border-radius:8px;padding:18px 20px;margin:16px 0}
section p,section li{color:#5c6670;font-size:13.5px;margin:2px 0 10px}section ul{margin:4px 0;padding-left:20px}
img{width:100%;height:auto;display:block}
.verdict{padding:12px 16px;border-radius:8px;font-weight:600;margin:0 0 16px}
.good{background:#e3f4e8;color:#14532d}.bad{background:#fbe6e4;color:#7f1d1d}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:16px}
.tile{background:#fff;border:1px solid #e1e5e9;border-top:4px solid;border-radius:8px;
padding:14px 18px;font-size:13.5px}
.big{font-size:34px;font-weight:700;line-height:1.2}.big small{font-size:14px;font-weight:400;color:#5c6670}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:12.5px;font-variant-numeric:tabular-nums}
th,td{padding:4px 7px;text-align:right;white-space:nowrap}thead th{text-align:center;color:#5c6670;font-weight:600}
thead .run{text-align:right;font-size:13px;padding-top:0}tbody th{text-align:left;font-weight:600}
tbody tr{border-top:1px solid #eef1f3}td.first{border-left:1px solid #e1e5e9}
.group th{padding-top:12px;color:#5c6670;font-weight:600;font-size:12px}
"""
