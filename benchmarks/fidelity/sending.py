"""Sends streamed requests at given times and notes when their tokens came.

Decides nothing but when to send: at a request's own time, whatever became of those before it (open loop), or after the
one before it (`after_last_ms`). Every answer's times are on one monotonic clock. A request that got no whole answer is
kept with what went wrong: whoever judges counts it.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from tokenfleet.replay.sse import Splitter


class Sent(msgspec.Struct, kw_only=True):
    """One request: what is asked for, and after the run what came of it. Times in ms of the run's clock."""

    index: int
    body: bytes
    #: when to send
    at_ms: float = 0.0
    #: instead: so long after the end of the request before it
    after_last_ms: float | None = None
    sent_ms: float = 0.0
    first_ms: float | None = None
    last_ms: float | None = None
    output_tokens: int = 0
    prompt_tokens: int = 0
    #: as usage says; None: it does not say
    cached_tokens: int | None = None
    #: the engine's own figure, where it gives one (vLLM: --enable-per-request-metrics); None: it does not
    engine_ttft_ms: float | None = None
    request_id: str = ""
    problem: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """From sending to the first token."""
        return None if self.first_ms is None else self.first_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first; None below two tokens."""
        if self.first_ms is None or self.last_ms is None or self.output_tokens < 2:
            return None
        return (self.last_ms - self.first_ms) / (self.output_tokens - 1)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    #: of completions; chat has a delta instead
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Metrics(msgspec.Struct):
    time_to_first_token_ms: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: _Error | None = None


_chunks = msgspec.json.Decoder(_Chunk)
REQUEST_ID_HEADER = "x-tokenfleet-request-id"


async def send_all(url: str, requests: Sequence[Sent], *, key: str = "", timeout_s: float = 300.0) -> None:
    """Send every request to `url` in order and fill in what came back; returns when all have ended."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
    gc.collect()
    gc.disable()
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4), timeout=timeout, headers=headers
        ) as session:
            zero_s = time.perf_counter()
            tasks: list[asyncio.Task[None]] = []
            for request in requests:
                if request.after_last_ms is not None:
                    if tasks:
                        await asyncio.gather(*tasks)
                    due_s = time.perf_counter() + request.after_last_ms / 1000
                else:
                    due_s = zero_s + request.at_ms / 1000
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.append(asyncio.create_task(_send(session, url, request, zero_s)))
            await asyncio.gather(*tasks)
    finally:
        gc.enable()


async def _send(session: aiohttp.ClientSession, url: str, request: Sent, zero_s: float) -> None:
    request.sent_ms = (time.perf_counter() - zero_s) * 1000
    splitter = Splitter()
    pieces = 0
    finished = False
    try:
        async with session.post(url, data=request.body) as response:
            request.request_id = response.headers.get(REQUEST_ID_HEADER, "")
            if response.status != 200:
                request.problem = f"{response.status}: {(await response.text())[:300]}"
                return
            async for data in response.content.iter_any():
                now_ms = (time.perf_counter() - zero_s) * 1000
                for event in splitter.feed(data):
                    if event == b"[DONE]":
                        continue
                    chunk = _chunks.decode(event)
                    if chunk.error is not None:
                        request.problem = chunk.error.message or "error in the stream"
                    for choice in chunk.choices:
                        if choice.text is not None or (choice.delta is not None and choice.delta.content is not None):
                            pieces += _token(request, choice, now_ms)
                        finished = finished or choice.finish_reason is not None
                    if chunk.usage is not None:
                        _use(request, chunk.usage)
                    if chunk.metrics is not None:
                        request.engine_ttft_ms = chunk.metrics.time_to_first_token_ms
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        request.problem = f"{type(error).__name__}: {error}"
        return
    request.output_tokens = request.output_tokens or pieces
    if not request.problem and not (finished and request.output_tokens):
        request.problem = "the stream ended early"


def _token(request: Sent, choice: _Choice, now_ms: float) -> int:
    """A chat stream opens with an empty role chunk that vLLM sends with the first token."""
    if request.first_ms is None:
        request.first_ms = now_ms
    request.last_ms = now_ms
    return 1


def _use(request: Sent, usage: _Usage) -> None:
    request.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        request.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        request.cached_tokens = usage.prompt_tokens_details.cached_tokens


async def get_text(url: str) -> str:
    """A page, such as /metrics; empty where there is none."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session, session.get(url) as page:
            return await page.text() if page.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


def encode(body: dict[str, Any]) -> bytes:
    """A request's body."""
    return msgspec.json.encode(body)
