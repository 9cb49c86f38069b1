"""The bytes that a site sends to others' agents so that they can time them, and how many of them at most.

Decides whether a probe is answered: whoever asks, and however often, this process gives away no more than a set rate.
Refuses to know who asks and what follows from the time that it took.
"""

import secrets
from collections.abc import Callable

from aiohttp import web

#: one answer at most, bytes
ANSWER_BYTES_MAX = 1_048_576
#: what one process sends to all others together, bytes/s, and how much of it at once
RATE_BYTES_PER_S = 1_048_576.0
BURST_BYTES = 4_194_304.0
#: answers under way at once
AT_ONCE = 2
#: random, so that no link looks fast by compressing it
_BLOCK = secrets.token_bytes(65_536)


class Responder:
    """Answers `GET /probe?bytes=N` with N bytes, or 429 where that would be more than this agent gives."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._left = BURST_BYTES
        self._since_s = now_s()
        self._open = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The bytes; 400 for a number that is none or too large."""
        asked = request.query.get("bytes", "")
        if not asked.isdecimal() or not 0 < int(asked) <= ANSWER_BYTES_MAX:
            return web.Response(status=400, text=f"bytes: 1 to {ANSWER_BYTES_MAX}\n")
        if self._open >= AT_ONCE or not self._take(int(asked)):
            return web.Response(status=429, headers={"Retry-After": "10"}, text="enough probes\n")
        self._open += 1
        try:
            response = web.StreamResponse(headers={"Content-Length": asked})
            await response.prepare(request)
            left = int(asked)
            while left > 0:
                await response.write(_BLOCK[:left])
                left -= len(_BLOCK)
            await response.write_eof()
            return response
        finally:
            self._open -= 1

    def _take(self, size: int) -> bool:
        """Whether so many more bytes are within the rate; if so they are counted."""
        now_s = self._now_s()
        self._left = min(BURST_BYTES, self._left + RATE_BYTES_PER_S * (now_s - self._since_s))
        self._since_s = now_s
        if size > self._left:
            return False
        self._left -= size
        return True
