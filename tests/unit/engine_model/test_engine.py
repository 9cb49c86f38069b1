"""The engine's scheduling, against hand-computed cases and against every order of events hypothesis can think of."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.engine_model import (
    Engine,
    EngineError,
    Phase,
    Profile,
    SequenceTooLongError,
    UnknownProfileError,
    block_hashes,
    profile,
)


def small(**changes: float) -> Profile:
    """A slow little engine with round numbers: 10 ms a step, 1 ms a token beyond ten."""
    values: dict[str, float] = {
        "t_fix_ms": 0.0,
        "t_w_ms": 10.0,
        "c_us_per_token": 1000.0,
        "a_ns_per_pair": 0.0,
        "k_ns_per_kv_token": 0.0,
        "per_sequence_us": 0.0,
        "kv_tokens": 64,
        "token_budget": 16,
        "max_sequences": 4,
        "block_tokens": 4,
        "api_delay_ms": 0.0,
    }
    values.update(changes)
    return Profile(name="small", **values)  # type: ignore[arg-type]  # a dict of mixed numbers


def drain(engine: Engine, now_ms: float = 0.0) -> list[tuple[float, str, int]]:
    """Step until idle: (end of step, id, tokens so far) of every token."""
    seen = []
    while True:
        plan = engine.next_step(now_ms)
        if plan is None:
            ready = engine.ready_at_ms
            if ready is None:
                return seen
            now_ms = ready
            continue
        now_ms = plan.end_ms
        seen += [(now_ms, seq.id, seq.generated) for seq in engine.finish_step(now_ms)]
        engine.check()


def test_a_long_prompt_is_prefilled_in_chunks_and_decodes_go_on_beside_it() -> None:
    """Without chunking, one 30-token prompt would stop the other stream for its whole prefill."""
    engine = Engine(small())
    engine.submit("chat", prompt_tokens=4, output_tokens=4, now_ms=0)
    first = engine.next_step(0)
    assert first is not None
    assert first.end_ms == 10.0
    engine.finish_step(10)
    engine.submit("document", prompt_tokens=30, output_tokens=1, now_ms=10)
    seen = drain(engine, 10)
    # One token for the chat and 15 of the document's prompt a step: 16 tokens take 16 ms.
    assert seen == [(26, "chat", 2), (42, "chat", 3), (42, "document", 1), (52, "chat", 4)]
    assert engine.stats().blocks_free == 16


def test_a_prompt_that_meets_the_last_token_of_a_budget_is_not_taken_for_a_decode() -> None:
    """A chunk of one token is still a prefill: its request must not get a token before its prompt is computed."""
    engine = Engine(small(token_budget=5))
    engine.submit("a", prompt_tokens=4, output_tokens=3, now_ms=0)
    long = engine.submit("b", prompt_tokens=9, output_tokens=1, now_ms=0)
    plan = engine.next_step(0)
    assert plan is not None
    assert [(seq.id, n) for seq, n in plan.prefills] == [("a", 4), ("b", 1)]
    engine.finish_step(plan.end_ms)
    assert (long.generated, long.computed_tokens) == (0, 1)


def test_step_time_is_the_published_sum() -> None:
    """Formula of the module's docstring with numbers small enough to do by hand."""
    engine = Engine(
        small(
            t_fix_ms=1.0,
            a_ns_per_pair=1e5,
            k_ns_per_kv_token=1e5,
            per_sequence_us=500,
            token_budget=64,
            kv_tokens=400,
        )
    )
    engine.submit("a", prompt_tokens=20, output_tokens=3, now_ms=0)
    plan = engine.next_step(0)
    assert plan is not None
    assert plan.end_ms == pytest.approx(1 + 20 + 0.1 * 20 * 10 + 0.5)
    engine.finish_step(plan.end_ms)
    engine.slowdown = 2.0
    plan = engine.next_step(100)
    assert plan is not None
    assert plan.end_ms - 100 == pytest.approx(2 * (1 + 10 + 0.1 * 20 + 0.5))


def test_the_second_request_reuses_the_first_ones_blocks_also_of_its_answer() -> None:
    """A chat's next turn repeats prompt and answer; both are in the cache, but the last token is always computed."""
    engine = Engine(small(api_delay_ms=5.0))
    text = bytes(range(40))
    first = engine.submit("1", prompt_tokens=9, output_tokens=8, now_ms=0, block_hashes=block_hashes(text[:17], 4))
    assert drain(engine)[0] == (15.0, "1", 1)
    assert first.cached_tokens == 0
    # 9 + 8 - 1 tokens were computed: four full blocks.
    again = engine.submit("2", prompt_tokens=17, output_tokens=1, now_ms=500, block_hashes=block_hashes(text[:17], 4))
    assert drain(engine, 500) == [(515.0, "2", 1)]
    assert again.cached_tokens == 16
    whole = engine.submit("3", prompt_tokens=16, output_tokens=1, now_ms=900, block_hashes=block_hashes(text[:16], 4))
    drain(engine, 900)
    assert whole.cached_tokens == 12
    stats = engine.stats()
    assert (stats.prefix_queries_tokens_total, stats.prefix_hits_tokens_total) == (42, 28)


def test_blocks_under_computation_are_not_a_hit() -> None:
    """Two equal prompts at once: the second may not read KV that does not exist yet."""
    engine = Engine(small(token_budget=8))
    names = block_hashes(bytes(8), 4)
    engine.submit("a", prompt_tokens=8, output_tokens=2, now_ms=0, block_hashes=names)
    late = engine.submit("b", prompt_tokens=8, output_tokens=2, now_ms=0, block_hashes=names)
    engine.next_step(0)
    assert engine.cached_blocks(names) == 0
    engine.finish_step(10)
    assert engine.cached_blocks(names) == 2
    drain(engine, 10)
    assert late.cached_tokens == 4


def test_the_least_recently_used_prefix_is_thrown_out_and_its_tail_first() -> None:
    """With room for two prompts, the one used longest ago loses blocks, from its end."""
    engine = Engine(small(kv_tokens=32))
    chains = {name: block_hashes(bytes([i]) * 12, 4) for i, name in enumerate("abc")}
    now = 0.0
    for turn, name in enumerate("aba"):
        engine.submit(
            f"{turn}",
            prompt_tokens=13,
            output_tokens=1,
            now_ms=now,
            block_hashes=chains[name],
        )
        now = drain(engine, now)[-1][0]
    engine.submit("new", prompt_tokens=13, output_tokens=1, now_ms=now, block_hashes=chains["c"])
    drain(engine, now)
    assert {n: engine.cached_blocks(c) for n, c in chains.items()} == {"a": 3, "b": 1, "c": 3}


def test_the_order_of_throwing_out_survives_thousands_of_victims() -> None:
    """The pool of idle blocks is copied now and then: a copy in another order would throw out what was used last."""
    engine = Engine(small(kv_tokens=800, token_budget=400))
    names = [[(n, block) for block in range(50)] for n in range(400)]
    now_ms = 0.0
    for n, mine in enumerate(names):
        engine.submit(str(n), prompt_tokens=201, output_tokens=1, now_ms=now_ms, block_hashes=mine)
        now_ms = drain(engine, now_ms)[-1][0]
        assert [engine.cached_blocks(names[k]) for k in range(max(0, n - 2), n + 1)] == [50] * min(3, n + 1)
    assert engine.cached_blocks(names[390]) == 0


def test_the_newest_is_preempted_and_recomputed_without_losing_a_token() -> None:
    """Two answers that outgrow the memory: the newer one waits, is recomputed, and still ends with all its tokens."""
    engine = Engine(small(kv_tokens=32))
    old = engine.submit("old", prompt_tokens=8, output_tokens=17, now_ms=0)
    new = engine.submit("new", prompt_tokens=8, output_tokens=17, now_ms=0)
    seen = drain(engine)
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert [n for _, name, n in seen if name == "new"] == list(range(1, 18))
    ends = {name: at for at, name, _ in seen}
    assert ends["old"] < ends["new"]
    assert engine.stats().preemptions_total == 1
    assert engine.stats().generation_tokens_total == 34


def test_cancel_frees_at_once_even_inside_a_step() -> None:
    """A client that leaves must not hold KV until the end of anything."""
    engine = Engine(small())
    engine.submit("a", prompt_tokens=30, output_tokens=9, now_ms=0)
    engine.submit("b", prompt_tokens=4, output_tokens=1, now_ms=0)
    engine.next_step(0)
    assert engine.cancel("a", 3) is True
    assert engine.kv_usage == 0
    assert engine.cancel("a", 3) is False
    assert engine.finish_step(16) == []
    assert drain(engine, 16) == [(26, "b", 1)]


def test_priority_jumps_the_queue_but_stops_nobody() -> None:
    """vLLM with priority scheduling: a sooner request passes those that wait; by default the number is ignored."""
    for scheduling, order in (("priority", ["low1", "high", "low2"]), ("fcfs", ["low1", "low2", "high"])):
        engine = Engine(small(max_sequences=1), scheduling=scheduling)  # type: ignore[arg-type]
        engine.submit("low1", prompt_tokens=4, output_tokens=2, now_ms=0, priority=10)
        engine.submit("low2", prompt_tokens=4, output_tokens=1, now_ms=0, priority=10)
        engine.next_step(0)
        engine.submit("high", prompt_tokens=4, output_tokens=1, now_ms=1, priority=-5)
        engine.finish_step(10)
        assert [name for _, name, _ in drain(engine, 10)] == order


def test_what_can_never_run_is_refused_when_submitted() -> None:
    """Otherwise it would sit at the head of the queue for ever."""
    engine = Engine(small())
    with pytest.raises(SequenceTooLongError, match="exceed the KV capacity of 64"):
        engine.submit("a", prompt_tokens=60, output_tokens=6, now_ms=0)
    engine.submit("b", prompt_tokens=60, output_tokens=5, now_ms=0)
    with pytest.raises(EngineError, match="already open"):
        engine.submit("b", prompt_tokens=1, output_tokens=1, now_ms=0)
    with pytest.raises(ValueError, match="at least one"):
        engine.submit("c", prompt_tokens=0, output_tokens=1, now_ms=0)
    engine.next_step(0)
    with pytest.raises(EngineError, match="under way"):
        engine.next_step(0)
    engine.finish_step(1)
    with pytest.raises(EngineError, match="no step"):
        engine.finish_step(1)


def test_profiles_scale_and_take_limits() -> None:
    """`--time-scale` divides times only; the fleet's limits override the profile's."""
    base = profile("70b-h100x4")
    fast = base.scaled(2.0)
    assert (fast.t_w_ms, fast.api_delay_ms, fast.kv_tokens) == (7.15, 7.8, 418_000)
    limited = base.limited(token_budget=512, kv_tokens=0)
    assert (limited.token_budget, limited.kv_tokens) == (512, 418_000)
    with pytest.raises(UnknownProfileError, match="known: 32b-a100x2, 32b-h100x2"):
        profile("9000b-toaster")


def test_faster_hardware_is_faster() -> None:
    """The ranking of the profiles is what a placement policy lives on."""

    def run_ms(name: str) -> float:
        engine = Engine(profile(name))
        engine.submit("a", prompt_tokens=4000, output_tokens=50, now_ms=0)
        return drain(engine)[-1][0]

    assert run_ms("8b-h100") < run_ms("8b-a100") < run_ms("8b-l40s")
    assert run_ms("70b-h100x4") < run_ms("70b-a100x4")


REQUESTS = st.tuples(
    st.integers(1, 40),  # prompt
    st.integers(1, 24),  # output
    st.integers(0, 2),  # which prefix family
    st.integers(0, 200),  # arrival
    st.one_of(st.none(), st.integers(0, 400)),  # cancelled at
    st.integers(-1, 1),  # priority
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    kv_tokens=st.sampled_from([64, 100, 400]),
    budget=st.sampled_from([1, 3, 16, 64]),
    slots=st.sampled_from([1, 3, 256]),
    api_delay_ms=st.sampled_from([0.0, 7.0]),
    scheduling=st.sampled_from(["fcfs", "priority"]),
)
def test_any_run_conserves_blocks_work_and_tokens(
    requests: list[tuple[int, int, int, int, int | None, int]],
    kv_tokens: int,
    budget: int,
    slots: int,
    api_delay_ms: float,
    scheduling: str,
) -> None:
    """Whatever arrives and leaves: books balance, an engine with work never idles, nothing is invented or lost."""
    engine = Engine(
        small(
            kv_tokens=kv_tokens,
            token_budget=budget,
            max_sequences=slots,
            api_delay_ms=api_delay_ms,
        ),
        scheduling=scheduling,  # type: ignore[arg-type]
    )
    events: list[tuple[float, int, str, int]] = []
    for index, (prompt, output, _, arrival, leaves, _) in enumerate(requests):
        if prompt + output <= kv_tokens:
            heapq.heappush(events, (arrival, index, "submit", index))
            if leaves is not None:
                heapq.heappush(events, (arrival + leaves, index, "cancel", index))
    submitted = dict.fromkeys(e[3] for e in events if e[2] == "submit")
    handles: dict[int, object] = {}
    tokens: dict[str, int] = {}
    ever_computed: set[object] = set()
    now = 0.0
    while True:
        while events and events[0][0] <= now:
            at, _, what, index = heapq.heappop(events)
            prompt, output, family, _, _, priority = requests[index]
            if what == "submit":
                text = bytes([family]) * prompt + bytes([family]) * output
                handles[index] = engine.submit(
                    str(index),
                    prompt_tokens=prompt,
                    output_tokens=output,
                    now_ms=at,
                    block_hashes=block_hashes(text, 4),
                    priority=priority,
                )
            else:
                engine.cancel(str(index), at)
            engine.check()
        plan = engine.next_step(now)
        if plan is None:
            assert engine.waiting == engine.running == 0, "an engine with work stands still"
            times = [t for t in (engine.ready_at_ms, events[0][0] if events else None) if t is not None]
            if not times:
                break
            now = max(now, min(times))
            continue
        assert sum(n for _, n in plan.prefills) + len(plan.decodes) <= budget
        assert len(plan.prefills) + len(plan.decodes) <= slots
        assert plan.end_ms >= now + 10
        for seq in [*plan.decodes, *(s for s, _ in plan.prefills)]:
            # What the plan counts as held must have been computed by somebody before.
            assert set(seq._hashes[: seq.computed_tokens // 4]) <= ever_computed
        inside = [e for e in events if e[0] < plan.end_ms and e[2] == "cancel" and e[3] in handles]
        for event in inside:
            events.remove(event)
            engine.cancel(str(event[3]), event[0])
        heapq.heapify(events)
        now = plan.end_ms
        for seq in engine.finish_step(now):
            assert seq.phase in (Phase.RUNNING, Phase.FINISHED)
            assert seq.first_token_ms >= seq.scheduled_ms >= seq.submitted_ms + api_delay_ms
            tokens[seq.id] = tokens.get(seq.id, 0) + 1
            assert tokens[seq.id] == seq.generated
            if seq.phase is Phase.RUNNING:
                assert seq.computed_tokens == seq.prompt_tokens + seq.generated - 1
        for seq in [*plan.decodes, *(s for s, _ in plan.prefills)]:
            done = seq.prompt_tokens + seq.generated - 1 if seq.phase is Phase.FINISHED else seq.computed_tokens
            ever_computed.update(seq._hashes[: done // 4])
        engine.check()
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.arriving == stats.blocks_used == 0
    assert stats.finished_total + stats.cancelled_total == len(submitted)
    assert stats.generation_tokens_total == sum(tokens.values())
    assert stats.blocks_idle == stats.blocks_cached
    for index, seq in handles.items():
        if seq.phase is Phase.FINISHED:  # type: ignore[attr-defined]
            assert tokens[str(index)] == requests[index][1]
    engine.clear_cache()
    assert engine.stats().blocks_free == engine.blocks_total


def play(jobs: list[tuple[float, int, int]], cancels: dict[int, float], profile_: Profile, *, runs: bool) -> object:
    """Drive an engine through submissions and cancellations; ends by id, and what it counted."""
    engine = Engine(profile_)
    todo: list[tuple[float, int, int]] = [(at_ms, 0, n) for n, (at_ms, _, _) in enumerate(jobs)]
    todo += [(at_ms, 1, n) for n, at_ms in cancels.items()]
    todo.sort()
    ends: dict[str, tuple[float, float, int]] = {}
    now_ms = 0.0
    while True:
        step = engine.stepping
        due = step.end_ms if step is not None else engine.ready_at_ms
        if todo and (due is None or todo[0][0] < due):
            now_ms, kind, n = todo.pop(0)
            if kind == 0:
                _, prompt, output = jobs[n]
                engine.submit(str(n), prompt_tokens=prompt, output_tokens=output, now_ms=now_ms)
            else:
                engine.cancel(str(n), now_ms)
        elif due is None:
            return ends, engine.stats()
        else:
            now_ms = due
            if step is not None:
                for seq in engine.finish_step(now_ms):
                    if seq.phase is Phase.FINISHED:
                        ends[seq.id] = (round(now_ms, 6), round(seq.first_token_ms, 6), seq.preemptions)
            engine.check()
            if runs:
                engine.next_run(now_ms)
            else:
                engine.next_step(now_ms)


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 900), st.integers(1, 40), st.integers(1, 60)),
        min_size=1,
        max_size=9,
        unique_by=lambda j: j[0],
    ),
    cancelled=st.dictionaries(st.integers(0, 8), st.floats(0.5, 1500), max_size=2),
    kv_tokens=st.sampled_from([104, 160, 400]),
)
def test_runs_of_equal_steps_give_what_single_steps_give(
    jobs: list[tuple[float, int, int]], cancelled: dict[int, float], kv_tokens: int
) -> None:
    """The simulator skips equal decode steps; were a run not the same as its steps, its verdicts would be its own."""
    made = small(kv_tokens=kv_tokens, k_ns_per_kv_token=3000.0, api_delay_ms=1.5, per_sequence_us=100.0)
    # Distinct moments: what happens first at one and the same instant is the driver's choice, not the engine's.
    jobs = sorted((at_ms + 0.000137 * n, prompt, output) for n, (at_ms, prompt, output) in enumerate(jobs))
    cancels = {n: max(at_ms, jobs[n][0] + 0.31) for n, at_ms in cancelled.items() if n < len(jobs)}
    assert play(jobs, cancels, made, runs=True) == play(jobs, cancels, made, runs=False)


def test_a_run_is_one_plan_until_somebody_arrives() -> None:
    """Without runs, every token of an answer costs the simulator an event."""
    engine = Engine(small(kv_tokens=400))
    engine.submit("a", prompt_tokens=4, output_tokens=50, now_ms=0)
    engine.next_run(0)
    engine.finish_step(10)
    run = engine.next_run(10)
    assert run is not None
    assert (run.steps, run.end_ms) == (49, 500)
    engine.submit("b", prompt_tokens=4, output_tokens=2, now_ms=123)
    assert (run.steps, run.end_ms) == (12, 130)
    engine.settle(57)
    assert (run.steps, run.start_ms) == (8, 50)
    assert engine.stats().generation_tokens_total == 5
    assert engine.cancel("a", 57)
    assert run.end_ms == 60
    assert engine.finish_step(60) == []
    engine.check()


def test_profiles_rank_as_their_hardware_does() -> None:
    """A slip in one constant would make an older accelerator the faster one, and every plan with it wrong."""

    def prefill_ms(name: str) -> float:
        p = profile(name)
        return p.t_fix_ms + max(p.t_w_ms, p.c_us_per_token * p.token_budget * 1e-3)

    def decode_ms(name: str) -> float:
        p = profile(name)
        return p.t_fix_ms + p.t_w_ms + p.k_ns_per_kv_token * 32 * 4000 * 1e-6

    for size in ("8b-{}", "32b-{}x2", "70b-{}x4"):
        a100, h100, h200 = (size.format(gpu) for gpu in ("a100", "h100", "h200"))
        assert prefill_ms(a100) > prefill_ms(h100) == prefill_ms(h200)
        assert decode_ms(a100) > decode_ms(h100) > decode_ms(h200)
        assert profile(h200).kv_tokens > profile(h100).kv_tokens
    assert decode_ms("8b-l40s") > decode_ms("8b-a100")
    assert profile("480b-h200x8").t_w_ms > profile("70b-h200x4").t_w_ms
