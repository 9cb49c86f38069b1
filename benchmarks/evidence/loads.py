"""How much load the reference policy carries: stable load and knee, by which other parts name their loads."""

from typing import Any

from benchmarks.evidence import Cell, Compare, Curves, Figures, Part, Quick, simulated
from benchmarks.evidence._simulated import load
from tokenfleet.simulator import experiment

POLICY = "llm-d//none"
#: what the searches found, for the cells that look at those speeds again; changed when a search finds otherwise
SPEEDS = {"70b": (1.766, 1.832), "8b": (5.71, 5.89)}


def searched(seed: int, *, scenario: str, lowest: float, highest: float, seeds: list[int]) -> Figures:
    """A search over speeds; all seeds are looked at for each, so `seed` itself changes nothing."""
    found = experiment.search(load(scenario), POLICY, seeds, lowest=lowest, highest=highest, processes=1)
    speeds = {float(speed): values for speed, values in found.tried.items()}
    worst = {speed: max(values) for speed, values in speeds.items() if None not in values}  # type: ignore[type-var]  # no None
    metrics: dict[str, float | None] = {"stable": found.stable, "knee": found.knee}
    for word, speed in (("stable", found.stable), ("knee", found.knee)):
        for name, at in ((word, speed), (f"half_of_{word}", None if speed is None else speed / 2)):
            near = None if at is None else min(worst, key=lambda tried: abs(tried - at), default=None)
            value = None if near is None else worst[near]
            metrics[f"{name}_ttft_p95_s"] = None if value is None else value / 1000.0
    points = [(speed, value / 1000.0) for speed, value in sorted(worst.items()) if value is not None]
    return Figures(metrics=metrics, series={"P95 of TTFT, worst seed": points})


def _again(name: str) -> list[Cell]:
    stable, knee = SPEEDS[name]
    speeds = {"stable": stable, "half of stable": stable / 2, "knee": knee, "half of knee": knee / 2}
    return [
        Cell(
            name=f"{name} {word}",
            run=simulated,
            args={"scenario": f"conversation-{name}", "policy": POLICY, "speed": round(speed, 4)},
        )
        for word, speed in speeds.items()
    ]


def _compare(name: str) -> list[Compare]:
    same: dict[str, Any] = {"metric": "ttft_p95_s", "expect": 1}
    return [
        Compare(
            name=f"{name}: P95 at the stable load over that at half of it",
            ours=f"{name} stable",
            theirs=f"{name} half of stable",
            at_most=2.0,
            **same,
        ),
        Compare(
            name=f"{name}: P95 at the knee over that at half of it",
            ours=f"{name} knee",
            theirs=f"{name} half of knee",
            at_least=4.0,
            **same,
        ),
    ]


FINDINGS = ""

PART = Part(
    title="Stable load and knee of the reference policy",
    question="""
*Stable load*: the highest speed of the trace (within 2%) at which P95 TTFT is at most three times that at half the
speed and the backlog does not grow in the second half of the window, for all seeds. *Knee*: the lowest speed (within
2%) with a P95 of at least five times that at half the speed, for any seed. TTFT is over offered requests.

Both for llm-d's weights (3, 2, 2), dispatched at once and first come first served in the engine (`llm-d//none`), on the
de-quantised Mooncake conversation trace with 70B × 8 and 8B × 16 instances; speeds are multiples of the trace's own.

A search bisects over speeds with three seeds; the other cells run the speeds that it found, and half of each, again.
""",
    cells=(
        Cell(
            name="70b search",
            run=searched,
            args={"scenario": "conversation-70b", "lowest": 1.5, "highest": 2.1, "seeds": [1, 2, 3]},
            seeds=(0,),
        ),
        Cell(
            name="8b search",
            run=searched,
            args={"scenario": "conversation-8b", "lowest": 5.0, "highest": 6.5, "seeds": [1, 2, 3]},
            seeds=(0,),
        ),
        *_again("70b"),
        *_again("8b"),
    ),
    seeds=(1, 2, 3),
    compare=(*_compare("70b"), *_compare("8b")),
    columns=(
        ("stable", "stable load ×", 1.0, 3),
        ("knee", "knee ×", 1.0, 3),
        ("ttft_p95_s", "TTFT p95 s", 1.0, 2),
        ("ttft_p50_s", "p50 s", 1.0, 2),
        "compliance",
        "unfinished_share",
    ),
    plots=(
        Curves(
            title="P95 of TTFT over speed, 70B × 8",
            curves=(("70b search", "P95 of TTFT, worst seed"),),
            x="speed of the trace",
            y="seconds",
        ),
        Curves(
            title="P95 of TTFT over speed, 8B × 16",
            curves=(("8b search", "P95 of TTFT, worst seed"),),
            x="speed of the trace",
            y="seconds",
        ),
    ),
    quick=Quick(cells=("70b knee", "70b half of knee"), seeds=3),
    traces=("mooncake-conversation",),
    findings=FINDINGS,
)
