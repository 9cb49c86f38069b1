"""The report: every figure over what was offered, so that shedding never looks like serving."""

import json

import msgspec
import pytest

from tokenfleet.fleet import ServiceClass
from tokenfleet.replay import records as record_files
from tokenfleet.replay import report
from tokenfleet.replay.errors import ReplayError, ReportError
from tokenfleet.replay.records import Record, nearest_rank

CLASSES = {
    "chat": ServiceClass(ttft_ms=1000, tpot_ms=50),
    "batch": ServiceClass(e2e_ms=60_000),
    "free": ServiceClass(),
}


def record(index: int = 0, **fields: object) -> Record:
    """A completed chat of 11 tokens: first token after 200 ms, one every 10 ms after it."""
    base: dict[str, object] = {
        "index": index, "tenant": "t", "cls": "chat", "model": "m", "outcome": "completed",
        "input_tokens": 100, "stated_output_tokens": 11, "output_tokens": 11, "planned_ms": 1000.0,
        "sent_ms": 1001.0, "first_token_ms": 1201.0, "last_token_ms": 1301.0, "ended_ms": 1310.0,
        "site": "b",
    }  # fmt: skip
    return Record(**(base | fields))  # type: ignore[arg-type]  # a test's defaults, overridden by name


def refused(index: int = 0, **fields: object) -> Record:
    return record(
        index, outcome="refused", first_token_ms=None, last_token_ms=None, output_tokens=0,
        status=429, site="", **fields,
    )  # fmt: skip


def make(*records: Record, duration_s: float = 10.0) -> report.RunReport:
    return report.make(records, CLASSES, policy="p", seed=1, duration_s=duration_s)


@pytest.mark.parametrize(
    ("kept", "fields"),
    [
        (True, {}),
        (False, {"first_token_ms": 2001.5}),
        (True, {"first_token_ms": 2001.0, "last_token_ms": 2002.0, "ended_ms": 2003.0}),
        (False, {"last_token_ms": 1801.0, "ended_ms": 1802.0}),
        (False, {"deadline_ms": 300.0}),
        (True, {"deadline_ms": 310.0}),
        (False, {"outcome": "failed"}),
        (False, {"outcome": "unfinished", "ended_ms": None}),
        # one token has no time between tokens; none has no first token either: its end alone counts
        (True, {"output_tokens": 1, "last_token_ms": 1201.0}),
        (True, {"output_tokens": 0, "first_token_ms": None, "last_token_ms": None}),
        (True, {"cls": "batch", "first_token_ms": 50_000.0, "last_token_ms": 55_000.0, "ended_ms": 56_000.0}),
        (False, {"cls": "batch", "ended_ms": 61_002.0}),
        # a request's own deadline tightens its class and cannot loosen it
        (False, {"cls": "batch", "ended_ms": 61_002.0, "deadline_ms": 90_000.0}),
        (True, {"cls": "free", "first_token_ms": 99_000.0, "last_token_ms": 99_900.0, "ended_ms": 100_000.0}),
    ],
)  # fmt: skip
def test_the_verdict(kept: bool, fields: dict[str, object]) -> None:
    """One late token decides whether a request counts: every edge of that is spelled out."""
    one = record(0, **fields)
    assert report.complies(one, CLASSES[one.cls]) is kept


def test_a_refusal_weighs_as_much_as_an_answer() -> None:
    """A fleet that sheds half of its load and serves the rest perfectly has kept half of its promises."""
    made = make(record(0), refused(1), refused(2), record(3)).overall
    assert (made.offered, made.completed, made.refused) == (4, 2, 2)
    assert made.compliance == 0.5
    assert made.compliance_requests == 0.5
    assert made.ttft_ms.p50 == 200.0
    assert made.ttft_ms.p90 is None
    assert made.ttft_completed_ms.p99 == 200.0


def test_compliance_weighs_by_the_tokens_that_the_trace_states() -> None:
    """Refusing the long answers and serving the short ones is not a compliance of one half."""
    made = make(record(0, stated_output_tokens=10, output_tokens=10), refused(1, stated_output_tokens=90)).overall
    assert made.compliance == 0.1
    assert made.compliance_requests == 0.5


def test_goodput_counts_delivered_tokens_of_kept_promises_only() -> None:
    """Tokens of late and of broken answers are output, not goodput."""
    late = record(1, first_token_ms=5000.0, last_token_ms=5100.0, ended_ms=5101.0)
    broken = record(2, outcome="failed", output_tokens=4)
    made = make(record(0), late, broken, duration_s=2.0).overall
    assert made.output_tokens_per_s == 13.0
    assert made.goodput_tokens_per_s == 5.5
    assert made.offered == made.completed + made.failed


def test_groups_are_reported_on_their_own_and_unplaced_ones_too() -> None:
    """A fleet-wide figure hides the class or tenant that starves."""
    made = make(record(0), refused(1, cls="batch", tenant="u"), record(2, site="c"))
    assert list(made.classes) == ["batch", "chat"]
    assert made.classes["batch"].compliance == 0.0
    assert made.tenants["u"].refused == 1
    assert (made.jain_tenants, made.jain_classes) == (0.5, 0.5)
    assert "Jain's index of tenants: 0.500" in report.table([made], tail=True)
    assert {site: r.offered for site, r in made.sites.items()} == {"b": 1, "c": 1, "none": 1}


def test_the_json_shape_is_the_one_that_scripts_lean_on() -> None:
    """Names are a contract; an infinity must not reach JSON."""
    shown = json.loads(msgspec.json.encode(make(refused())))
    assert {"policy", "seed", "duration_s", "overall", "classes", "tenants", "sites"} <= set(shown)
    assert set(shown["overall"]) == {
        "offered", "completed", "refused", "cancelled", "failed", "unfinished", "late", "ttft_ms",
        "ttft_completed_ms", "tpot_ms", "output_tokens_per_s", "goodput_tokens_per_s", "compliance",
        "compliance_requests",
    }  # fmt: skip
    assert shown["overall"]["ttft_ms"] == dict.fromkeys(["p50", "p90", "p95", "p99", "p999"])


def test_a_class_without_objectives_is_refused() -> None:
    """Left out silently, the requests of a misspelt class would vanish from the offered ones."""
    with pytest.raises(ReportError, match="chta"):
        make(record(cls="chta"))
    with pytest.raises(ReportError, match="window"):
        make(record(), duration_s=0)


def test_the_window_is_the_traces_own() -> None:
    """Two policies are measured over the same time, however long either drags its tail out."""
    assert report.window_s(60.0, [record(ended_ms=95_000.0)]) == 60.0
    # A batch at t = 0 has no span: it is measured until its last end.
    assert report.window_s(0.0, [record(ended_ms=4_000.0), record(ended_ms=9_000.0)]) == 9.0


def test_quantiles_by_nearest_rank() -> None:
    """Interpolating towards an infinity gives no number; ranks always do."""
    hundred = [float(n) for n in range(1, 101)]
    assert [nearest_rank(hundred, q) for q in (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)] == [1, 50, 90, 99, 100, 100]
    assert nearest_rank([], 0.5) is None
    assert nearest_rank([7.0], 0.5) == 7.0


def test_the_table_shows_two_runs_side_by_side() -> None:
    """The comparison is what the operator reads: both policies in one line, groups of either one kept."""
    one = make(record(0), record(1))
    other = msgspec.structs.replace(make(record(0), refused(1)), policy="round-robin")
    shown = report.table([one, other])
    overall = next(line for line in shown.splitlines() if line.startswith("overall"))
    assert "100.0%" in overall
    assert "50.0%" in overall
    assert any(line.startswith("site none") for line in shown.splitlines())
    assert len({len(line.split("|")) for line in shown.splitlines() if "|" in line}) == 1
    assert "class chat" in report.table([one])
    with pytest.raises(ReportError):
        report.table([])


def test_records_are_kept_as_lines_and_read_back() -> None:
    """The ledger is checked against these lines row by row: nothing may change on the way."""
    kept = [record(1, request_id="r-1", attempts=2), refused(0, retry_after_s=3.0)]
    lines = record_files.encode(kept)
    assert json.loads(lines.splitlines()[0])["class"] == "chat"
    assert record_files.decode(lines) == [kept[1], kept[0]]
    with pytest.raises(ReplayError, match="line 2"):
        record_files.decode(lines.splitlines()[0] + b"\n{}\n")
