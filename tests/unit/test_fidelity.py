"""The fidelity benchmark's own honesty: it finds constants that are known, and says so when a prediction is wrong."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from benchmarks.fidelity import fit, parity, rank
from benchmarks.fidelity.sending import Sent, encode, send_all

from tokenfleet import fleet as fleets
from tokenfleet.engine_model import Engine, Profile
from tokenfleet.replay.traces import Trace
from tokenfleet.simulator import scenario as scenarios
from tokenfleet.simulator.errors import ScenarioError
from tokenfleet.simulator.experiment import Estimate
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import AgentSpec, BusSpec, EngineSpec, Info, Scenario, Source
from tokenfleet.simulator.world import World
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.placement import PlacementAssigned

#: a small slow engine: no built-in profile is near it
TRUE = Profile(
    name="true",
    t_fix_ms=3.0,
    t_w_ms=1.0,
    c_us_per_token=150.0,
    a_ns_per_pair=40.0,
    k_ns_per_kv_token=300.0,
    per_sequence_us=200.0,
    api_delay_ms=8.0,
    kv_tokens=16_384,
    token_budget=512,
    max_sequences=8,
    block_tokens=32,
)
LIMITS = fit.Limits(
    token_budget=512, max_sequences=8, block_tokens=32, kv_tokens=16_384, max_model_len=4096, scheduling="fcfs"
)


def acted(true: Profile = TRUE, noise: Callable[[int], float] = lambda _n: 1.0) -> list[fit.Segment]:
    """Segments as an engine with these constants would have answered them."""
    found: list[fit.Segment] = []
    engine = Engine(true)
    zero_ms = 0.0
    for half, seed in (("fit", 1), ("held", 500)):
        segments = [fit.lone(half, seed, LIMITS), *fit.bursts(half, seed + 1, LIMITS)]  # type: ignore[arg-type]
        segments.append(fit.opened(half, seed + 9, LIMITS, 3.0, 15.0))  # type: ignore[arg-type]
        for segment in segments:
            at_ms = 0.0
            for index, one in enumerate(segment.wanted):
                at_ms = at_ms + 1500.0 if one.after_last_ms is not None else one.at_ms
                sent = Sent(index=index, body=b"", at_ms=at_ms, sent_ms=at_ms, output_tokens=one.output)
                sent.prompt_tokens = one.shared + one.own
                segment.sent.append(sent)
            asked = fit.Replay([segment], LIMITS).asked[0]
            into = [fit.Predicted() for _ in asked]
            zero_ms = fit.drive(engine, asked, into, zero_ms, f"{half} {len(found)}") + 100.0
            for sent, one_said in zip(segment.sent, into, strict=True):
                factor = noise(sent.index)
                sent.first_ms = sent.sent_ms + (one_said.first_ms - sent.sent_ms) * factor
                sent.last_ms = sent.first_ms + (one_said.last_ms - one_said.first_ms) * factor
                sent.cached_tokens = one_said.cached_tokens
            found.append(segment)
    return found


def test_constants_that_are_known_are_found() -> None:
    """A fit that predicts by luck would miss the constants; measured times carry 10% of noise."""
    segments = acted(noise=lambda n: (0.9, 1.0, 1.1)[n % 3])
    found = fit.fit(segments, LIMITS, name="mine", rounds=260, say=lambda _text: None)
    assert found.held.ttft_median < 0.13
    assert found.held.tpot_median < 0.13
    assert found.profile.c_us_per_token == pytest.approx(TRUE.c_us_per_token, rel=0.25)
    assert found.profile.api_delay_ms == pytest.approx(TRUE.api_delay_ms, rel=0.4)
    assert found.cached_measured == pytest.approx(found.cached_predicted, rel=0.02)


def test_the_true_constants_predict_exactly() -> None:
    """The drive through the engine model is the measurement's own: with no noise there is no error."""
    found = fit.judge(acted(), LIMITS, TRUE)
    assert found.held.ttft_p90 == pytest.approx(0.0, abs=1e-9)
    assert found.held.tpot_p90 == pytest.approx(0.0, abs=1e-9)


def test_a_wrong_engine_is_not_called_fitted() -> None:
    """Twice as fast as measured: the error is 50%, not within the goal of 20%."""
    found = fit.judge(acted(), LIMITS, TRUE.scaled(2.0))
    assert found.held.ttft_median > 0.4
    assert found.held.tpot_median > 0.4
    assert set(found.held_by_kind) == {"lone", "burst", "open"}


def test_halves_share_no_prompt() -> None:
    """A held-out request that hit a fitted one's cache would not be held out."""
    segments = acted()
    openings: dict[str, set[tuple[int, ...]]] = {"fit": set(), "held": set()}
    for segment in segments:
        openings[segment.half] |= {tuple(segment.tokens(n)[:8]) for n in range(len(segment.wanted))}
    assert openings["fit"]
    assert not openings["fit"] & openings["held"]


SCENARIO = """
[scenario]
name = "mine"
duration_s = 2
[fleet.fleet]
name = "f"
default_class = "chat"
[fleet.models.m]
versions = ["1"]
default_version = "1"
max_model_len = 4096
[fleet.sites.a]
zone = "eu"
entry = true
[fleet.classes.chat]
ttft_ms = 1000
[fleet.tenants.studio]
zones = ["*"]
classes = ["chat"]
[[pools]]
site = "a"
model = "m"
version = "1"
profile = "mine"
count = 1
[[workload]]
trace = "builtin"
rate_per_s = 5
model = "m"
service_class = "chat"
tenant = "studio"
"""


def test_what_is_printed_can_be_simulated() -> None:
    """A user fits an engine and pastes the profile into a scenario."""
    printed = fit.as_toml(msgspec.structs.replace(TRUE, name="mine"), "fcfs")
    made = scenarios.parse((SCENARIO + printed).encode())
    assert msgspec.structs.replace(made.profiles["mine"], block_tokens=32, name="true") == TRUE
    assert made.engines.block_tokens == 32
    with pytest.raises(ScenarioError, match="no profile 'mine'"):
        scenarios.parse(SCENARIO.encode())
    with pytest.raises(ScenarioError, match="built-in"):
        scenarios.parse((SCENARIO + printed.replace("[profiles.mine]", "[profiles.8b-a100]")).encode())
    with pytest.raises(ScenarioError, match="c_us_per_token must be positive"):
        scenarios.parse((SCENARIO + printed.replace("c_us_per_token = ", "c_us_per_token = -")).encode())


# --------------------------------------------------------------------------------------------- sending


async def _serve(handle: Callable[[web.Request], AsyncIterator[bytes]]) -> tuple[web.AppRunner, str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-tokenfleet-request-id": "r-1"})
        await response.prepare(request)
        async for data in handle(request):
            await response.write(data)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}/v1/completions"


def _said(**what: object) -> bytes:
    return f"data: {json.dumps(what)}\n\n".encode()


async def test_tokens_are_timed_and_counted_by_usage() -> None:
    """vLLM puts several tokens into one event under load: usage counts, events do not."""

    async def handle(_request: web.Request) -> AsyncIterator[bytes]:
        yield _said(choices=[{"text": " a"}])
        await asyncio.sleep(0.05)
        yield _said(choices=[{"text": " b c", "finish_reason": "length"}])
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        yield _said(choices=[], usage=usage, metrics={"time_to_first_token_ms": 1.5})
        yield b"data: [DONE]\n\n"

    runner, url = await _serve(handle)
    try:
        requests = [Sent(index=n, body=encode({}), at_ms=20.0 * n) for n in range(2)]
        await send_all(url, requests)
    finally:
        await runner.cleanup()
    for one in requests:
        assert one.problem == ""
        assert (one.output_tokens, one.prompt_tokens, one.cached_tokens) == (3, 9, 4)
        assert one.engine_ttft_ms == 1.5
        assert one.request_id == "r-1"
        assert one.ttft_ms is not None
        assert one.tpot_ms is not None
        assert one.tpot_ms >= 20.0
    assert requests[1].sent_ms >= 20.0


async def test_what_broke_off_is_no_answer() -> None:
    """A stream without an end, and an error inside a stream of status 200."""

    async def cut(_request: web.Request) -> AsyncIterator[bytes]:
        yield _said(choices=[{"text": " a"}])

    async def error(_request: web.Request) -> AsyncIterator[bytes]:
        yield _said(error={"message": "queue is full"})
        yield b"data: [DONE]\n\n"

    problems = []
    for handle in (cut, error):
        runner, url = await _serve(handle)
        try:
            requests = [Sent(index=0, body=encode({}))]
            await send_all(url, requests)
        finally:
            await runner.cleanup()
        problems.append(requests[0].problem)
    assert problems == ["the stream ended early", "queue is full"]


# --------------------------------------------------------------------------------------------- ranking


def figure(policy: str, seed: int, p95_ms: float) -> rank.Figure:
    """One run."""
    return rank.Figure(policy=policy, seed=seed, requests=100, failed=0, ttft_p50_ms=1.0, ttft_p95_ms=p95_ms, hit=0.5)


def ranked(live: dict[str, list[float]], simulated: dict[str, float]) -> rank.Ranking:
    """Runs with these P95."""
    return rank.compare(
        rank.Load(rate_per_s=1.0, seconds=1.0),
        [figure(name, n, value) for name, values in live.items() for n, value in enumerate(values)],
        [figure(name, n, value) for name, value in simulated.items() for n in range(3)],
    )


def test_only_a_measured_order_is_held_against_the_simulation() -> None:
    """Intervals that overlap decide nothing; where they separate, the simulation must agree."""
    live = {"a": [100.0, 101.0, 102.0], "b": [200.0, 202.0, 204.0], "c": [190.0, 203.0, 216.0]}
    same = ranked(live, {"a": 10.0, "b": 30.0, "c": 20.0})
    assert {(p.better, p.worse): p.separate for p in same.pairs} == {
        ("a", "b"): True,
        ("a", "c"): True,
        ("b", "c"): False,
    }
    assert same.holds
    assert not ranked(live, {"a": 25.0, "b": 30.0, "c": 20.0}).holds
    assert "NOT as simulated" in rank.table(ranked(live, {"a": 25.0, "b": 30.0, "c": 20.0}))


def test_one_run_separates_nothing() -> None:
    """An anecdote has no interval."""
    once = ranked({"a": [100.0], "b": [900.0]}, {"a": 30.0, "b": 10.0})
    assert [pair.separate for pair in once.pairs] == [False]
    assert once.holds


def test_who_got_no_token_is_the_slowest() -> None:
    """A policy that fails one request in ten must not win by its completed ones."""
    assert rank.judged("p", 1, [10.0] * 90 + [None] * 10, None).ttft_p95_ms is None
    assert rank.judged("p", 1, [10.0] * 99 + [None], None).ttft_p95_ms == 10.0
    never = ranked({"a": [1.0, 1.0, 1.0]}, {"a": 1.0}).rows[0]
    assert never.live_p95_ms == Estimate(1.0, 0.0)


def test_letters_that_never_merge(tmp_path: Path) -> None:
    """A prompt of N letters must be N tokens, or the simulation is told another length than the engine sees."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the QUICK brown fox jumps over the LAZY dog " * 20], trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    alphabet = rank.Alphabet(path)
    text = alphabet.text("any", 500)
    assert alphabet.count(text) == 500
    assert text == alphabet.text("any", 500)
    assert text != alphabet.text("other", 500)


def test_the_simulation_prefers_whoever_keeps_prefixes() -> None:
    """Twelve documents, caches for six: round robin thrashes, TokenPilot divides them up."""
    load = rank.Load(rate_per_s=6.0, seconds=25.0, warmup_s=5.0, documents=8, shared_tokens=1536)
    profile = msgspec.structs.replace(TRUE, kv_tokens=10_240)
    text = rank.fleet_text(["http://a", "http://b"], "m", profile, "", max_model_len=4096, simulated=True)
    found = {
        policy: rank.simulated(
            policy, 1, rank.draw(load, 1), load, text=text, model="m", profile=profile, scheduling="fcfs"
        )
        for policy in rank.POLICIES
    }
    assert found["tokenfleet"].hit is not None
    assert found["round-robin"].hit is not None
    assert found["tokenfleet"].hit > found["round-robin"].hit + 0.1
    ours, theirs = found["tokenfleet"].ttft_p95_ms, found["round-robin"].ttft_p95_ms
    assert ours is not None
    assert theirs is not None
    assert ours < theirs


# --------------------------------------------------------------------------------------------- parity


def acted_live(load: parity.Load, *, late_ms: float = 0.5) -> parity.LiveRun:
    """A live run as the simulator plays it: what a fleet that is exactly as simulated would leave."""
    trace = Trace(name="parity", rows=parity.rows(load), block_tokens=parity.BLOCK_TOKENS)
    scenario = Scenario(
        info=Info(name="parity"),
        fleet=fleets.parse(parity.fleet_text(load).encode()),
        sources=(Source(trace="parity", tenant=parity.TENANT),),
        traces=(trace,),
        bus=BusSpec(hop_ms=0.5),
        agents=AgentSpec(late_ms=late_ms),
        engines=EngineSpec(scheduling="fcfs"),
    )
    world = World(scenario, choose("tokenfleet"), 7)
    heard: list[parity.Heard] = []
    for node in world.bus.nodes.values():
        before = node.on_publish

        def note(event: Event, before: Callable[[Event], None] | None = before) -> None:
            heard.append(parity.Heard(world.loop.now_ms, event))
            if before is not None:
                before(event)

        node.on_publish = note
    run = world.run()
    world.check()
    return parity.LiveRun(load=load, records=run.records, heard=heard, lag_ms=0.0)


LOAD = parity.Load(seconds=25.0, warmup_s=2.0)


def test_a_fleet_exactly_as_simulated_has_parity() -> None:
    """What is left then is the comparison's own: ids, ties, calibration."""
    run = acted_live(LOAD)
    found = parity.compare(parity.decode(parity.encode(run)))
    assert found.requests > 80
    assert len({one.live for one in found.followed.decisions}) == len(LOAD.profiles)
    assert (found.followed.same, found.free.same) == (1.0, 1.0)
    assert all(abs(one.error) < 0.001 for one in found.ttft.values())
    assert found.reached
    assert "followed" in parity.table(found)


def test_histories_part_where_decisions_hardly_do() -> None:
    """Reports that are 50 ms older than the comparison believes: a tie falls otherwise, and sessions follow it."""
    found = parity.compare(acted_live(LOAD, late_ms=50.0))
    assert found.followed.same >= 0.97
    assert found.free.same <= found.followed.same
    assert all(one.gap < parity.GAP_MAX for one in found.followed.others)


def test_decisions_made_otherwise_are_found() -> None:
    """A live fleet that sends every third request to the next instance does not decide as simulated."""
    run = acted_live(LOAD)
    names = sorted(fleets.parse(parity.fleet_text(LOAD).encode()).sites["a"].instances)
    moved = []
    for n, one in enumerate(run.heard):
        event = one.event
        if isinstance(event, PlacementAssigned) and n % 3 == 0:
            other = names[(names.index(event.instance) + 1) % len(names)]
            event = msgspec.structs.replace(event, instance=other)
        moved.append(parity.Heard(one.stored_ms, event))
    run.heard = moved
    found = parity.compare(run)
    assert found.followed.same < 0.9
    assert found.free.same < 0.9
    assert max(one.gap for one in found.followed.others) > parity.GAP_MAX
    assert not found.reached


def test_a_live_run_that_lost_decisions_is_no_run() -> None:
    """A stream that was cut must not pass for parity of what is left."""
    run = acted_live(LOAD)
    run.heard = [one for n, one in enumerate(run.heard) if n % 2 or not isinstance(one.event, PlacementAssigned)]
    with pytest.raises(parity.ParityError, match="no decision"):
        parity.compare(run)


def test_agents_of_undeclared_instances_know_no_rate() -> None:
    """A live agent does not know how fast an engine is that nobody described; a simulated one did."""
    for declared in (True, False):
        load = parity.Load(seconds=1.0, declared=declared)
        for says in (True, False):
            scenario = Scenario(
                info=Info(name="rates"),
                fleet=fleets.parse(parity.fleet_text(load).encode()),
                sources=(Source(trace="parity", tenant=parity.TENANT),),
                traces=(Trace(name="parity", rows=parity.rows(load), block_tokens=parity.BLOCK_TOKENS),),
                agents=AgentSpec(declare_rates=says),
            )
            world = World(scenario, choose("tokenfleet"), 1)
            rates = {one.report(0.0, 0.0).prefill_tokens_per_s is None for one in world.instances.values()}
            assert rates == {not (declared or says)}
