"""One inference engine: which sequences run in a step, for how long, and which KV blocks are kept.

Decides like vLLM's scheduler (v1): every step first serves the running sequences in the order of their admission, one
token for those that decode and a chunk for those that prefill, within one token budget; then it admits waiting ones
while budget, sequence slots and KV blocks last. When blocks run out the newest running sequence is preempted and later
recomputed. Full blocks of known content are kept after use and reused, least recently used thrown out first; a block
can be reused only once its tokens were computed.

Refuses to know clocks, text and transport. Time arrives as `now_ms` (any origin, never backwards); a step is planned by
`next_step` and completed by `finish_step`, by whoever owns the clock.

Steps that only decode are alike until somebody finishes, arrives or leaves: `next_run` plans as many of them at once as
can be foreseen, with the same result as one after the other, for a driver whose clock may jump.

Blocks are counted, not numbered: a sequence holds some blocks under their hashes (shared, reusable) and a number of
private ones. That keeps a decode step at a few operations a sequence and a prefill at a few a block.
"""

import heapq
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from enum import Enum
from itertools import islice
from typing import Any, Literal

import msgspec

from tokenfleet.engine_model.profiles import Profile

#: a walk over so many empty places of a dict costs some microseconds, a copy a millisecond
_GONE_MAX = 4096


class EngineError(RuntimeError):
    """The engine was used against its contract, or its own books do not balance."""


class SequenceTooLongError(EngineError):
    """The sequence could never run: its tokens need more KV blocks than the engine has."""

    def __init__(self, sequence_id: str, tokens: int, kv_tokens: int) -> None:
        super().__init__(f"{sequence_id}: {tokens} tokens exceed the KV capacity of {kv_tokens}")
        self.tokens = tokens
        self.kv_tokens = kv_tokens


class Phase(Enum):
    """Where a sequence is. `ARRIVING`: in the API layer, not yet seen by the scheduler."""

    ARRIVING = "arriving"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Sequence:
    """One request inside the engine; its public numbers may be read at any time, and only the engine writes them."""

    __slots__ = (
        "_blocks",
        "_computed",
        "_hashes",
        "_held",
        "_number",
        "cached_tokens",
        "first_token_ms",
        "generated",
        "id",
        "output_tokens",
        "owner",
        "phase",
        "preemptions",
        "priority",
        "prompt_tokens",
        "scheduled_ms",
        "submitted_ms",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        output_tokens: int,
        hashes: SequenceOf[Hashable],
        priority: int,
        number: int,
        now_ms: float,
        owner: Any,
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        #: tokens it will generate
        self.output_tokens = output_tokens
        #: lower is sooner
        self.priority = priority
        #: whatever the submitter wants to find again when a token comes
        self.owner = owner
        self.phase = Phase.ARRIVING
        #: tokens generated so far
        self.generated = 0
        #: prompt tokens found in the prefix cache when it was first admitted; -1 before that
        self.cached_tokens = -1
        self.preemptions = 0
        self.submitted_ms = now_ms
        #: first admission to a step, and first token; -1 before that
        self.scheduled_ms = -1.0
        self.first_token_ms = -1.0
        self._number = number
        self._hashes = hashes
        #: tokens whose KV is in blocks
        self._computed = 0
        #: blocks owned, and those of them that are shared under a hash
        self._blocks = 0
        self._held: list[Hashable] = []

    @property
    def hashes(self) -> SequenceOf[Hashable]:
        """Names of its leading full blocks, as far as they were given."""
        return self._hashes

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV the engine holds now; falls to 0 on preemption."""
        return self._computed


class StepPlan:
    """One step under way, or a run of equal ones: who decodes a token, who prefills how much, and when it ends."""

    __slots__ = ("decodes", "end_ms", "growth_ms", "kv_tokens", "prefills", "start_ms", "step_ms", "steps")

    def __init__(
        self,
        start_ms: float,
        end_ms: float,
        decodes: list[Sequence],
        prefills: list[tuple[Sequence, int]],
        kv_tokens: int,
    ) -> None:
        self.start_ms = start_ms
        self.end_ms = end_ms
        self.decodes = decodes
        self.prefills = prefills
        #: context tokens that the decodes read
        self.kv_tokens = kv_tokens
        #: steps until `end_ms`; `finish_step` completes them all
        self.steps = 1
        #: duration of the first of them, and by how much each is longer than the one before it
        self.step_ms = end_ms - start_ms
        self.growth_ms = 0.0

    def after_ms(self, steps: int) -> float:
        """When so many steps from now have ended."""
        return self.start_ms + steps * self.step_ms + self.growth_ms * (steps * (steps - 1) / 2)

    def steps_before(self, at_ms: float) -> int:
        """How many of the steps have ended by then, at most all but the last."""
        low, high = 0, self.steps - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.after_ms(middle) <= at_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def cut(self, steps: int) -> None:
        """End after so many steps."""
        self.steps = steps
        self.end_ms = self.after_ms(steps)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: gauges as of now, counters since the engine was made."""

    running: int
    waiting: int
    arriving: int
    blocks_total: int
    #: referenced by a running sequence
    blocks_used: int
    #: computed, unreferenced, reusable
    blocks_idle: int
    blocks_free: int
    #: distinct blocks a newcomer could hit, referenced or not
    blocks_cached: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_queries_tokens_total: int
    prefix_hits_tokens_total: int
    preemptions_total: int
    steps_total: int
    finished_total: int
    cancelled_total: int


class Engine:
    """One engine replica. See the module's docstring for what it decides."""

    def __init__(self, profile: Profile, *, scheduling: Literal["fcfs", "priority"] = "fcfs") -> None:
        if profile.token_budget <= 0 or profile.max_sequences <= 0:
            raise ValueError("token_budget and max_sequences must be positive")
        if profile.kv_tokens < profile.block_tokens:
            raise ValueError(f"kv_tokens must hold at least one block of {profile.block_tokens}")
        self.profile = profile
        #: factor on the duration of every step planned from now on (a throttled or sick accelerator)
        self.slowdown = 1.0
        #: what became of cached blocks, in order, for whoever sets a list here and empties it: (sequence, number of the
        #: block in its `hashes`) offered for reuse, (None, name) thrown out, (None, None) all cleared at once
        self.journal: list[tuple[Sequence | None, Any]] | None = None
        self.blocks_total = profile.kv_tokens // profile.block_tokens
        self._by_priority = scheduling == "priority"
        self._step: StepPlan | None = None
        self._numbers = 0
        self._arriving: deque[tuple[float, Sequence]] = deque()
        self._arriving_count = 0
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._waiting_count = 0
        self._running: list[Sequence] = []
        self._open: dict[str, Sequence] = {}
        # Block pool: every block is free, idle (cached, unreferenced), shared (cached, referenced) or private.
        self._free = self.blocks_total
        self._idle: dict[Hashable, None] = {}
        #: places at the front of `_idle` that are empty, at most
        self._gone = 0
        self._shared: dict[Hashable, int] = {}
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._prefix_queries_tokens_total = 0
        self._prefix_hits_tokens_total = 0
        self._preemptions_total = 0
        self._steps_total = 0
        self._finished_total = 0
        self._cancelled_total = 0

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        now_ms: float,
        block_hashes: SequenceOf[Hashable] = (),
        priority: int = 0,
        owner: Any = None,
    ) -> Sequence:
        """Hand a request to the engine; the scheduler sees it `api_delay_ms` later.

        `block_hashes` name the leading full blocks of prompt and output as far as they are known; blocks beyond them
        are never shared. Submitting at a later time than all before it keeps arrival order.

        Raises `SequenceTooLongError` when it could never run, `EngineError` for an id that is open, `ValueError` for
        lengths below one.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"{id}: a sequence has at least one prompt and one output token")
        if id in self._open:
            raise EngineError(f"{id} is already open")
        # The last token's KV is never computed.
        tokens = prompt_tokens + output_tokens - 1
        if -(-tokens // self.profile.block_tokens) > self.blocks_total:
            capacity = self.blocks_total * self.profile.block_tokens
            raise SequenceTooLongError(id, tokens, capacity)
        self._numbers += 1
        seq = Sequence(id, prompt_tokens, output_tokens, block_hashes, priority, self._numbers, now_ms, owner)
        self._open[id] = seq
        ready_ms = now_ms + self.profile.api_delay_ms
        self._arriving.append((ready_ms, seq))
        self._arriving_count += 1
        step = self._step
        if step is not None and step.steps > 1 and ready_ms < step.after_ms(step.steps - 1):
            self._cut(step, ready_ms)
        return seq

    def cancel(self, id: str, now_ms: float) -> bool:
        """Forget a request and free its blocks at once, whatever it was doing; False if it is not open."""
        seq = self._open.pop(id, None)
        if seq is None:
            return False
        self.interrupt(now_ms)
        if seq.phase is Phase.RUNNING:
            self._running.remove(seq)
            self._release(seq)
        elif seq.phase is Phase.WAITING:
            self._waiting_count -= 1
        else:
            self._arriving_count -= 1
        seq.phase = Phase.CANCELLED
        self._cancelled_total += 1
        return True

    def sequence(self, id: str) -> Sequence | None:
        """An open request; in the middle of a run its numbers are those of the last `settle`."""
        return self._open.get(id)

    def clear_cache(self) -> int:
        """Drop every unreferenced cached block; says how many."""
        dropped = len(self._idle)
        if self.journal is not None and dropped:
            self.journal += [(None, name) for name in self._idle] if self._shared else [(None, None)]
        self._idle.clear()
        self._free += dropped
        return dropped

    # -- steps --------------------------------------------------------------------------------------------------

    @property
    def stepping(self) -> StepPlan | None:
        """The step under way, if any."""
        return self._step

    @property
    def ready_at_ms(self) -> float | None:
        """When an idle engine has something to do: the earliest arrival still in the API layer; None if nothing."""
        arriving = self._arriving
        while arriving and arriving[0][1].phase is not Phase.ARRIVING:
            arriving.popleft()
        return arriving[0][0] if arriving else None

    def next_step(self, now_ms: float) -> StepPlan | None:
        """Plan and begin the next step; None when nothing can run now (see `ready_at_ms`).

        Raises `EngineError` while a step is under way.
        """
        if self._step is not None:
            raise EngineError("a step is under way")
        self._arrive(now_ms)
        profile = self.profile
        block = profile.block_tokens
        running = self._running
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        budget = profile.token_budget
        kv_tokens = 0
        pairs = 0.0
        preempted = False
        index = 0
        while index < len(running) and budget > 0:
            seq = running[index]
            done = seq._computed
            missing = seq.prompt_tokens + seq.generated - done
            count = missing if missing <= budget else budget
            need = -(-(done + count) // block) - seq._blocks
            if need > 0:
                while need > self._free + len(self._idle):
                    victim = running.pop()
                    self._preempt(victim)
                    preempted = True
                    if victim is seq:
                        break
                if seq.phase is not Phase.RUNNING:
                    break
                self._take(need)
                seq._blocks += need
            if missing == 1:
                decodes.append(seq)
                kv_tokens += done
            else:
                prefills.append((seq, count))
                pairs += count * (done + count / 2)
            budget -= count
            index += 1
        # Admitting right after a preemption would take the very blocks it freed.
        if not preempted:
            while budget > 0 and self._waiting_count and len(running) < profile.max_sequences:
                admitted = self._admit(budget, now_ms)
                if admitted is None:
                    break
                seq, count = admitted
                done = seq._computed
                if done + 1 == seq.prompt_tokens + seq.generated:
                    decodes.append(seq)
                    kv_tokens += done
                else:
                    prefills.append((seq, count))
                    pairs += count * (done + count / 2)
                budget -= count
        if not decodes and not prefills:
            return None
        tokens = profile.token_budget - budget
        duration_ms = (
            profile.t_fix_ms
            + max(profile.t_w_ms, profile.c_us_per_token * tokens * 1e-3)
            + profile.a_ns_per_pair * pairs * 1e-6
            + profile.k_ns_per_kv_token * kv_tokens * 1e-6
            + profile.per_sequence_us * (len(decodes) + len(prefills)) * 1e-3
        ) * self.slowdown
        self._step = StepPlan(now_ms, now_ms + duration_ms, decodes, prefills, kv_tokens)
        self._steps_total += 1
        return self._step

    def next_run(self, now_ms: float) -> StepPlan | None:
        """As `next_step`, but a step that only decodes brings all the equal ones that follow it.

        The plan then ends with the last of them; `submit` and `cancel` shorten it, so `end_ms` is to be read again
        after either. `finish_step` names the sequences that gained a token by the last step; the others of a run
        gained theirs before. Call `settle` before reading `stats` or a sequence in the middle of a run.
        """
        preemptions = self._preemptions_total
        plan = self.next_step(now_ms)
        # What a preemption freed is offered to the waiting by the next step.
        if plan is not None and not plan.prefills and preemptions == self._preemptions_total:
            self._extend(plan)
        return plan

    def settle(self, now_ms: float) -> None:
        """Complete those steps of the run under way that have ended by now."""
        step = self._step
        if step is not None and step.steps > 1:
            ended = step.steps_before(now_ms)
            if ended:
                self._advance(step, ended)

    def interrupt(self, now_ms: float) -> None:
        """Let the run under way end with its present step: something is about to change."""
        self.settle(now_ms)
        if self._step is not None and self._step.steps > 1:
            self._step.cut(1)

    def finish_step(self, now_ms: float) -> list[Sequence]:
        """Complete the step under way: the sequences that gained exactly one token by it, finished ones included.

        Of a run, by its last step. Finished ones have phase `FINISHED`, their blocks are released. Raises
        `EngineError` without a step.
        """
        step = self._step
        if step is None:
            raise EngineError("no step is under way")
        if step.steps > 1:
            self._advance(step, step.steps - 1)
        self._step = None
        gained: list[Sequence] = []
        finished = False
        block = self.profile.block_tokens
        running = Phase.RUNNING
        for seq in step.decodes:
            if seq.phase is not running:
                continue
            seq._computed = done = seq._computed + 1
            if done % block == 0:
                self._share(seq, done // block - 1, done // block)
            # A lone token is a decode, or the last of a prompt: either way the next token follows from it.
            generated = seq.generated = seq.generated + 1
            if generated == 1:
                self._first(seq, now_ms)
            if generated >= seq.output_tokens:
                finished = True
                self._finish(seq)
            gained.append(seq)
        for seq, count in step.prefills:
            if seq.phase is not running:
                continue
            before = seq._computed
            seq._computed = done = before + count
            self._share(seq, before // block, done // block)
            if done == seq.prompt_tokens + seq.generated:
                seq.generated += 1
                if seq.generated == 1:
                    self._first(seq, now_ms)
                if seq.generated >= seq.output_tokens:
                    finished = True
                    self._finish(seq)
                gained.append(seq)
        self._generation_tokens_total += len(gained)
        if finished:
            self._running = [seq for seq in self._running if seq.phase is running]
        return gained

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences the scheduler has seen and not admitted."""
        return self._waiting_count

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that running sequences reference; 0 when idle, however full the cache is."""
        return (self.blocks_total - self._free - len(self._idle)) / self.blocks_total

    def stats(self) -> EngineStats:
        """A snapshot of everything countable."""
        idle = len(self._idle)
        return EngineStats(
            running=len(self._running),
            waiting=self._waiting_count,
            arriving=self._arriving_count,
            blocks_total=self.blocks_total,
            blocks_used=self.blocks_total - self._free - idle,
            blocks_idle=idle,
            blocks_free=self._free,
            blocks_cached=idle + len(self._shared),
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            prefix_queries_tokens_total=self._prefix_queries_tokens_total,
            prefix_hits_tokens_total=self._prefix_hits_tokens_total,
            preemptions_total=self._preemptions_total,
            steps_total=self._steps_total,
            finished_total=self._finished_total,
            cancelled_total=self._cancelled_total,
        )

    def cached_blocks(self, block_hashes: SequenceOf[Hashable]) -> int:
        """How many leading blocks a newcomer would find computed."""
        count = 0
        shared, idle = self._shared, self._idle
        for name in block_hashes:
            if name not in shared and name not in idle:
                break
            count += 1
        return count

    def check(self) -> None:
        """Raise `EngineError` unless the books balance; for tests and scenario ends."""
        private = sum(s._blocks - len(s._held) for s in self._running)
        refs: dict[Hashable, int] = {}
        for seq in self._running:
            if seq.phase is not Phase.RUNNING:
                raise EngineError(f"{seq.id} runs in phase {seq.phase.value}")
            if seq._blocks * self.profile.block_tokens < seq._computed:
                raise EngineError(f"{seq.id} computed {seq._computed} tokens into {seq._blocks} blocks")
            for name in seq._held:
                refs[name] = refs.get(name, 0) + 1
        if refs != self._shared:
            raise EngineError("reference counts differ from what running sequences hold")
        if self._shared.keys() & self._idle.keys():
            raise EngineError("a block is both idle and referenced")
        total = self._free + len(self._idle) + len(self._shared) + private
        if total != self.blocks_total or self._free < 0 or private < 0:
            raise EngineError(
                f"{self._free} free + {len(self._idle)} idle + {len(self._shared)} shared "
                f"+ {private} private blocks are not {self.blocks_total}"
            )
        phases = [seq.phase for seq in self._open.values()]
        counts = (self._arriving_count, self._waiting_count, len(self._running))
        if counts != tuple(map(phases.count, (Phase.ARRIVING, Phase.WAITING, Phase.RUNNING))):
            raise EngineError(f"counted {counts} arriving, waiting, running among {len(phases)}")

    # -- inside -------------------------------------------------------------------------------------------------

    def _extend(self, plan: StepPlan) -> None:
        """Add the equal steps after a decode step: until one finishes, an arrival is ready or blocks run short."""
        decodes, block = plan.decodes, self.profile.block_tokens
        steps = min(seq.output_tokens - seq.generated for seq in decodes)
        if steps < 2 or any(seq.generated == 0 for seq in decodes):
            return
        free = self._free + len(self._idle)
        while steps > 1 and sum((s._computed + steps - 1) // block + 1 - s._blocks for s in decodes) > free:
            steps //= 2
        if steps > 1:
            plan.growth_ms = self.profile.k_ns_per_kv_token * len(decodes) * 1e-6 * self.slowdown
            plan.cut(steps)
            ready_ms = self.ready_at_ms
            if ready_ms is not None and ready_ms < plan.after_ms(steps - 1):
                self._cut(plan, ready_ms)

    def _cut(self, plan: StepPlan, at_ms: float) -> None:
        """Let a run end with the step that is under way at a time: what is ready then joins the next."""
        ended = plan.steps_before(at_ms)
        plan.cut(ended if ended and plan.after_ms(ended) == at_ms else ended + 1)

    def _advance(self, plan: StepPlan, steps: int) -> None:
        """Complete the first steps of a run, in which nobody begins or finishes; the rest of it goes on."""
        block = self.profile.block_tokens
        need = 0
        for seq in plan.decodes:
            before = seq._computed
            seq._computed = done = before + steps
            seq.generated += steps
            if len(seq._hashes) > before // block:
                self._share(seq, before // block, done // block)
            # As the next step's plan would: its one token needs room.
            more = done // block + 1 - seq._blocks
            if more > 0:
                seq._blocks += more
                need += more
        self._take(need)
        self._generation_tokens_total += steps * len(plan.decodes)
        self._steps_total += steps
        plan.start_ms = plan.after_ms(steps)
        plan.step_ms += steps * plan.growth_ms
        plan.kv_tokens += steps * len(plan.decodes)
        plan.steps -= steps

    def _arrive(self, now_ms: float) -> None:
        arriving = self._arriving
        while arriving and (arriving[0][0] <= now_ms or arriving[0][1].phase is not Phase.ARRIVING):
            seq = arriving.popleft()[1]
            if seq.phase is Phase.ARRIVING:
                self._arriving_count -= 1
                self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        self._waiting_count += 1
        # By arrival number a preempted sequence comes before all that were never admitted.
        key = seq.priority if self._by_priority else 0
        heapq.heappush(self._waiting, (key, seq._number, seq))

    def _admit(self, budget: int, now_ms: float) -> tuple[Sequence, int] | None:
        """Move the first waiting sequence into the batch with its first chunk; None if its blocks do not fit.

        The whole known sequence must fit, not only the chunk: otherwise long prompts admitted together would preempt
        each other in turn (vLLM: scheduler_reserve_full_isl).
        """
        waiting = self._waiting
        while waiting and waiting[0][2].phase is not Phase.WAITING:
            heapq.heappop(waiting)
        if not waiting:
            raise EngineError("waiting sequences were miscounted")
        seq = waiting[0][2]
        block = self.profile.block_tokens
        total = seq.prompt_tokens + seq.generated
        # The last token is always computed: its logits are what the next token is drawn from.
        limit = (total - 1) // block
        hits = 0
        idle_hits = 0
        shared, idle = self._shared, self._idle
        for name in seq._hashes[:limit]:
            if name in idle:
                idle_hits += 1
            elif name not in shared:
                break
            hits += 1
        if -(-total // block) - hits > self._free + len(idle) - idle_hits:
            return None
        heapq.heappop(waiting)
        self._waiting_count -= 1
        names = seq._hashes[:hits]
        for name in names:
            if name in shared:
                shared[name] += 1
            else:
                del idle[name]
                shared[name] = 1
        seq._held = list(names)
        seq._computed = hits * block
        count = min(total - seq._computed, budget)
        need = -(-(seq._computed + count) // block) - hits
        self._take(need)
        seq._blocks = hits + need
        seq.phase = Phase.RUNNING
        self._running.append(seq)
        if seq.cached_tokens < 0:
            seq.cached_tokens = seq._computed
            seq.scheduled_ms = now_ms
            self._prefix_queries_tokens_total += total
            self._prefix_hits_tokens_total += seq._computed
        return seq, count

    def _take(self, need: int) -> None:
        """Remove blocks from the pool, throwing out the least recently used cached ones for want of free ones."""
        free = self._free
        if need > free:
            idle = self._idle
            victims = list(islice(idle, need - free))
            for name in victims:
                del idle[name]
            # The way to a dict's front leads over all that was taken from there: a fresh one has none.
            self._gone += len(victims)
            if self._gone > _GONE_MAX:
                self._idle, self._gone = dict(idle), 0
            if self.journal is not None:
                self.journal += [(None, name) for name in victims]
            self._free = 0
        else:
            self._free = free - need

    def _share(self, seq: Sequence, first: int, last: int) -> None:
        """Blocks `first` to `last` (exclusive) of a sequence are computed: offer those of known content for reuse.

        A block whose hash exists already (two sequences computed the same prefix at once) stays private: its memory is
        used twice, as in vLLM.
        """
        shared, idle, journal = self._shared, self._idle, self.journal
        names = seq._hashes[first:last]
        fresh = dict.fromkeys([name for name in names if name not in shared and name not in idle], 1)
        if fresh:
            shared.update(fresh)
            seq._held += fresh
            if journal is not None:
                at = {name: index for index, name in reversed(list(enumerate(names, first)))}
                journal += [(seq, at[name]) for name in fresh]

    def _release(self, seq: Sequence) -> None:
        """Give back all blocks; shared ones stay reusable, the tail first to be thrown out."""
        shared, idle = self._shared, self._idle
        held = seq._held
        self._free += seq._blocks - len(held)
        held.reverse()
        # Nearly always only the beginning of a prompt has other users: the rest is moved at once.
        refs = list(map(shared.__getitem__, held))
        alone = refs.count(1)
        if refs[:alone].count(1) < alone:
            alone = 0
        mine = held[:alone]
        for name in mine:
            del shared[name]
        idle.update(dict.fromkeys(mine))
        for name in held[alone:]:
            count = shared[name] - 1
            if count:
                shared[name] = count
            else:
                del shared[name]
                idle[name] = None
        seq._held = []
        seq._blocks = 0
        seq._computed = 0

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.preemptions += 1
        self._preemptions_total += 1
        self._wait(seq)

    def _first(self, seq: Sequence, now_ms: float) -> None:
        seq.first_token_ms = now_ms
        self._prompt_tokens_total += seq.prompt_tokens

    def _finish(self, seq: Sequence) -> None:
        seq.phase = Phase.FINISHED
        self._release(seq)
        del self._open[seq.id]
        self._finished_total += 1
