"""The verdict on one attempt."""

from typing import Any

import pytest

from tokenfleet.accountant.policy import GROUP_OF, OutputMedian, Verdict, judge
from tokenfleet_schemas.outcome import OutcomeFinished, Times


def outcome(**changes: Any) -> OutcomeFinished:
    values: dict[str, Any] = {
        "id": "r1:finished:1",
        "request_id": "r1",
        "attempt": 1,
        "final": True,
        "outcome": "completed",
        "gateway": "g",
        "gateway_incarnation": "i",
        "tenant": "acme",
        "service_class": "chat",
        "model_asked": "m",
        "model": "m",
        "version": "1",
        "input_tokens": 10,
        "output_tokens": 50,
        "received_unix_ms": 1_800_000_000_000,
        "times": Times(ttft_ms=400.0, tpot_ms=40.0, e2e_ms=2360.0),
        "ttft_objective_ms": 500.0,
        "tpot_objective_ms": 50.0,
        "e2e_objective_ms": 3000.0,
    }
    return OutcomeFinished(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict(True)),
        ({"times": Times(ttft_ms=500.0, tpot_ms=50.0, e2e_ms=3000.0)}, Verdict(True)),
        ({"times": Times(ttft_ms=501.0, tpot_ms=40.0, e2e_ms=2500.0)}, Verdict(False, ("ttft",), 50, "missed_ttft")),
        ({"times": Times(ttft_ms=400.0, tpot_ms=51.0, e2e_ms=2900.0)}, Verdict(False, ("tpot",), 50, "missed_tpot")),
        (
            {"times": Times(ttft_ms=600.0, tpot_ms=90.0, e2e_ms=5000.0)},
            Verdict(False, ("ttft", "tpot", "e2e"), 50, "missed_ttft"),
        ),
        ({"ttft_objective_ms": None, "times": Times(ttft_ms=9e9, tpot_ms=1.0, e2e_ms=1.0)}, Verdict(True)),
        # one token has no time between tokens
        ({"output_tokens": 1, "times": Times(ttft_ms=400.0, tpot_ms=9e9, e2e_ms=400.0)}, Verdict(True)),
        ({"outcome": "refused", "output_tokens": 0}, Verdict(False)),
        ({"outcome": "cancelled", "output_tokens": 7}, Verdict(False, (), 7, "cancelled")),
        ({"outcome": "failed_midstream", "output_tokens": 5}, Verdict(False, (), 5, "failed_midstream")),
        # an attempt that is not final never counts, whatever it delivered
        ({"outcome": "failed", "final": False, "output_tokens": 3}, Verdict(False, (), 3, "repeated")),
    ],
)
def test_only_a_completed_request_that_kept_every_promise_complies(changes: dict[str, Any], verdict: Verdict) -> None:
    """One classifier for ledger, windows and report: the wrong one books a cut or late answer as goodput."""
    assert judge(outcome(**changes)) == verdict


def test_an_empty_answer_is_judged_by_its_end() -> None:
    """A model answered with nothing: no first token. Read as TTFT 0 it would be the best request of all."""
    empty = {"output_tokens": 0, "times": Times(e2e_ms=900.0)}
    assert judge(outcome(**empty)) == Verdict(True)
    assert judge(outcome(**empty, e2e_objective_ms=800.0)) == Verdict(False, ("e2e",), 0, "")
    assert judge(outcome(**empty, e2e_objective_ms=None)) == Verdict(True)


def test_a_first_token_that_nobody_saw_was_not_early() -> None:
    """Tokens were delivered but no time was taken: unknown is not zero; it came no later than the end."""
    assert judge(outcome(times=Times(e2e_ms=450.0))).compliant
    assert judge(outcome(times=Times(e2e_ms=2000.0))).missed == ("ttft",)


def test_every_outcome_is_counted_somewhere() -> None:
    """offered = completed + refused + cancelled + failed must hold for whatever comes."""
    from typing import get_args

    from tokenfleet_schemas.outcome import Outcome

    assert set(GROUP_OF) == set(get_args(Outcome))
    assert set(GROUP_OF.values()) == {"completed", "refused", "cancelled", "failed"}


def test_undelivered_output_is_estimated_by_the_class_and_models_own_median() -> None:
    """A refused request's length cannot be known; without an estimate refusing everything would look harmless."""
    medians = OutputMedian(memory=100)
    refused = outcome(outcome="refused", output_tokens=0)
    assert medians.offered(refused) == (None, True)
    for tokens in (10, 20, 30, 40, 500):
        medians.learn(outcome(output_tokens=tokens))
    medians.learn(outcome(output_tokens=9999, outcome="cancelled"))
    assert medians.offered(refused) == (30, True)
    assert medians.offered(outcome(outcome="refused", output_tokens=0, output_budget_tokens=16)) == (16, True)
    # a class never seen trusts the whole fleet; one seen too little as well
    assert medians.offered(outcome(outcome="refused", service_class="new", output_tokens=0)) == (30, True)
    # what was delivered is a lower bound, and a completed answer is no estimate
    assert medians.offered(outcome(outcome="cancelled", output_tokens=77)) == (77, True)
    assert medians.offered(outcome(output_tokens=3)) == (3, False)

    other = OutputMedian(memory=100)
    other.load(medians.dump())
    assert other.offered(refused) == (30, True)


def test_the_median_follows_the_last_answers_only() -> None:
    """Yesterday's long documents must not be the estimate for today's chats."""
    medians = OutputMedian(memory=5)
    for tokens in [1000] * 5 + [10] * 5:
        medians.learn(outcome(output_tokens=tokens))
    assert medians.offered(outcome(outcome="refused", output_tokens=0)) == (10, True)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("kind", list(GROUP_OF))
@pytest.mark.parametrize("ttft_ms", [100.0, 900.0, None])
def test_every_delivered_token_is_either_good_or_wasted(kind: Any, final: bool, ttft_ms: float | None) -> None:
    """Tokens in neither sum would be work that nobody accounts for."""
    verdict = judge(outcome(outcome=kind, final=final, times=Times(ttft_ms=ttft_ms, tpot_ms=1.0, e2e_ms=1000.0)))
    assert (50 if verdict.compliant else 0) + verdict.wasted_tokens == 50
    assert bool(verdict.wasted_cause) is bool(verdict.wasted_tokens)
