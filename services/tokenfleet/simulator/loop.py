"""The virtual clock: what happens next, and nothing between.

Decides the order of events: by time, and at one instant by who was planned first. Same plan, same order.
"""

import heapq
from collections.abc import Callable
from typing import Any

#: where virtual time begins, ms since the epoch; cores expect real-looking times
START_MS = 1_800_000_000_000.0
#: and where a run's own times do, ms: by then offices are taken and every agent has reported
ZERO_MS = START_MS + 2_000.0


class Loop:
    """A heap of things to do and the time."""

    __slots__ = ("_heap", "_planned", "ended", "now_ms")

    def __init__(self, start_ms: float = START_MS) -> None:
        self.now_ms = start_ms
        #: events that took place
        self.ended = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, at_ms: float, action: Callable[..., None], *args: Any) -> None:
        """Do this at a time; the past means now, after what is planned for now already."""
        self._planned += 1
        if at_ms < self.now_ms:
            at_ms = self.now_ms
        heapq.heappush(self._heap, (at_ms, self._planned, action, args))

    def run_until(self, until_ms: float) -> None:
        """Let time pass."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_ms:
            self.now_ms, _, action, args = pop(heap)
            self.ended += 1
            action(*args)
        self.now_ms = max(self.now_ms, until_ms)
