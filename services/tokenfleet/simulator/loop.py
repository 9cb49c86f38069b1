"""The virtual clock: what happens next, and nothing between.

Decides the order of events: by time, and at one instant by who was planned first. Same plan, same order.
"""

import heapq
from collections import deque
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

    def row(self) -> "Row":
        """For things that are planned in the order of their times."""
        return Row(self)

    def run_until(self, until_ms: float) -> None:
        """Let time pass."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_ms:
            self.now_ms, _, action, args = pop(heap)
            self.ended += 1
            action(*args)
        self.now_ms = max(self.now_ms, until_ms)


class Row:
    """Things planned in the order of their times: only the next of them is in the heap, which stays small.

    They happen when `Loop.at` would let them happen. What is out of order goes into the heap at once.
    """

    __slots__ = ("_left", "_loop")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._left: deque[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = deque()

    def at(self, at_ms: float, action: Callable[..., None], *args: Any) -> None:
        """As `Loop.at`."""
        loop, left = self._loop, self._left
        if left and at_ms < left[-1][0]:
            loop.at(at_ms, action, *args)
            return
        loop._planned += 1
        left.append((max(at_ms, loop.now_ms), loop._planned, action, args))
        if len(left) == 1:
            self._plan()

    def _plan(self) -> None:
        at_ms, number, _, _ = self._left[0]
        heapq.heappush(self._loop._heap, (at_ms, number, self._happen, ()))

    def _happen(self) -> None:
        _, _, action, args = self._left.popleft()
        if self._left:
            self._plan()
        action(*args)
