"""The service's clock: the wall's time, advanced by the monotonic clock, so that it never runs backwards."""

import time


class Clock:
    """Milliseconds since the epoch; a step of the wall clock after the start is not followed."""

    def __init__(self) -> None:
        self._offset_ms = time.time() * 1000 - time.monotonic() * 1000

    def now_ms(self) -> float:
        """Now, ms since the epoch."""
        return time.monotonic() * 1000 + self._offset_ms
