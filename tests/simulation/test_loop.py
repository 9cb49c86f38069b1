"""The loop closed: a shift of engines and workload changes shares, diversion and predictions, and that is worth it."""

import math
import statistics

import pytest
from benchmarks.evidence.loop import SHIFT_S, run

SEEDS = (1, 2, 3)
#: Student's t, 95%, two degrees of freedom
T95 = 4.303


@pytest.mark.timeout(400)
def test_a_shift_moves_shares_diversion_and_predictions_and_frozen_feedback_pays_for_it() -> None:
    """Engines that had been fast were throttled, others recovered, and more callers came: who had stopped learning sent
    the urgent ones on to the slow engines. At least five points of compliance, and certainly more than none."""
    alive = [run(seed, policy="tokenfleet").metrics for seed in SEEDS]
    frozen = [run(seed, policy=f"tokenfleet@frozen={SHIFT_S}").metrics for seed in SEEDS]

    def gain(metric: str) -> list[float]:
        return [(mine[metric] or 0.0) - (theirs[metric] or 0.0) for mine, theirs in zip(alive, frozen, strict=True)]

    for metric in ("second.compliance", "second.compliance_requests"):
        points = gain(metric)
        mean, half = statistics.mean(points), T95 * statistics.stdev(points) / math.sqrt(len(points))
        assert mean >= 0.05, (metric, points)
        assert mean - half > 0.0, (metric, points)
    # it is the shift that makes the difference: before it they are alike (a request that ends after it may differ)
    assert max(map(abs, gain("first.compliance"))) < 0.02
    for mine, theirs in zip(alive, frozen, strict=True):
        # predictions: the engines that turned slow are known to be, by at least three times
        assert (mine["second.tpot_predicted_ms"] or 0.0) > 3 * (mine["first.tpot_predicted_ms"] or math.inf)
        assert (mine["second.tpot_error"] or 1.0) < 0.3 < (theirs["second.tpot_error"] or 0.0)
        # shares: who kept its promises less often has more of the home site than the frozen run gives it
        assert (mine["second.interactive_share"] or 0.0) > (mine["first.interactive_share"] or 1.0)
        assert theirs["second.interactive_share"] == theirs["first.interactive_share"]
    # diversion: it follows, and less is sent away than where the home site is wrongly taken for what it was
    assert statistics.mean(gain("second.diverted")) < -0.05
