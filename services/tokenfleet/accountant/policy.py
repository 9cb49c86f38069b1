"""The verdict on one attempt. Decides compliance, waste and an estimate for output that was never delivered.

The definitions are those of docs/metrics.md. Refuses to know where rows go and what time it is. Pure.
"""

import bisect
from collections import deque
from collections.abc import Iterable

import msgspec

from tokenfleet_schemas.outcome import Outcome, OutcomeFinished

#: how outcomes are counted: offered = completed + refused + cancelled + failed
GROUP_OF: dict[Outcome, str] = {
    "completed": "completed",
    "refused": "refused",
    "cancelled": "cancelled",
    "client_stalled": "cancelled",
    "rejected": "failed",
    "failed": "failed",
    "failed_midstream": "failed",
    "timed_out": "failed",
    "owner_lost": "failed",
}


class Verdict(msgspec.Struct, frozen=True):
    """What an attempt was worth."""

    compliant: bool
    #: objectives missed by a completed request, in the order ttft, tpot, e2e
    missed: tuple[str, ...] = ()
    wasted_tokens: int = 0
    #: `repeated`, the outcome's name, or `missed_` and the first objective missed; empty: nothing was wasted
    wasted_cause: str = ""


def judge(event: OutcomeFinished) -> Verdict:
    """Whether an attempt complied: it is final, completed, and met every objective that the request had.

    A request without an objective has kept it. An answer without tokens has no first token: it is judged by its end
    alone. An answer with tokens whose first was not seen was not earlier than its end. Sources: DistServe (OSDI 2024)
    for goodput as the rate of requests that meet both TTFT and TPOT; MLPerf Inference for the two measures.
    """
    if event.outcome != "completed" or not event.final:
        cause = event.outcome if event.final else "repeated"
        return Verdict(False, (), event.output_tokens, cause if event.output_tokens else "")
    times = event.times
    ttft_ms = times.ttft_ms
    if ttft_ms is None and event.output_tokens > 0:
        ttft_ms = times.e2e_ms
    measured = (
        ("ttft", ttft_ms, event.ttft_objective_ms),
        ("tpot", times.tpot_ms if event.output_tokens > 1 else None, event.tpot_objective_ms),
        ("e2e", times.e2e_ms, event.e2e_objective_ms),
    )
    missed = tuple(
        name for name, value, limit in measured if limit is not None and value is not None and not value <= limit
    )
    if not missed:
        return Verdict(True)
    return Verdict(False, missed, event.output_tokens, f"missed_{missed[0]}" if event.output_tokens else "")


class OutputMedian:
    """The median output length that completed requests of a class and model had lately.

    A refused request's length cannot be known; token compliance needs one. Learned from final, completed answers only;
    an estimate never exceeds the client's own limit. Each key keeps its last `memory` lengths.
    """

    def __init__(self, *, memory: int = 512, enough: int = 5) -> None:
        self.memory = memory
        #: below so many samples of its own a key trusts the wider one more
        self.enough = enough
        self._recent: dict[tuple[str, str], deque[int]] = {}
        self._sorted: dict[tuple[str, str], list[int]] = {}

    def learn(self, event: OutcomeFinished) -> None:
        """Take one completed answer into account; others teach nothing."""
        if event.outcome == "completed" and event.final:
            for key in _keys(event.service_class, event.model):
                self._add(key, event.output_tokens)

    def _add(self, key: tuple[str, str], tokens: int) -> None:
        recent = self._recent.setdefault(key, deque())
        ordered = self._sorted.setdefault(key, [])
        if len(recent) == self.memory:
            del ordered[bisect.bisect_left(ordered, recent.popleft())]
        recent.append(tokens)
        bisect.insort(ordered, tokens)

    def offered(self, event: OutcomeFinished) -> tuple[int | None, bool]:
        """(output tokens that the request would have had, whether that is an estimate); None: nothing to go by."""
        if event.outcome == "completed":
            return event.output_tokens, False
        chosen: list[int] = []
        for key in _keys(event.service_class, event.model):
            ordered = self._sorted.get(key, [])
            if len(ordered) >= self.enough:
                chosen = ordered
                break
            chosen = ordered or chosen
        if not chosen:
            return None, True
        estimate = chosen[(len(chosen) - 1) // 2]
        if event.output_budget_tokens is not None:
            estimate = min(estimate, event.output_budget_tokens)
        return max(estimate, event.output_tokens), True

    def dump(self) -> list[tuple[str, str, list[int]]]:
        """What a checkpoint keeps."""
        return [(*key, list(recent)) for key, recent in self._recent.items()]

    def load(self, dumped: Iterable[tuple[str, str, list[int]]]) -> None:
        """Take a checkpoint over."""
        self._recent, self._sorted = {}, {}
        for service_class, model, lengths in dumped:
            kept = lengths[-self.memory :]
            self._recent[service_class, model] = deque(kept)
            self._sorted[service_class, model] = sorted(kept)


def _keys(service_class: str, model: str) -> tuple[tuple[str, str], ...]:
    """From the most particular to the most general."""
    return ((service_class, model), (service_class, ""), ("", ""))
