"""One emulated engine replica: its engine model on the real clock, its faults, and what it remembers for tests.

Decides when a step's timer fires and who is woken by it; scheduling and durations are the engine model's. One timer
runs per engine step, never one per token. Refuses to know HTTP: a connection is somebody's callback.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from tokenfleet.emulator import kv_events
from tokenfleet.emulator.faults import Fault, Faults
from tokenfleet.emulator.metrics import Meters, page
from tokenfleet.emulator.settings import EmulatorSettings
from tokenfleet.emulator.wire import Call, pseudo_text
from tokenfleet.engine_model import Engine, EngineStats, Phase, Profile, Sequence, StepPlan, block_hashes, profile
from tokenfleet.fleet import Instance as Declared

log = logging.getLogger("tokenfleet.emulator")


class Listener(Protocol):
    """The HTTP side of an instance."""

    def close_connections(self) -> None:
        """Break every open connection."""

    async def pause(self) -> None:
        """Close the port, so that connecting is refused."""

    async def resume(self) -> None:
        """Open the same port again."""


class Job:
    """One request being served: the link between a sequence of the engine and a connection.

    `on_token` runs at the end of every step that gave it a token, on the event loop, and must not block.
    """

    __slots__ = ("call", "engine", "failed", "number", "on_token", "request_id", "sequence", "text", "woken")

    def __init__(self, call: Call, request_id: str, text: str) -> None:
        self.call = call
        self.request_id = request_id
        self.text = text
        self.number = 0
        self.sequence: Sequence | None = None
        self.engine: Engine | None = None
        #: the engine died under it
        self.failed = False
        #: set when the request's task has something to do
        self.woken = asyncio.Event()
        self.on_token: Callable[[], None] | None = None

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self.sequence.generated if self.sequence is not None else 0

    @property
    def finished(self) -> bool:
        """Every token is there."""
        return self.sequence is not None and self.sequence.phase is Phase.FINISHED


class EmulatedInstance:
    """One emulated engine replica: its engine model, its timers, its faults and what it remembers for tests."""

    def __init__(
        self,
        name: str,
        declared: Declared,
        *,
        max_model_len: int,
        settings: EmulatorSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.declared = declared
        self.settings = settings
        self.faults = Faults()
        self.listener: Listener | None = None
        self.incarnation = 0
        #: every request received, newest last, for `/requests`
        self.received: deque[dict[str, Any]] = deque(maxlen=settings.requests_kept)
        self.received_total = 0
        self.profile: Profile = profile(declared.profile).limited(
            token_budget=declared.token_budget,
            max_sequences=declared.max_sequences,
            kv_tokens=declared.kv_tokens,
        )
        capacity = self.profile.kv_tokens // self.profile.block_tokens * self.profile.block_tokens
        self.max_model_len = min(max_model_len, capacity)
        self._loop = loop
        #: engine milliseconds per loop second
        self._rate = 1000.0 * settings.time_scale
        self._jobs: dict[int, Job] = {}
        self._numbers = 0
        #: tokens of ended requests by request id, bounded; and of all
        self._tokens: dict[str, int] = {}
        self._tokens_total = 0
        self._timer: asyncio.TimerHandle | None = None
        #: a step ended while stalled, and waits to be completed
        self._held = False
        self._frozen: bytes | None = None
        self._page: tuple[EngineStats, int, bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: switched on: its GPUs are taken, from the beginning of a start
        self.powered = True
        self._powered_since_s = loop.time()
        self._powered_s = 0.0
        self._starting: asyncio.Task[None] | None = None
        #: publishes the engine's KV events; None: it was started without them
        self.kv: kv_events.Publisher | None = None
        if settings.kv_events and kv_events.AVAILABLE:
            self.kv = kv_events.Publisher(name, declared.model, self.profile.block_tokens)
        self._begin()

    def _begin(self) -> None:
        """A new incarnation: everything a process start resets."""
        self.incarnation += 1
        self.started_unix_s = time.time()
        self.engine = Engine(self.profile, scheduling=self.settings.scheduling)
        if self.kv is not None:
            self.engine.journal = []
            self.kv.restart()
        slow = self.faults.get("slow")
        self.engine.slowdown = slow.factor if slow else 1.0
        self.meters = Meters()
        self._page = None
        self._held = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Requests being served, queued ones included."""
        return len(self._jobs)

    def open_job(self, call: Call, request_id: str) -> Job:
        """Hand a request to the engine."""
        text = pseudo_text(call.prompt, call.output_tokens)
        job = Job(call, request_id, text)
        self._numbers += 1
        job.number = self._numbers
        # The answer's blocks are known beforehand, so that a chat's next turn finds them.
        # What an adapter has computed is other KV than its model's.
        salt = call.salt + b"\0" + call.adapter.encode() if call.adapter else call.salt
        hashes = block_hashes(call.prompt + text.encode(), self.profile.block_tokens, salt)
        job.engine = self.engine
        job.sequence = self.engine.submit(
            str(job.number),
            prompt_tokens=len(call.prompt),
            output_tokens=call.output_tokens,
            now_ms=self._now_ms(),
            block_hashes=hashes,
            priority=call.priority,
            owner=job,
        )
        self._jobs[job.number] = job
        if self.engine.stepping is None:
            self._arm()
        return job

    def close_job(self, job: Job) -> None:
        """The request is over, for whatever reason; frees what the engine still holds for it."""
        if self._jobs.pop(job.number, None) is None:
            return
        seq = job.sequence
        assert seq is not None
        assert job.engine is not None
        if job.engine is self.engine:
            if seq.phase is Phase.FINISHED:
                self.meters.success[job.call.finish_reason] += 1
                self.meters.e2e.observe(self._loop.time() - seq.submitted_ms / self._rate)
            else:
                self.engine.cancel(seq.id, self._now_ms())
        self._tokens[job.request_id] = self._tokens.pop(job.request_id, 0) + seq.generated
        self._tokens_total += seq.generated
        if len(self._tokens) > self.settings.requests_kept:
            del self._tokens[next(iter(self._tokens))]

    def fail_jobs(self) -> None:
        """Every open request hears that the engine died."""
        for job in self._jobs.values():
            job.failed = True
            job.woken.set()

    # -- steps --------------------------------------------------------------------------------------------------

    def _now_ms(self) -> float:
        return self._loop.time() * self._rate

    def _arm(self) -> None:
        """Set the one timer: the end of the step under way, or the first arrival of an idle engine."""
        step = self.engine.stepping
        at_ms = step.end_ms if step is not None else self.engine.ready_at_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_ms is not None:
            self._timer = self._loop.call_at(at_ms / self._rate, self._tick)

    def _tick(self) -> None:
        """A step has ended, or an arrival is ready: complete what is due, begin what follows, write the tokens."""
        self._timer = None
        engine = self.engine
        if engine.stepping is not None and self.faults.get("stall") is not None:
            self._held = True
            return
        now_ms = self._now_ms()
        gained: dict[Job, None] = {}
        nominal_ms = now_ms
        while True:
            step = engine.stepping
            if step is not None:
                nominal_ms = step.end_ms
                self._complete(step, gained)
            # A timer that fires late must not slow the engine down: the next step begins when the last one ended.
            late_ms = now_ms - nominal_ms
            begin_ms = nominal_ms if late_ms <= self.settings.lag_forgiven_ms * self.settings.time_scale else now_ms
            step = engine.next_step(begin_ms)
            if step is None or step.end_ms > now_ms:
                break
        self._arm()
        for job in gained:
            if job.on_token is not None:
                job.on_token()

    def _complete(self, step: StepPlan, gained: dict[Job, None]) -> None:
        meters, rate = self.meters, self._rate
        later = 0
        for seq in self.engine.finish_step(step.end_ms):
            gained[seq.owner] = None
            if seq.generated == 1:
                meters.ttft.observe((step.end_ms - seq.submitted_ms) / rate)
                arrived_ms = seq.submitted_ms + self.profile.api_delay_ms
                meters.queue.observe(max(0.0, (seq.scheduled_ms - arrived_ms) / rate))
            else:
                later += 1
        journal = self.engine.journal
        if journal and self.kv is not None:
            self.kv.publish(journal)
            journal.clear()
        if later:
            # Every running sequence gains one token a step: the step is the gap since its last one.
            meters.inter_token.observe((step.end_ms - step.start_ms) / rate, later)

    # -- faults -------------------------------------------------------------------------------------------------

    async def apply(self, fault: Fault) -> None:
        """Begin a fault, or end all of them; done when this returns, but for the end of a restart's down time."""
        log.info("%s: fault %s", self.name, fault.kind)
        if fault.kind == "restart":
            await self.restart(fault.down_ms / 1000.0)
            return
        if fault.kind == "none":
            self.faults.clear()
        else:
            if fault.kind == "freeze_metrics":
                self._frozen = self.metrics_page()
            self.faults.add(fault)
        slow = self.faults.get("slow")
        self.engine.slowdown = slow.factor if slow else 1.0
        if self._held and self.faults.get("stall") is None:
            self._held = False
            self._tick()

    async def restart(self, down_s: float = 0.0) -> None:
        """Die and come back on the same port, `down_s` later: connections broken, cache empty, counters at zero."""
        if self.listener is not None:
            if down_s:
                await self.listener.pause()
                self._spawn(self._come_back(self.listener, down_s))
            self.listener.close_connections()
        self._begin()

    async def power(self, *, on: bool, cold_start_s: float = 0.0) -> None:
        """Switch the engine on or off, as its actuator orders; what it is already changes nothing.

        Off closes the port and ends every request. On takes the GPUs at once and opens the port after `cold_start_s`,
        with an empty cache: a new process.
        """
        if on == self.powered:
            return
        log.info("%s: switched %s", self.name, "on" if on else "off")
        self.powered = on
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if on:
            self._powered_since_s = self._loop.time()
            self._begin()
            if self.listener is not None:
                self._starting = self._spawn(self._come_back(self.listener, cold_start_s))
            return
        self._powered_s += self._loop.time() - self._powered_since_s
        self.fail_jobs()
        if self.listener is not None:
            await self.listener.pause()
            self.listener.close_connections()

    @property
    def powered_s(self) -> float:
        """How long its GPUs have been taken."""
        return self._powered_s + (self._loop.time() - self._powered_since_s if self.powered else 0.0)

    async def _come_back(self, listener: Listener, down_s: float) -> None:
        await asyncio.sleep(down_s)
        self.started_unix_s = time.time()
        self._page = None
        await listener.resume()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s: a fault failed: %r", self.name, task.exception())

    async def stop(self) -> None:
        """No timer and no task of this instance survives this."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.kv is not None:
            await self.kv.stop()

    # -- what others read ---------------------------------------------------------------------------------------

    def metrics_page(self) -> bytes:
        """/metrics as of now, or as of the moment it was frozen."""
        if self._frozen is not None and self.faults.get("freeze_metrics") is not None:
            return self._frozen
        stats = self.engine.stats()
        ends = sum(self.meters.success.values()) + self.meters.rejections
        if self._page is not None and self._page[0] == stats and self._page[1] == ends:
            return self._page[2]
        text = page(
            stats,
            self.meters,
            model=self.declared.model,
            block_tokens=self.profile.block_tokens,
            started_unix_s=self.started_unix_s,
            kv_tokens=self.profile.kv_tokens,
        )
        self._page = (stats, ends, text)
        return text

    def state(self) -> dict[str, Any]:
        """What the instance really did, over all its incarnations: the oracle of tests."""
        tokens = dict(self._tokens)
        total = self._tokens_total
        for job in self._jobs.values():
            tokens[job.request_id] = tokens.get(job.request_id, 0) + job.tokens
            total += job.tokens
        stats = self.engine.stats()
        return {
            "instance": self.name,
            "model": self.declared.model,
            "version": self.declared.version,
            "incarnation": self.incarnation,
            "started_unix_s": self.started_unix_s,
            "generated_tokens": total,
            "tokens_by_request": tokens,
            "open_requests": len(self._jobs),
            "received_requests": self.received_total,
            "powered": self.powered,
            "powered_s": round(self.powered_s, 3),
            "engine": msgspec.to_builtins(stats),
            "faults": [msgspec.to_builtins(fault) for fault in self.faults.active()],
        }
