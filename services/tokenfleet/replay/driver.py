"""Sends a plan to an OpenAI-compatible URL at its own times and records what came back.

Decides when a request leaves (its planned time, whatever the fleet does: open loop), how many processes that takes and
how an ending is named. Never retries, never slows down for the fleet, and measures its own lateness so that a run whose
driver lagged can be thrown away. Refuses to know which policy it measures.

Sources: Schroeder et al., "Open versus closed: a cautionary tale" (NSDI 2006); the OpenAI streaming format.
"""

import asyncio
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import aiohttp
import msgspec

from tokenfleet.replay.errors import ReplayError
from tokenfleet.replay.plan import Planned
from tokenfleet.replay.prompts import PromptMaker
from tokenfleet.replay.records import Outcome, Record
from tokenfleet.replay.sse import Splitter

_T = TypeVar("_T")

HEADER_REQUEST_ID = "x-tokenfleet-request-id"
HEADER_ATTEMPTS = "x-tokenfleet-attempts"
HEADER_SITE = "x-tokenfleet-site"
#: answers by which a fleet declines to serve; every other failure is its fault or the request's
REFUSALS = frozenset({403, 429, 503})
#: what sending and reading cost one core, measured with aiohttp: 1.5 ms a request, 0.05 ms a token
_CPU_S_PER_REQUEST = 0.0015
_CPU_S_PER_TOKEN = 0.00005
#: one process is kept below this share of a core, above which its own queueing would show as latency
_CORE_SHARE = 0.4
#: prompts are made ahead of their time, so that a burst is not late by its own making
_READY_AHEAD = 64


class DriverError(ReplayError):
    """The driver itself failed; the run says nothing about the fleet."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send, as whom, and for how long to wait."""

    #: base URL, with or without `/v1`
    url: str
    #: tenant → API key; `key` for tenants without one
    keys: dict[str, str] = {}
    key: str = ""
    #: the engines are emulators: each answer's length is the trace's
    emulated: bool = True
    timeout_s: float = 600.0
    #: wait after the last arrival; what is still open then is unfinished
    drain_s: float = 60.0
    seed: int = 0
    block_tokens: int = 512

    @property
    def endpoint(self) -> str:
        """The chat completions URL."""
        base = self.url.rstrip("/")
        return (base if base.endswith("/v1") else base + "/v1") + "/chat/completions"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands."""

    elapsed_s: float
    sent: int
    ended: int
    total: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left: its records in trace order, and what driving it took."""

    records: list[Record]
    processes: int
    cpu_s: float
    wall_s: float
    #: how late the event loops woke up, p99 over 20 ms ticks: lateness of reading, as `lag_ms` is of sending
    loop_lag_ms_p99: float


class _Part(msgspec.Struct, kw_only=True):
    """One process' share of a run."""

    records: list[Record]
    cpu_s: float
    loop_lag_ms_p99: float


class _ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorBody | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ErrorBody | None = None


_chunks = msgspec.json.Decoder(_Chunk)
_envelopes = msgspec.json.Decoder(_Envelope)


def processes_for(plan: Sequence[Planned], cores: int | None = None) -> int:
    """How many processes keep the driver's own lag out of the result, from the plan's busiest ten seconds."""
    load: dict[int, float] = {}
    for request in plan:
        cost_s = _CPU_S_PER_REQUEST + _CPU_S_PER_TOKEN * request.row.output_tokens
        bucket = int(request.at_s // 10)
        load[bucket] = load.get(bucket, 0.0) + cost_s / 10
    wanted = math.ceil(max(load.values(), default=0.0) / _CORE_SHARE)
    return max(1, min(wanted, cores or os.cpu_count() or 1, 16))


def body(request: Planned, target: Target, prompts: PromptMaker) -> bytes:
    """The JSON body of one request. Class, task and deadline are declared as strings, as OpenAI's `metadata` wants."""
    metadata = {"class": request.cls}
    if request.task:
        metadata["task"] = request.task
    if request.deadline_ms is not None:
        metadata["deadline_ms"] = str(round(request.deadline_ms))
    content: dict[str, Any] = {
        "model": request.model,
        "messages": prompts.messages(request.index, request.row),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        "metadata": metadata,
    }
    if target.emulated:
        content["tokenfleet_emulator"] = {"output_tokens": request.row.output_tokens}
    return msgspec.json.encode(content)


async def drive(
    plan: Sequence[Planned],
    target: Target,
    *,
    start_s: float | None = None,
    on_progress: Callable[[int, int], Awaitable[None]] | None = None,
) -> _Part:
    """Send a plan from this process. `start_s` is the run's zero on this host's monotonic clock (default: soon).

    Returns when every request ended or the drain time was over. Cancelling it closes every open request.
    """
    zero_s = time.monotonic() + 0.2 if start_s is None else start_s
    last_at_s = max((request.at_s for request in plan), default=0.0)
    usage_before = _cpu_s()
    loop_lags_ms: list[float] = []
    monitor = asyncio.create_task(_watch_loop(loop_lags_ms))
    open_requests: dict[asyncio.Task[None], Record] = {}
    records: list[Record] = []
    sent = 0

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        auto_decompress=False,
        read_bufsize=2**18,
    ) as session:

        async def report() -> None:
            while on_progress is not None:
                await on_progress(sent, sent - len(open_requests))
                await asyncio.sleep(0.5)

        reporter = asyncio.create_task(report())
        try:
            async for request, payload in _timely(plan, target, zero_s):
                record = _new_record(request, zero_s)
                records.append(record)
                key = target.keys.get(request.tenant, target.key)
                task = asyncio.create_task(
                    _send(session, target, key, payload, record, zero_s), name=str(request.index)
                )
                open_requests[task] = record
                task.add_done_callback(lambda done: open_requests.pop(done, None))
                sent += 1
            wait_s = zero_s + last_at_s + target.drain_s - time.monotonic()
            if open_requests and wait_s > 0:
                await asyncio.wait(list(open_requests), timeout=wait_s)
        finally:
            left = list(open_requests)
            for task in left:
                task.cancel()
            for ending in await asyncio.gather(*left, return_exceptions=True):
                if isinstance(ending, Exception):
                    raise DriverError(f"a request's own task failed: {ending!r}") from ending
            for helper in (reporter, monitor):
                helper.cancel()
            await asyncio.gather(reporter, monitor, return_exceptions=True)
    if on_progress is not None:
        await on_progress(sent, sent)
    loop_lags_ms.sort()
    rank = min(len(loop_lags_ms) - 1, int(len(loop_lags_ms) * 0.99))
    return _Part(
        records=records,
        cpu_s=_cpu_s() - usage_before,
        loop_lag_ms_p99=loop_lags_ms[rank] if loop_lags_ms else 0.0,
    )


def run(
    plan: Sequence[Planned],
    target: Target,
    *,
    processes: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Drive a whole plan, in as many processes as it takes, and return its records in trace order.

    Raises `DriverError` when a process of the driver dies: its requests would be missing from the offered ones.
    """
    if not plan:
        raise DriverError("nothing to send")
    _raise_file_limit()
    count = processes if processes is not None else processes_for(plan)
    began_s = time.monotonic()
    if count == 1:

        async def report(sent: int, ended: int) -> None:
            if on_progress is not None:
                elapsed_s = time.monotonic() - began_s
                on_progress(Progress(elapsed_s=elapsed_s, sent=sent, ended=ended, total=len(plan)))

        parts = [_run_loop(drive(plan, target, on_progress=report))]
    else:
        parts = _run_processes(plan, target, count, on_progress)
    records = sorted((r for part in parts for r in part.records), key=lambda r: r.index)
    if len(records) != len(plan):
        raise DriverError(f"{len(plan)} requests planned, {len(records)} recorded")
    return Run(
        records=records,
        processes=count,
        cpu_s=sum(part.cpu_s for part in parts),
        wall_s=time.monotonic() - began_s,
        loop_lag_ms_p99=max(part.loop_lag_ms_p99 for part in parts),
    )


async def _timely(plan: Sequence[Planned], target: Target, zero_s: float) -> AsyncIterator[tuple[Planned, bytes]]:
    """Each request of the plan at its planned time, its body made ahead of it."""
    prompts = PromptMaker(target.seed, block_tokens=target.block_tokens)
    ready: list[bytes] = []
    made = 0
    for place, request in enumerate(plan):
        due_s = zero_s + request.at_s
        while True:
            left_s = due_s - time.monotonic()
            ahead = made - place
            if ahead < 1 or (ahead < _READY_AHEAD and made < len(plan) and left_s > 0.005):
                ready.append(body(plan[made], target, prompts))
                made += 1
                # One body at a time, so that open streams are read in between.
                await asyncio.sleep(0)
                continue
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        yield request, ready.pop(0)


async def _send(
    session: aiohttp.ClientSession,
    target: Target,
    key: str,
    payload: bytes,
    record: Record,
    zero_s: float,
) -> None:
    """Send one request and fold its answer into its record. Its ending is always named, also when it is cancelled."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"

    def now_ms() -> float:
        return round((time.monotonic() - zero_s) * 1000, 3)

    def close(outcome: Outcome, code: str = "", kind: str = "") -> None:
        record.outcome = outcome
        record.ended_ms = now_ms()
        record.error_code = record.error_code or code
        record.error_type = record.error_type or kind

    record.sent_ms = now_ms()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            session.post(target.endpoint, data=payload, headers=headers) as response,
        ):
            _read_headers(response, record)
            if response.status != 200:
                _read_error(await response.read(), record)
                close("refused" if response.status in REFUSALS else "failed", "http_error")
                return
            whole = await _read_stream(response, record, now_ms)
            if record.error_code or record.error_type:
                close("failed")
            elif whole:
                close("completed")
            else:
                close("failed", "cut_stream", "stream_ended_early")
    except (aiohttp.ClientError, ConnectionError) as error:
        # Before TimeoutError: a connection that could not be made in time is one of both.
        close("failed", "connection", type(error).__name__)
    except TimeoutError:
        close("cancelled", "client_timeout", "cancelled")
    except msgspec.DecodeError as error:
        close("failed", "bad_chunk", type(error).__name__)
    except asyncio.CancelledError:
        # The drain time is over: it is neither kept nor broken, it is not finished.
        close("unfinished")
        raise


async def _read_stream(response: aiohttp.ClientResponse, record: Record, now_ms: Callable[[], float]) -> bool:
    """Fold a streamed answer into its record; true when it came to a whole end."""
    splitter = Splitter()
    done = False
    counted = 0
    async for data in response.content.iter_any():
        for event in splitter.feed(data):
            if event == b"[DONE]":
                done = True
                continue
            chunk = _chunks.decode(event)
            if chunk.error is not None:
                _note_error(chunk.error, record)
            for choice in chunk.choices:
                if choice.finish_reason:
                    record.finish_reason = choice.finish_reason
                delta = choice.delta
                if delta is not None and (
                    delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
                ):
                    counted += 1
                    record.last_token_ms = now_ms()
                    if record.first_token_ms is None:
                        record.first_token_ms = record.last_token_ms
            if chunk.usage is not None:
                _note_usage(chunk.usage, record)
    if record.output_tokens == 0:
        # A broken answer has no usage: its chunks are the best count there is.
        record.output_tokens = counted
    return done and bool(record.finish_reason) and not splitter.pending


def _read_headers(response: aiohttp.ClientResponse, record: Record) -> None:
    record.status = response.status
    record.request_id = response.headers.get(HEADER_REQUEST_ID, "")
    record.site = response.headers.get(HEADER_SITE, "")
    attempts = response.headers.get(HEADER_ATTEMPTS, "")
    record.attempts = int(attempts) if attempts.isdigit() else None
    after = response.headers.get("Retry-After", "")
    record.retry_after_s = float(after) if after.isdigit() else None


def _read_error(content: bytes, record: Record) -> None:
    try:
        error = _envelopes.decode(content).error
    except msgspec.DecodeError:
        record.error_type = "not_json"
        return
    if error is not None:
        _note_error(error, record)


def _note_error(error: _ErrorBody, record: Record) -> None:
    record.error_code = "" if error.code is None else str(error.code)
    record.error_type = error.type or ("" if record.error_code else "error")


def _note_usage(usage: _Usage, record: Record) -> None:
    record.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        record.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _new_record(request: Planned, zero_s: float) -> Record:
    return Record(
        index=request.index,
        tenant=request.tenant,
        cls=request.cls,
        task=request.task,
        model=request.model,
        outcome="unfinished",
        input_tokens=request.row.input_tokens,
        stated_output_tokens=request.row.output_tokens,
        deadline_ms=request.deadline_ms,
        planned_ms=round(request.at_s * 1000, 3),
        sent_ms=round((time.monotonic() - zero_s) * 1000, 3),
    )


async def _watch_loop(lags_ms: list[float]) -> None:
    """How late the loop wakes up, sampled every 20 ms."""
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(0.02)
        lags_ms.append(max(0.0, (time.monotonic() - before_s - 0.02) * 1000))


def _run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on uvloop where it is installed, with the collector out of the way of the clock."""
    try:
        import uvloop
    except ImportError:
        factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    else:
        factory = uvloop.new_event_loop
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main)
    finally:
        gc.unfreeze()


def _run_processes(
    plan: Sequence[Planned],
    target: Target,
    count: int,
    on_progress: Callable[[Progress], None] | None,
) -> list[_Part]:
    """Deal the plan out to processes that share one zero (the monotonic clock is the host's, not the process')."""
    context = multiprocessing.get_context("spawn")
    began_s = time.monotonic()
    links: list[Connection] = []
    workers: list[SpawnProcess] = []
    try:
        for nth in range(count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_worker, args=(theirs, list(plan[nth::count]), target), daemon=True)
            worker.start()
            theirs.close()
            links.append(ours)
            workers.append(worker)
        for link in links:
            _expect(link, "ready")
        zero_s = time.monotonic() + 0.2
        for link in links:
            link.send(zero_s)
        return _collect(links, len(plan), began_s, on_progress)
    finally:
        for link in links:
            link.close()
        for worker in workers:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _collect(
    links: Sequence[Connection],
    total: int,
    began_s: float,
    on_progress: Callable[[Progress], None] | None,
) -> list[_Part]:
    standing = [(0, 0)] * len(links)
    parts: dict[int, _Part] = {}
    while len(parts) < len(links):
        waiting = {link: nth for nth, link in enumerate(links) if nth not in parts}
        for ready in multiprocessing.connection.wait(list(waiting), timeout=1.0):
            assert isinstance(ready, Connection)
            nth = waiting[ready]
            word, content = _receive(ready)
            if word == "progress":
                standing[nth] = content
            elif word == "done":
                parts[nth] = msgspec.msgpack.decode(content, type=_Part)
        if on_progress is not None:
            on_progress(
                Progress(
                    elapsed_s=time.monotonic() - began_s,
                    sent=sum(sent for sent, _ in standing),
                    ended=sum(ended for _, ended in standing),
                    total=total,
                )
            )
    return [parts[nth] for nth in range(len(links))]


def _expect(link: Connection, word: str) -> None:
    got, _ = _receive(link)
    if got != word:
        raise DriverError(f"a driver process said {got!r} where {word!r} was due")


def _receive(link: Connection) -> tuple[str, Any]:
    try:
        word, content = link.recv()
    except EOFError as error:
        raise DriverError("a driver process died; see its message above") from error
    if word == "error":
        raise DriverError(content)
    return word, content


def _worker(link: Connection, plan: list[Planned], target: Target) -> None:
    """A process of the driver: ready, wait for the zero, drive, hand the records back."""
    # Ctrl-C reaches the whole group; the parent decides what it means and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    try:
        link.send(("ready", None))
        zero_s: float = link.recv()

        async def report(sent: int, ended: int) -> None:
            link.send(("progress", (sent, ended)))

        part = _run_loop(drive(plan, target, start_s=zero_s, on_progress=report))
        link.send(("done", msgspec.msgpack.encode(part)))
    except (BrokenPipeError, EOFError):
        sys.exit(1)  # the parent went away
    except ReplayError as error:
        link.send(("error", str(error)))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _raise_file_limit() -> None:
    """One open request is one socket: ask for as many files as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def key_map(keys: Mapping[str, str]) -> dict[str, str]:
    """Tenant → key, checked: an empty key would be sent as none and judged as another tenant's failure."""
    empty = sorted(tenant for tenant, key in keys.items() if not key)
    if empty:
        raise DriverError(f"empty key for {', '.join(empty)}")
    return dict(keys)
