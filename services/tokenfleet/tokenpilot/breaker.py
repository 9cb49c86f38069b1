"""One instance's breaker: whether its last outcomes forbid sending it more.

Decides from outcomes alone and knows no clock but the time it is given. A failure is the engine's (`failed`,
`failed_midstream`, `timed_out`); a request that was wrong itself (`rejected`) or whose client left is neutral both
ways: it neither opens the breaker nor ends a streak nor counts as a successful trial (F11). There is one source of
state, so no quarantine without a way back (F14).
"""

from typing import Literal

import msgspec

from tokenfleet.tokenpilot.settings import Knobs

FAILURES = frozenset({"failed", "failed_midstream", "timed_out"})
State = Literal["closed", "open", "half_open"]


class Breaker(msgspec.Struct):
    """Part of a core's checkpoint."""

    failures: int = 0
    successes: int = 0
    #: None: closed
    opened_ms: float | None = None
    #: booking of the trial in flight
    trial: str = ""

    def state(self, now_ms: float, knobs: Knobs) -> State:
        """Closed, open, or half open: one trial at a time."""
        if self.opened_ms is None:
            return "closed"
        since_ms = now_ms - self.opened_ms - knobs.breaker_cooldown_ms
        if since_ms < 0:
            return "open"
        return "half_open" if since_ms < knobs.breaker_quiet_ms else "closed"

    def blocks(self, now_ms: float, knobs: Knobs) -> bool:
        """Whether a new request must go elsewhere."""
        state = self.state(now_ms, knobs)
        return state == "open" or (state == "half_open" and bool(self.trial))

    def booked(self, booking: str, now_ms: float, knobs: Knobs) -> None:
        """Work was booked: while half open it is the trial."""
        if not self.trial and self.state(now_ms, knobs) == "half_open":
            self.trial = booking

    def released(self, booking: str) -> None:
        """The work ended, whatever came of it."""
        if self.trial == booking:
            self.trial = ""

    def judge(self, outcome: str, booked_ms: float, now_ms: float, knobs: Knobs) -> bool:
        """Fold one outcome of work booked at that time; True when it opens the breaker (anew)."""
        if outcome not in FAILURES and outcome != "completed":
            return False
        self.settle(now_ms, knobs)
        if self.opened_ms is not None and booked_ms < self.opened_ms:
            return False  # sent before it opened: says nothing about how the instance is now
        if outcome == "completed":
            self.failures = 0
            if self.opened_ms is not None:
                self.successes += 1
                if self.successes >= knobs.breaker_successes:
                    self.reset()
            return False
        self.failures += 1
        if self.opened_ms is None and self.failures < knobs.breaker_failures:
            return False
        self.opened_ms, self.successes = now_ms, 0
        return True

    def settle(self, now_ms: float, knobs: Knobs) -> None:
        """Quiet long enough: closed, also for whoever looks at what is stored."""
        if self.opened_ms is not None and self.state(now_ms, knobs) == "closed":
            self.reset()

    def reset(self) -> None:
        """A clean record: closed by its trials, or a new incarnation."""
        self.failures = self.successes = 0
        self.opened_ms, self.trial = None, ""
