"""Modelled instances: an engine model on the virtual clock, its faults, and what its site's agent reports of it.

Decides when a step ends and who hears of a token. Only first and last tokens are events: what lies between is the
engine's affair, and equal decode steps are one run (`Engine.next_run`). Refuses to know requests, policies and HTTP.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from tokenfleet.engine_model import Engine, Phase, Profile, Sequence, SequenceTooLongError, StepPlan
from tokenfleet.fleet import Fleet, Instance
from tokenfleet.simulator.errors import InvariantError
from tokenfleet.simulator.kv import Teller
from tokenfleet.simulator.loop import Loop
from tokenfleet.simulator.scenario import EngineSpec
from tokenfleet_schemas.capacity import CapacityReported


class Job(Protocol):
    """One attempt at an instance, as its gateway follows it; called at the engine's site and time."""

    def first_token(self) -> None:
        """The first token left the engine."""

    def finished(self, sequence: Sequence) -> None:
        """The last token left the engine."""

    def broken(self, reason: str, tokens: int) -> None:
        """The connection broke after so many tokens: `upstream_unreachable`, `upstream_disconnected`."""

    def rejected(self) -> None:
        """The engine says that it can never serve this."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt asks of the engine."""

    id: str
    prompt_tokens: int
    output_tokens: int
    block_names: list[int]
    priority: int


def perturbed(base: Profile, spec: EngineSpec) -> Profile:
    """A profile with its constants scaled as the scenario says; what agents declare stays the unscaled one's."""
    return msgspec.structs.replace(
        base,
        c_us_per_token=base.c_us_per_token * spec.c,
        a_ns_per_pair=base.a_ns_per_pair * spec.a,
        k_ns_per_kv_token=base.k_ns_per_kv_token * spec.k,
        t_w_ms=base.t_w_ms * spec.t_w,
        t_fix_ms=base.t_fix_ms * spec.t_fix,
        api_delay_ms=base.api_delay_ms * spec.api_delay,
        per_sequence_us=base.per_sequence_us * spec.per_sequence,
        kv_tokens=int(base.kv_tokens * spec.kv_tokens),
        block_tokens=spec.block_tokens,
    )


class SimulatedInstance:
    """One engine replica and its declared facts."""

    def __init__(
        self,
        loop: Loop,
        fleet: Fleet,
        site: str,
        name: str,
        declared: Instance,
        spec: EngineSpec,
        profiles: Mapping[str, Profile],
    ) -> None:
        self.name, self.site, self.declared = name, site, declared
        self.zone = fleet.sites[site].zone
        self.max_model_len = fleet.models[declared.model].max_model_len
        base = profiles[declared.profile].limited(
            token_budget=declared.token_budget,
            max_sequences=declared.max_sequences,
            kv_tokens=declared.kv_tokens,
        )
        self.profile = perturbed(base, spec)
        #: prior for the prefill rate, from the unscaled profile: a full step's tokens over its time
        step_ms = base.t_fix_ms + max(base.t_w_ms, base.c_us_per_token * base.token_budget * 1e-3)
        self.prefill_tokens_per_s = declared.prefill_tokens_per_s or 1000.0 * base.token_budget / step_ms
        #: false: its agent does not know the rate
        self.says_rate = True
        self._loop = loop
        self._spec = spec
        self.incarnation = 1
        self.revision = 0
        self.up = True
        #: why it is not up, as its agent says it
        self.reason = ""
        #: finishes what it has and takes nothing new
        self.draining = False
        self.stalled = False
        self.slowdown = 1.0
        #: until when its agent says nothing of it
        self.silent_until_ms = 0.0
        self._due_ms: float | None = None
        self._jobs: dict[str, Job] = {}
        #: tokens that left the engine, over all incarnations
        self.tokens_total = 0
        self.engine = Engine(self.profile, scheduling=spec.scheduling)
        #: says what the cache holds; None: nobody does
        self.teller: Teller | None = None
        #: since when it occupies its accelerators; None: it does not
        self._occupied_ms: float | None = loop.now_ms
        self._gpu_ms = 0.0

    def tell(self, teller: Teller) -> None:
        """From now on this one says what the cache holds."""
        self.teller, self.engine.journal = teller, []
        teller.begin(str(self.incarnation), self._loop.now_ms)

    # ------------------------------------------------------------------------------------------ replicas

    def start(self, cold_ms: float) -> None:
        """Begin as a new replica: it occupies its accelerators now and answers after its cold start, cache empty."""
        self.up, self.draining, self.reason = False, False, "starting"
        self._due_ms = None
        self._occupied_ms = self._loop.now_ms
        self._loop.at(self._loop.now_ms + cold_ms, self._started, self._occupied_ms)

    def _started(self, since_ms: float) -> None:
        if since_ms == self._occupied_ms and not self.up and self.reason == "starting":
            self.come_up()

    def drain(self) -> None:
        """Take nothing new; `stop` it when it is empty."""
        self.draining = True

    def stop(self) -> None:
        """The replica is gone and its accelerators are free; whatever it still had breaks."""
        self.go_down("draining")
        if self._occupied_ms is not None:
            self._gpu_ms += (self._loop.now_ms - self._occupied_ms) * max(1, self.declared.gpus)
            self._occupied_ms = None

    @property
    def stopped(self) -> bool:
        """Whether it occupies nothing."""
        return self._occupied_ms is None

    def gpu_ms(self) -> float:
        """GPU-time that it has cost until now, cold starts included, whatever it did with it."""
        now = 0.0 if self._occupied_ms is None else self._loop.now_ms - self._occupied_ms
        return self._gpu_ms + now * max(1, self.declared.gpus)

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, work: Work, job: Job) -> None:
        """A request reaches the engine."""
        if not self.up:
            job.broken("upstream_unreachable", 0)
            return
        try:
            self.engine.submit(
                work.id,
                prompt_tokens=work.prompt_tokens,
                output_tokens=work.output_tokens,
                block_hashes=work.block_names,
                priority=work.priority,
                now_ms=self._loop.now_ms,
            )
        except SequenceTooLongError:
            job.rejected()
            return
        self._jobs[work.id] = job
        self._arm()

    def cancel(self, id: str) -> int:
        """The gateway hung up; says how many tokens had left the engine."""
        job = self._jobs.pop(id, None)
        if job is None:
            return 0
        now_ms = self._loop.now_ms
        sequence = self.engine.sequence(id)
        self.engine.settle(now_ms)
        tokens = sequence.generated if sequence is not None else 0
        self.engine.cancel(id, now_ms)
        self.tokens_total += tokens
        self._arm()
        return tokens

    @property
    def open(self) -> int:
        """Requests inside."""
        return len(self._jobs)

    # ------------------------------------------------------------------------------------------ steps

    def _arm(self) -> None:
        """See to it that the end of the step under way, or the first arrival, is not missed."""
        if self.stalled or not self.up:
            return
        step = self.engine.stepping
        due_ms = step.end_ms if step is not None else self.engine.ready_at_ms
        if due_ms is None:
            self._due_ms = None
        elif self._due_ms is None or due_ms != self._due_ms:
            self._due_ms = due_ms
            self._loop.at(due_ms, self._tick, due_ms)

    def _tick(self, due_ms: float) -> None:
        if due_ms != self._due_ms or self.stalled or not self.up:
            return
        self._due_ms = None
        engine, now_ms = self.engine, self._loop.now_ms
        step = engine.stepping
        if step is not None:
            self._complete(step, now_ms)
        if engine.next_run(now_ms) is None and engine.waiting:
            raise InvariantError([f"{self.name}: {engine.waiting} sequences wait and nothing runs"])
        if engine.journal and self.teller is not None:
            journal, engine.journal = engine.journal, []
            self.teller.follow(journal, now_ms)
        self._arm()

    def _complete(self, step: StepPlan, now_ms: float) -> None:
        for sequence in self.engine.finish_step(now_ms):
            if sequence.generated == 1:
                if sequence.phase is Phase.RUNNING and sequence.computed_tokens < sequence.prompt_tokens:
                    raise InvariantError([f"{self.name}: {sequence.id} has a token before its prefill"])
                job = self._jobs.get(sequence.id)
                if job is not None:
                    job.first_token()
            if sequence.phase is Phase.FINISHED:
                job = self._jobs.pop(sequence.id, None)
                if job is not None:
                    self.tokens_total += sequence.generated
                    job.finished(sequence)

    # ------------------------------------------------------------------------------------------ faults

    def go_down(self, reason: str = "unreachable") -> None:
        """The process dies: every connection breaks, the cache is gone."""
        self.reason = reason
        if not self.up:
            return
        self.up = False
        self._due_ms = None
        self.engine.settle(self._loop.now_ms)
        jobs, self._jobs = self._jobs, {}
        for id, job in jobs.items():
            sequence = self.engine.sequence(id)
            tokens = sequence.generated if sequence is not None else 0
            self.tokens_total += tokens
            job.broken("upstream_disconnected", tokens)

    def come_up(self) -> None:
        """A new process answers, with an empty cache."""
        if self.stopped:
            return
        self.up, self.reason = True, ""
        self.incarnation += 1
        self.engine = Engine(self.profile, scheduling=self._spec.scheduling)
        self.engine.slowdown = self.slowdown
        if self.teller is not None:
            self.tell(self.teller)

    def slow_down(self, factor: float) -> None:
        """Every step from the next one on takes so many times as long."""
        self.slowdown = factor
        self.engine.interrupt(self._loop.now_ms)
        self.engine.slowdown = factor
        self._arm()

    def stall(self) -> None:
        """Connections stay open, no token comes."""
        self.stalled = True
        self._due_ms = None

    def go_on(self) -> None:
        """The step that was under way ends now, or when it is due."""
        self.stalled = False
        self._arm()

    # ------------------------------------------------------------------------------------------ reports

    def report(self, now_ms: float, age_ms: float) -> CapacityReported:
        """What its agent says of it."""
        self.revision += 1
        declared, engine = self.declared, self.engine
        engine.settle(now_ms)
        return CapacityReported(
            id=f"{self.name}:{self.incarnation}:{self.revision}",
            time_unix_ms=int(now_ms),
            site=self.site,
            zone=self.zone,
            instance=self.name,
            incarnation=str(self.incarnation),
            revision=self.revision,
            model=declared.model,
            version=declared.version,
            ready=self.up,
            reason="draining" if self.draining else self.reason,
            draining=self.draining,
            endpoint_url=declared.url,
            credential=declared.credential,
            routable_from=declared.routable_from,
            engine=declared.engine,
            gpus=declared.gpus,
            max_model_len=self.max_model_len,
            running=engine.running if self.up else None,
            waiting=engine.waiting if self.up else None,
            kv_tokens_total=engine.blocks_total * self.profile.block_tokens,
            kv_usage=engine.kv_usage if self.up else None,
            token_budget=self.profile.token_budget,
            max_sequences=self.profile.max_sequences,
            prefill_tokens_per_s=self.prefill_tokens_per_s if self.says_rate else None,
            sample_age_ms=age_ms,
        )
