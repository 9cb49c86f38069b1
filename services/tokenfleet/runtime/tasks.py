"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]], *, every_s: float = 1.0) -> None:
    """Cancel tasks until they have ended; their results and errors are dropped.

    One `cancel()` is not enough: on Python 3.11 `asyncio.wait_for`, which nats-py is built on, loses a cancellation
    that meets the completion of what it waits for (python/cpython#86296, mended in 3.12).
    """
    left = {task for task in tasks if task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=every_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen
