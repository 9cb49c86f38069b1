"""When a comparison counts, and when it says nothing."""

import pytest

from tokenfleet.replay.comparison import judge, summary
from tokenfleet.replay.report import Quantiles, Result, RunReport


def report(compliance: float, *, lag_ms: float | None = 5.0, offered: int = 100, policy: str = "p") -> RunReport:
    none = Quantiles()
    result = Result(
        offered=offered, completed=offered, refused=0, cancelled=0, failed=0, unfinished=0, late=0, ttft_ms=none,
        ttft_completed_ms=none, tpot_ms=none, output_tokens_per_s=0, goodput_tokens_per_s=0, compliance=compliance,
        compliance_requests=compliance,
    )  # fmt: skip
    lag = Quantiles(p50=1.0, p99=lag_ms)
    return RunReport(
        policy=policy,
        seed=1,
        duration_s=60,
        overall=result,
        classes={},
        tenants={},
        sites={},
        jain_tenants=1.0,
        jain_classes=1.0,
        lag_ms=lag,
    )


@pytest.mark.parametrize(("ours", "theirs", "passed"), [(0.80, 0.65, True), (0.80, 0.6501, True), (0.80, 0.66, False)])
def test_the_margin_is_fifteen_points(ours: float, theirs: float, passed: bool) -> None:
    """Points of compliance, not per cent of it: 80% against 70% is ten."""
    verdict = judge(report(ours), report(theirs))
    assert (verdict.passed, verdict.void) == (passed, False)


@pytest.mark.parametrize("lag_ms", [50.1, None])
def test_a_late_driver_voids_the_verdict_however_good_it_looks(lag_ms: float | None) -> None:
    """A starved load generator sends late and blames the fleet: neither policy may profit from that."""
    for pair in [(report(0.9, lag_ms=lag_ms), report(0.1)), (report(0.9), report(0.1, lag_ms=lag_ms))]:
        verdict = judge(*pair)
        assert (verdict.passed, verdict.void) == (False, True)
        assert "No verdict" in verdict.sentence
        assert summary(verdict, ["a"]).startswith("VOID")


def test_runs_of_different_loads_are_not_compared() -> None:
    """Compliance over fewer requests is another measure."""
    assert judge(report(0.9), report(0.1, offered=99)).void


def test_the_summary_says_it_plainly() -> None:
    """One word first, then the numbers."""
    assert summary(judge(report(0.9), report(0.1)), ["why"]).splitlines()[0].startswith("PASSED: p kept 90.0%")
    failed = summary(judge(report(0.2), report(0.1)), [])
    assert failed.startswith("FAILED")
    assert "less than the 15" in failed
