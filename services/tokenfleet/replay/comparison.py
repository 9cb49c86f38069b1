"""The verdict of a comparison: whether one policy kept more promises than another, and whether that may be believed.

Decides from two reports alone; knows no fleet. Pure.
"""

from collections.abc import Sequence

import msgspec

from tokenfleet.replay.report import RunReport

#: how many points of compliance the first policy must be ahead
MARGIN_POINTS = 15.0
#: a driver later than this with one request in a hundred measured itself
LAG_MS_P99_MAX = 50.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison came to. `passed` needs the margin, and a driver that kept its own times."""

    passed: bool
    void: bool
    points: float
    sentence: str


def judge(
    ours: RunReport,
    baseline: RunReport,
    *,
    margin_points: float = MARGIN_POINTS,
    lag_ms_p99_max: float = LAG_MS_P99_MAX,
) -> Verdict:
    """Compare two runs of the same trace by token compliance, in percentage points.

    A run whose driver lagged is void whatever it shows: late requests are the driver's doing. So is a pair that did not
    offer the same requests.
    """
    points = round(100 * (ours.overall.compliance - baseline.overall.compliance), 1)
    lags = [(run.policy, run.lag_ms.p99) for run in (ours, baseline)]
    late = [(name, lag) for name, lag in lags if lag is None or lag > lag_ms_p99_max]
    if ours.overall.offered != baseline.overall.offered:
        return _void(
            points, f"the runs offered {ours.overall.offered} and {baseline.overall.offered} requests, not the same"
        )
    if late:
        shown = ", ".join(f"{name} {'unknown' if lag is None else f'{lag:.1f} ms'}" for name, lag in late)
        return _void(
            points, f"the driver sent its own requests late (lag p99 {shown}; at most {lag_ms_p99_max:.0f} ms)"
        )
    compared = (
        f"{ours.policy} kept {100 * ours.overall.compliance:.1f}% of the offered output tokens within their "
        f"objectives, {baseline.policy} {100 * baseline.overall.compliance:.1f}%: {points:+.1f} points"
    )
    passed = points >= margin_points
    ending = "" if passed else f", less than the {margin_points:.0f} that were to be shown"
    return Verdict(passed=passed, void=False, points=points, sentence=compared + ending + ".")


def _void(points: float, why: str) -> Verdict:
    return Verdict(passed=False, void=True, points=points, sentence=f"No verdict: {why}.")


def summary(verdict: Verdict, notes: Sequence[str]) -> str:
    """The verdict for a terminal, its circumstances below it."""
    head = "VOID" if verdict.void else ("PASSED" if verdict.passed else "FAILED")
    return "\n".join([f"{head}: {verdict.sentence}", *(f"  {note}" for note in notes)])
