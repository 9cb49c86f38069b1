"""The page: one file, readable anywhere, from the same records as the figures."""

import base64
import re

import pytest

from tokenfleet.fleet import ServiceClass
from tokenfleet.replay import page, report
from tokenfleet.replay.errors import ReportError
from tokenfleet.replay.records import Record

CLASSES = {"chat": ServiceClass(ttft_ms=1000, tpot_ms=50), "batch": ServiceClass(e2e_ms=60_000)}


def shown(policy: str, refuse_every: int) -> page.ShownRun:
    records = []
    for n in range(60):
        refused = n % refuse_every == 0
        records.append(
            Record(
                index=n, tenant="t<1>", cls="batch" if n % 3 == 0 else "chat", model="m", input_tokens=100,
                outcome="refused" if refused else "completed", stated_output_tokens=20, planned_ms=n * 500,
                sent_ms=n * 500 + 1, first_token_ms=None if refused else n * 500 + 100 + 40 * n,
                last_token_ms=None if refused else n * 500 + 900 + 40 * n, ended_ms=n * 500 + 901 + 40 * n,
                output_tokens=0 if refused else 20, site="" if refused else "bc"[n % 2],
            )
        )  # fmt: skip
    made = report.make(records, CLASSES, policy=policy, seed=1, duration_s=30.0)
    return page.ShownRun(report=made, records=records)


def test_the_page_needs_nothing_but_itself() -> None:
    """A report is mailed around: no script, no style and no picture may be loaded from elsewhere."""
    made = page.render(
        [shown("tokenfleet", 10), shown("round-robin", 2)], CLASSES, title="A & B", verdict="done", notes=["one"]
    )
    assert made.startswith("<!doctype html>")
    assert "A &amp; B" in made
    assert "t&lt;1&gt;" in made
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', made)
    assert len(pictures) == 6
    assert all(b"<svg" in base64.b64decode(picture) for picture in pictures)
    assert not re.search(r'(?:src|href)="(?!data:)', made)
    assert "<script" not in made
    assert made.count("90.0%") >= 1


def test_one_run_alone_is_a_page_too() -> None:
    """`tokenfleet replay --html` has nothing to compare with; a run in which nobody got a token still has a page."""
    assert "tokenfleet" in page.render([shown("tokenfleet", 1)], CLASSES, title="one")
    with pytest.raises(ReportError):
        page.render([], CLASSES, title="none")


def test_runs_side_by_side_are_drawn_whole_on_one_scale() -> None:
    """The second run's load was cut off at the first one's highest."""
    quiet, busy = shown("quiet", 1000), shown("busy", 1000)
    for record in busy.records:
        record.ended_ms = 60_000.0
    drawn = page._load([quiet, busy])
    low, high = drawn.axes[0].get_ylim()
    assert low == 0
    assert high >= len(busy.records) - 1
    assert drawn.axes[1].get_ylim() == (low, high)
