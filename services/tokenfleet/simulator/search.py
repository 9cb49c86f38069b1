"""How much load a policy carries: stable load and knee, found by trying trace speeds.

Two words, one meaning each. *Stable load*: the highest speed (within 2%) at which P95 TTFT is at most three times that
at half that speed, and the backlog does not grow in the second half of the window, for all seeds. *Knee*: the lowest
speed (within 2%) at which P95 TTFT is at least five times that at half that speed, for any seed. TTFT is over offered
requests: one without a first token never had it.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from tokenfleet.replay.records import Record, nearest_rank

STABLE_FACTOR = 3.0
KNEE_FACTOR = 5.0
#: speeds that differ by less are the same
WITHIN = 0.02
#: a backlog that grows by less than this share of the requests of the second half is noise
GROWTH_SHARE = 0.02


class Probe(msgspec.Struct, frozen=True):
    """One speed as one seed found it."""

    #: P95 of TTFT over offered requests, ms; infinite where more than 5% had no first token
    ttft_ms_p95: float
    #: requests without a first token: at the window's middle and at its end
    backlog_middle: int
    backlog_end: int
    #: requests that arrived in the second half
    arrived_late: int

    @property
    def grows(self) -> bool:
        """Whether the backlog grew in the second half by more than noise."""
        return self.backlog_end - self.backlog_middle > max(5.0, GROWTH_SHARE * self.arrived_late)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found, with everything that it tried."""

    policy: str
    #: None: even the lowest speed tried was not stable
    stable: float | None
    #: None: not reached at the highest speed tried
    knee: float | None
    #: speed → P95 TTFT of each seed, ms; null where it is infinite
    tried: dict[str, tuple[float | None, ...]]


#: runs a speed: one probe per seed
Try = Callable[[float], Sequence[Probe]]


def probe(records: Sequence[Record], begin_ms: float, end_ms: float) -> Probe:
    """What one run says about its speed; the window is that in which counted requests were offered."""
    ttft = sorted(math.inf if record.ttft_ms is None else record.ttft_ms for record in records)
    middle_ms = (begin_ms + end_ms) / 2

    def backlog(at_ms: float) -> int:
        return sum(
            record.sent_ms <= at_ms
            and (record.first_token_ms is None or record.first_token_ms > at_ms)
            and (record.ended_ms is None or record.ended_ms > at_ms)
            for record in records
        )

    return Probe(
        ttft_ms_p95=nearest_rank(ttft, 0.95) or 0.0,
        backlog_middle=backlog(middle_ms),
        backlog_end=backlog(end_ms),
        arrived_late=sum(record.sent_ms > middle_ms for record in records),
    )


class Search:
    """Tries speeds, each once."""

    def __init__(self, run: Try, *, lowest: float, highest: float) -> None:
        if not 0 < lowest < highest:
            raise ValueError(f"speeds must be 0 < lowest < highest, not {lowest} and {highest}")
        self._run = run
        self.lowest, self.highest = lowest, highest
        self.tried: dict[float, Sequence[Probe]] = {}

    def at(self, speed: float) -> Sequence[Probe]:
        """The probes of a speed."""
        speed = round(speed, 4)
        if speed not in self.tried:
            self.tried[speed] = self._run(speed)
        return self.tried[speed]

    def ratios(self, speed: float) -> list[float]:
        """P95 TTFT of each seed over that at half the speed."""
        pairs = zip(self.at(speed), self.at(speed / 2), strict=True)
        return [
            math.inf if math.isinf(now.ttft_ms_p95) else now.ttft_ms_p95 / max(half.ttft_ms_p95, 1e-3)
            for now, half in pairs
        ]

    def is_stable(self, speed: float) -> bool:
        """Whether every seed finds this speed stable."""
        if max(self.ratios(speed)) > STABLE_FACTOR or any(one.grows for one in self.at(speed)):
            return False
        return not self._half_is_beyond(speed)

    def is_beyond_knee(self, speed: float) -> bool:
        """Whether any seed finds the knee at or below this speed."""
        return max(self.ratios(speed)) >= KNEE_FACTOR or self._half_is_beyond(speed)

    def _half_is_beyond(self, speed: float) -> bool:
        """Twice an overload is no worse than it by any factor, and yet beyond the knee."""
        return speed / 2 > self.lowest and self.is_beyond_knee(speed / 2)

    def find(self, policy: str) -> Found:
        """Stable load and knee, by bisection between the speeds allowed."""
        stable: float | None
        if not self.is_stable(self.lowest):
            stable = None
        elif self.is_stable(self.highest):
            stable = self.highest
        else:
            stable, _ = self._between(self.lowest, self.highest, self.is_stable)
        knee: float | None
        if not self.is_beyond_knee(self.highest):
            knee = None
        elif self.is_beyond_knee(self.lowest):
            knee = self.lowest
        else:
            _, knee = self._between(stable or self.lowest, self.highest, lambda speed: not self.is_beyond_knee(speed))
        tried = {
            f"{speed:g}": tuple(
                None if math.isinf(one.ttft_ms_p95) else round(one.ttft_ms_p95, 3) for one in self.tried[speed]
            )
            for speed in sorted(self.tried)
        }
        return Found(policy=policy, stable=stable, knee=knee, tried=tried)

    @staticmethod
    def _between(low: float, high: float, holds: Callable[[float], bool]) -> tuple[float, float]:
        """The border between speeds where something holds and where it does not, within 2%."""
        while high > low * (1 + WITHIN):
            middle = round(math.sqrt(low * high), 4)
            if holds(middle):
                low = middle
            else:
                high = middle
        return low, high
