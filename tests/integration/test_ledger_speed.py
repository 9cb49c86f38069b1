"""The ledger takes 5,000 outcomes a second on two cores: judged by CPU, which a busy machine does not change much."""

import uvloop
from benchmarks.ledger import GOAL_PER_S, drain

from tokenfleet.accountant.settings import AccountantSettings


def test_a_backlog_is_drained_fast_enough_in_bounded_memory() -> None:
    """A day's backlog after an outage must not take a day: every third outcome is delivered twice, as after a crash."""
    found = uvloop.run(drain(8_000, 0.3, AccountantSettings()))
    assert found["per_s_on_2_cores"] >= GOAL_PER_S, found
    assert found["memory_grown_mib"] < 64, found
