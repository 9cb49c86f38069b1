"""The simulator predicts a real engine, and ranks policies as real engines behind the real services do."""

from pathlib import Path

import msgspec

from benchmarks.evidence import Bars, Cell, Compare, Goal, Part, Quick
from benchmarks.fidelity import fit, rank

DATA = Path(__file__).parents[1] / "fidelity" / "data"
LOAD = rank.Load(rate_per_s=5.0, seconds=60.0)
MODEL = "tiny"
#: of the live runs
SEEDS = (1, 2, 3, 4, 5)


def predicted(seed: int, *, file: str, again: bool = False, swapped: bool = False) -> dict[str, float | None]:
    """Errors on the half that was held out, with the committed constants or such as are fitted `again`.

    `swapped`: fitted to the other half, judged on the one that the committed ones were fitted to.
    """
    saved = fit.load(DATA / file)
    segments = saved.segments
    if swapped:
        for segment in segments:
            segment.half = "held" if segment.half == "fit" else "fit"
    if again or swapped:
        found = fit.fit(segments, saved.limits, name="fitted", say=lambda _text: None)
    else:
        assert saved.fitted is not None
        found = fit.judge(segments, saved.limits, saved.fitted.profile)
    held = found.held
    return {
        "requests": float(held.requests),
        "ttft_error": held.ttft_median,
        "ttft_error_p90": held.ttft_p90,
        "tpot_error": held.tpot_median,
        "tpot_error_p90": held.tpot_p90,
        "cached_tokens_measured": found.cached_measured,
        "cached_tokens_predicted": found.cached_predicted,
    }


def ranked(seed: int, *, policy: str, live: bool) -> dict[str, float | None]:
    """A run of a policy: as it was measured live, or simulated with the constants that were fitted."""
    if live:
        kept = msgspec.json.decode((DATA / "rank-vllm-cpu.json").read_bytes(), type=rank.Ranking)
        one = next(figure for figure in kept.live if (figure.policy, figure.seed) == (policy, seed))
    else:
        saved = fit.load(DATA / "vllm-cpu-beside-another.json.gz")
        assert saved.fitted is not None
        profile, limits = saved.fitted.profile, saved.limits
        text = rank.fleet_text(
            ["http://a", "http://b"], MODEL, profile, "", max_model_len=limits.max_model_len, simulated=True
        )
        one = rank.simulated(
            policy,
            seed,
            rank.draw(LOAD, seed),
            LOAD,
            text=text,
            model=MODEL,
            profile=profile,
            scheduling=limits.scheduling,
        )
    return {"ttft_p95_ms": one.ttft_p95_ms, "ttft_p50_ms": one.ttft_p50_ms, "hit": one.hit, "requests": one.requests}


ALONE, BESIDE = "vllm-cpu-alone.json.gz", "vllm-cpu-beside-another.json.gz"
_WAYS = (("live", True), ("simulated", False))

PART = Part(
    title="How far the simulator can be believed",
    question="""A real vLLM on a CPU core was measured through its API (`benchmarks/fidelity`; method and all figures in
[fidelity.md](../fidelity.md)): to half of the requests the engine model's constants were fitted, the other half is
predicted. Then two of them served behind the real services, five runs under each of three policies, and the simulation
ran the same arrivals with the fitted constants. What was measured is committed and read here; predictions, fits and
simulations are made anew.""",
    cells=(
        Cell(name="engine alone", run=predicted, args={"file": ALONE}, seeds=(0,)),
        Cell(name="engine alone, fitted again", run=predicted, args={"file": ALONE, "again": True}, seeds=(0,)),
        Cell(name="engine alone, halves swapped", run=predicted, args={"file": ALONE, "swapped": True}, seeds=(0,)),
        Cell(name="engine beside a busy one", run=predicted, args={"file": BESIDE}, seeds=(0,)),
        *(
            Cell(name=f"{policy}, {way}", run=ranked, args={"policy": policy, "live": live})
            for policy in rank.POLICIES
            for way, live in _WAYS
        ),
    ),
    seeds=SEEDS,
    compare=tuple(
        Compare(
            name=f"P95 of TTFT, TokenPilot against {policy}, {way}",
            metric="ttft_p95_ms",
            ours=f"tokenfleet, {way}",
            theirs=f"{policy}, {way}",
            expect=-1,
        )
        for policy in ("round-robin", "least-requests")
        for way, _ in _WAYS
    )
    + tuple(
        Compare(
            name=f"P95 of TTFT, least requests against round robin, {way}",
            metric="ttft_p95_ms",
            ours=f"least-requests, {way}",
            theirs=f"round-robin, {way}",
            expect=0,
        )
        for way, _ in _WAYS
    ),
    goals=tuple(
        Goal(name=f"{what} error, {cell}", cell=cell, metric=metric, at_most=0.2)
        for cell in ("engine alone", "engine alone, fitted again", "engine alone, halves swapped")
        for what, metric in (("TTFT", "ttft_error"), ("TPOT", "tpot_error"))
    ),
    columns=(
        ("requests", "requests", 1.0, 0),
        ("ttft_error", "TTFT error, median", 1.0, 3),
        ("ttft_error_p90", "p90", 1.0, 3),
        ("tpot_error", "TPOT error, median", 1.0, 3),
        ("tpot_error_p90", "p90", 1.0, 3),
        ("cached_tokens_measured", "cached tokens per request", 1.0, 0),
        ("cached_tokens_predicted", "predicted", 1.0, 0),
        ("ttft_p95_ms", "TTFT p95 ms", 1.0, 0),
        ("ttft_p50_ms", "p50 ms", 1.0, 0),
        ("hit", "prompt tokens cached", 1.0, 2),
    ),
    plots=(
        Bars(
            title="TTFT P95 by policy, live and simulated",
            metric="ttft_p95_ms",
            cells=tuple(f"{policy}, {way}" for policy in rank.POLICIES for way, _ in _WAYS),
            unit="ms",
        ),
    ),
    quick=Quick(seeds=5),
    findings="""The engine model predicts the engine that had a core to itself within the goal, whichever half the
constants come from, and predicts what is cached. Beside a busy neighbour on the same two cores no constants hold for
long, and errors grow.

Both live and simulated, TokenPilot's P95 is lower than either baseline's, and round robin and least requests cannot be
told apart. Absolute times are not predicted there: the machine that was measured did other work too.""",
)
