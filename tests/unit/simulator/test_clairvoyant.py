"""The clairvoyant bound: no schedule beats it, found by trying all; no policy does, found by running them."""

import itertools
import random

import pytest

from tokenfleet.simulator.clairvoyant import Job, bound, most
from tokenfleet.simulator.experiment import Task, make
from tokenfleet.simulator.scenario import parse


def job(weight: float, begin: int, first: int, prefill: int, decode: int = 0, last: int = 0) -> Job:
    return Job(
        weight=weight,
        prefill_ms=prefill,
        decode_ms=decode,
        begin_ms=begin,
        first_ms=first,
        last_ms=max(first, last),
    )


def on_time(jobs: tuple[Job, ...]) -> bool:
    """Whether one engine can do these all in time: earliest deadline first, tick by tick; prefill before the rest."""
    left = [[one.prefill_ms, one.decode_ms] for one in jobs]
    for now in range(40):
        ready: list[tuple[float, int, int]] = []
        for n, one in enumerate(jobs):
            if one.begin_ms <= now and left[n][0]:
                ready.append((one.first_ms, n, 0))
            elif one.begin_ms <= now and left[n][1]:
                ready.append((one.last_ms, n, 1))
        if ready:
            deadline, n, what = min(ready)
            if now + 1 > deadline:
                return False
            left[n][what] -= 1
    return not any(itertools.chain(*left))


def best_of_all(jobs: list[Job]) -> float:
    """The most weight on time, by trying every subset."""
    return max(
        sum(one.weight for one in chosen)
        for size in range(len(jobs) + 1)
        for chosen in itertools.combinations(jobs, size)
        if on_time(chosen)
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_beats_the_bound(seed: int) -> None:
    """Seven random jobs on one engine: the best of all subsets is no more than the bound, which is no more than all."""
    dice = random.Random(seed)
    jobs = []
    for _ in range(7):
        begin, prefill, decode = dice.randrange(12), dice.randrange(1, 5), dice.randrange(4)
        first = begin + prefill + dice.randrange(4)
        jobs.append(job(dice.randrange(1, 20), begin, first, prefill, decode, first + decode + dice.randrange(6)))
    found = most(jobs, 1, slot_ms=1.0)
    assert best_of_all(jobs) <= found + 1e-6
    assert found <= sum(one.weight for one in jobs)


def test_the_bound_bites() -> None:
    """Ten jobs of four ticks in one window of twenty: five fit, and the heaviest five at that."""
    jobs = [job(weight, 0, 19, 4) for weight in range(1, 11)]
    assert most(jobs, 1, slot_ms=1.0) == pytest.approx(6 + 7 + 8 + 9 + 10, rel=0.01)
    assert most(jobs, 2, slot_ms=1.0) == pytest.approx(55, rel=0.01)
    # two rushes with quiet between them: what the quiet has to spare helps neither
    rushes = [job(1.0, begin, begin + 9, 2) for begin in (0, 100) for _ in range(10)]
    assert most(rushes, 1, slot_ms=1.0) == pytest.approx(10, rel=0.03)
    assert most([], 3) == 0.0


OVERLOAD = b"""
fleet = "reference"
[scenario]
name = "overload"
duration_s = 5
warmup_s = 1
drain_s = 60
[[workload]]
trace = "builtin"
rate_per_s = 150
"""


def test_no_policy_beats_the_bound() -> None:
    """Several times what the fleet carries: everybody is below what a clairvoyant could have done."""
    scenario = parse(OVERLOAD)
    limit = bound(scenario, 1)
    assert 0.1 < limit.compliance < 0.97
    assert limit == bound(scenario, 1)
    for policy in ("tokenfleet", "llm-d//none"):
        overall = make(scenario, Task(policy, 1)).report.overall
        assert overall.compliance <= limit.compliance, policy
        assert overall.compliance_requests <= limit.compliance_requests, policy
        assert overall.goodput_tokens_per_s <= limit.goodput_tokens_per_s, policy


def test_with_time_enough_everything_may_comply() -> None:
    """A bound below one where nobody is in a hurry would be wrong."""
    scenario = parse(OVERLOAD.replace(b"rate_per_s = 150", b"rate_per_s = 1"))
    limit = bound(scenario, 1)
    assert limit.compliance > 0.99
    assert limit.compliance >= make(scenario, Task("tokenfleet", 1)).report.overall.compliance
