"""The page of `tokenfleet goodput --html`: figures, then plots, in one file that loads nothing from elsewhere.

Decides how a report is drawn, never what it is. Needs matplotlib, drawn without a display.
"""

import base64
import html
import io
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tokenfleet.accountant.report import Course, Report

_COLOURS = ("#2f6fb7", "#53a3a0", "#e0a83a", "#a45fa0", "#7a8b99", "#b5534a")
_LATE, _REFUSED, _LOST, _KEPT = "#e3b341", "#b8bfc7", "#c4443b", "#2da44e"
_INK, _MUTED = "#1c2430", "#5c6670"
#: rows of the plots by group; the table has all of them
_BARS_MAX = 16


def render(report: Report, course: Course) -> str:
    """The page as text."""
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
                "Output tokens per second of answers that kept their objectives, at the time they ended, stacked by "
                "class. The line is everything that was delivered; the gap to it is waste.",
                _image(_goodput(course)),
            ),
            (
                "Time to first token, over offered requests",
                "Share of all offered requests that had their first token by then. A curve that ends below 100% never "
                "answered the rest. Dotted: the loosest objective that its requests had.",
                _image(_ttft(course)),
            ),
            (
                "What became of it",
                "Offered requests of each group, and delivered tokens that counted for nothing, by cause.",
                _image(_ends(report)),
            ),
        ]
    overall = report.overall
    title = f"Goodput of the last {_span(report.since_s)}"
    body = [f"<h1>{html.escape(title)}</h1>", _tiles(report), _table(report)]
    body += [
        f"<section><h2>{html.escape(heading)}</h2><p>{html.escape(caption)}</p>"
        f'<img alt="{html.escape(heading)}" src="{image}"></section>'
        for heading, caption, image in plots
    ]
    notes = ["Every figure is defined in docs/metrics.md. Percentiles are exact, by nearest rank."]
    if overall.compliance_estimated:
        notes.append(
            "Part of the offered tokens was never delivered and is estimated by the median of class and model."
        )
    if report.hourly_costs:
        prices = ", ".join(f"{site} {cost:g}/h" for site, cost in report.hourly_costs.items())
        notes.append(
            f"Costs: {prices}, working or idle, borne by groups in proportion to the tokens delivered to them."
        )
    body.append("<footer>" + "<br>".join(html.escape(note) for note in notes) + "</footer>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _span(seconds: float) -> str:
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= size and seconds % size == 0:
            return unit if seconds == size else f"{seconds / size:g} {unit}s"
    return f"{seconds:g} seconds"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def _time(value_ms: float | None) -> str:
    return "never" if value_ms is None else f"{value_ms:,.0f} ms"


def _tiles(report: Report) -> str:
    overall = report.overall
    wasted = sum(overall.wasted_tokens.values())
    tiles = [
        (
            f"{overall.goodput_tokens_per_s:,.1f}",
            "goodput tokens/s",
            f"of {overall.output_tokens_per_s:,.1f} delivered",
        ),
        (_share(overall.compliance_requests), "of requests compliant", f"{_share(overall.compliance)} of tokens"),
        (
            f"{overall.offered:,}",
            "requests offered",
            f"{overall.completed:,} completed, {overall.refused:,} refused, {overall.cancelled:,} cancelled, "
            f"{overall.failed:,} failed",
        ),
        (
            f"{wasted:,}",
            "tokens wasted",
            _share(wasted / overall.output_tokens if overall.output_tokens else None) + " of delivered",
        ),
    ]
    if overall.cost is not None:
        each = overall.cost_per_million_compliant_tokens
        tiles.append(
            (
                "–" if each is None else f"{each:,.2f}",
                "per million compliant tokens",
                f"{overall.cost:,.2f} for all priced sites",
            )
        )
    cells = "".join(
        f'<div class="tile"><div class="big">{html.escape(big)}</div><div>{html.escape(what)}</div>'
        f'<div class="small">{html.escape(more)}</div></div>'
        for big, what, more in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _table(report: Report) -> str:
    heads = [
        *report.by, "offered", "completed", "refused", "cancelled", "failed", "repeated", "compliant", "tokens",
        "goodput t/s", "delivered t/s", "wasted", "TTFT p50", "TTFT p99", "TPOT p50",
    ]  # fmt: skip
    if report.hourly_costs:
        heads.append("cost/M")
    rows = []
    for result in (*report.groups, report.overall):
        names = [result.group.get(name, "") or "–" for name in report.by] if result.group else ["all"]
        names += [""] * (len(report.by) - len(names))
        cells = [
            str(result.offered), str(result.completed), str(result.refused), str(result.cancelled), str(result.failed),
            str(result.repeated), _share(result.compliance_requests),
            ("~" if result.compliance_estimated else "") + _share(result.compliance),
            f"{result.goodput_tokens_per_s:,.1f}", f"{result.output_tokens_per_s:,.1f}",
            f"{sum(result.wasted_tokens.values()):,}", _time(result.ttft_ms["p50"]), _time(result.ttft_ms["p99"]),
            "–" if result.tpot_ms["p50"] is None else f"{result.tpot_ms['p50']:,.1f} ms",
        ]  # fmt: skip
        if report.hourly_costs:
            each = result.cost_per_million_compliant_tokens
            cells.append("–" if each is None else f"{each:,.2f}")
        kind = "" if result.group else ' class="all"'
        rows.append(
            f"<tr{kind}>"
            + "".join(f"<th>{html.escape(name)}</th>" for name in names[: len(report.by)])
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    return (
        '<section class="wide"><table><thead><tr>'
        + "".join(f"<th>{html.escape(head)}</th>" for head in heads)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _image(figure: Figure) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def _empty(ax: Axes) -> None:
    ax.text(0.5, 0.5, "nothing finished", transform=ax.transAxes, ha="center", va="center", color=_MUTED)


def _goodput(course: Course) -> Figure:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    ax = figure.subplots()
    count = round(max([60.0, *(one.ago_s / course.bin_s + 1 for one in course.bins)]))
    names = sorted({one.service_class for one in course.bins})
    good = {name: [0.0] * count for name in names}
    delivered = [0.0] * count
    for one in course.bins:
        place = count - 1 - round(one.ago_s / course.bin_s)
        good[one.service_class][place] += one.compliant_tokens / course.bin_s
        delivered[place] += one.output_tokens / course.bin_s
    minutes = course.bin_s * count > 600
    unit_s = 60 if minutes else 1
    at = [-(count - place - 0.5) * course.bin_s / unit_s for place in range(count)]
    if names:
        colours = [_COLOURS[nth % len(_COLOURS)] for nth in range(len(names))]
        ax.stackplot(at, *good.values(), labels=names, colors=colours, step="mid", linewidth=0)
        ax.step(at, delivered, where="mid", color=_INK, linewidth=1, label="delivered")
        ax.legend(loc="upper left", ncols=len(names) + 1, fontsize=8.5)
    else:
        _empty(ax)
    ax.set_xlim(-course.bin_s * count / unit_s, 0)
    ax.set_ylim(0, 1.18 * max([1.0, *delivered]))
    ax.set_xlabel("minutes ago" if minutes else "seconds ago")
    ax.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    ax.set_ylabel("output tokens/s")
    return figure


def _ttft(course: Course) -> Figure:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    ax = figure.subplots()
    for nth, spread in enumerate(course.spreads):
        colour = _COLOURS[nth % len(_COLOURS)]
        known = [(value, place + 1) for place, value in enumerate(spread.ttft_ms) if value is not None]
        ax.step(
            [max(1.0, value) / 1000 for value, _ in known],
            [share for _, share in known],
            where="post",
            color=colour,
            linewidth=1.8,
            label=spread.service_class,
        )
        if spread.objective_ms is not None:
            ax.axvline(spread.objective_ms / 1000, color=colour, linewidth=1, linestyle=":")
    if course.spreads:
        ax.set_xscale("log")
        ax.legend(loc="lower right", fontsize=8.5)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        _empty(ax)
    ax.set_ylim(0, 102)
    ax.set_xlabel("seconds")
    ax.set_ylabel("% of offered requests")
    return figure


def _ends(report: Report) -> Figure:
    results = sorted(report.groups, key=lambda one: -one.offered)[:_BARS_MAX] or [report.overall]
    names = [" · ".join(result.group[name] or "–" for name in result.group) or "all" for result in results]
    figure = Figure(figsize=(11, 1.5 + 0.32 * len(results)), layout="constrained")
    left_ax, right_ax = figure.subplots(1, 2)
    _bars(
        left_ax,
        names,
        [
            ("kept", _KEPT, [one.compliant for one in results]),
            ("late", _LATE, [one.completed - one.compliant for one in results]),
            ("refused", _REFUSED, [one.refused for one in results]),
            ("cancelled", "#8fb8de", [one.cancelled for one in results]),
            ("failed", _LOST, [one.failed for one in results]),
        ],
    )
    left_ax.set_title("offered requests")
    causes = sorted({cause for one in results for cause in one.wasted_tokens})
    _bars(right_ax, [""] * len(names), [
        (cause, _COLOURS[nth % len(_COLOURS)], [one.wasted_tokens.get(cause, 0) for one in results])
        for nth, cause in enumerate(causes)
    ])  # fmt: skip
    right_ax.set_title("wasted tokens")
    if not causes:
        right_ax.text(0.5, 0.5, "none", transform=right_ax.transAxes, ha="center", va="center", color=_MUTED)
    return figure


def _bars(ax: Axes, names: Sequence[str], series: Sequence[tuple[str, str, Sequence[int]]]) -> None:
    at = list(range(len(names)))
    left = [0] * len(names)
    for label, colour, values in series:
        if any(values):
            ax.barh(at, values, left=left, color=colour, label=label, height=0.66)
        left = [before + value for before, value in zip(left, values, strict=True)]
    ax.set_yticks(at, names)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.02 * max([1, *left]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if any(left):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22 if len(names) < 4 else -0.12), ncols=5, fontsize=8.5)


_STYLE = """
body{margin:0;background:#f4f6f8;color:#1c2430;font:15px/1.5 system-ui,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 48px}
h1{font-size:24px;margin:0 0 14px}h2{font-size:17px;margin:0 0 2px}
section{background:#fff;border:1px solid #e1e5e9;border-radius:8px;padding:18px 20px;margin:16px 0}
section p{color:#5c6670;font-size:13.5px;margin:2px 0 10px}img{width:100%;height:auto;display:block}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:16px}
.tile{background:#fff;border:1px solid #e1e5e9;border-top:4px solid #1f6feb;border-radius:8px;padding:12px 16px}
.big{font-size:30px;font-weight:700;line-height:1.2}.small{color:#5c6670;font-size:13px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:12.5px;font-variant-numeric:tabular-nums}
th,td{padding:4px 6px;text-align:right;white-space:nowrap}
thead th{color:#5c6670;font-weight:600;white-space:normal;vertical-align:bottom}
tbody th{text-align:left;font-weight:600}tbody tr{border-top:1px solid #eef1f3}
tr.all{font-weight:600;background:#f7f9fa}
footer{color:#5c6670;font-size:13px;margin-top:12px}
"""
