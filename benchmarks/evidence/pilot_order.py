"""TokenPilot's choice alone: everybody has our holds and our order, only where a request goes differs."""

from typing import Any

from benchmarks.evidence import Bars, Cell, Compare, Part, Quick
from benchmarks.evidence._pilot import agents, conversation
from benchmarks.evidence.pilot import AGENTS, KNEE, STABLE, WINDOW

POLICIES = {"ours": "tokenfleet", "3,2,2": "llm-d+queue", "lmetric": "lmetric+queue", "j": "j+queue"}
#: long conversations beside short chats and code completion, on the same eight instances
MIXED: list[dict[str, Any]] = [
    {
        "trace": trace, "speed": speed, "tenant": "all", "model": "m",
        "class_rule": "short<=4096,medium<=16384,long<=65536,huge",
    }
    for trace, speed in (("mooncake-conversation", 1.3), ("azure2023-conv", 1.0), ("azure2023-code", 1.0))
]  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "stable": {"speed": STABLE, "overrides": WINDOW},
    "knee": {"speed": KNEE, "overrides": WINDOW},
    "mixed": {"speed": 1.0, "overrides": {**WINDOW, "workload": MIXED}},
}

FINDINGS = ""

PART = Part(
    title="TokenPilot's choice alone: everybody with our ordering",
    question="""
The baselines' rules inside our holds, offers and releases (`+queue`), so that only the choice of the instance
differs: weights (3, 2, 2), LMetric's tokens times requests, and the rule J that ours began with. Loads and slices
as in the part `pilot`, and a mixed workload: Mooncake's conversations at speed 1.3 with Azure's chats and code
completions of 2023 at their own, on the same eight instances.
""",
    cells=tuple(
        Cell(name=f"{name}, {place}", run=conversation, args={"policy": policy, **args})
        for place, args in PLACES.items()
        for name, policy in POLICIES.items()
    )
    + tuple(
        Cell(name=f"{name}, agents", run=agents, args={"policy": policy, **AGENTS["agents"]})
        for name, policy in POLICIES.items()
    ),
    seeds=(1, 2, 3, 4, 5),
    compare=tuple(
        Compare(
            name=f"P95 of TTFT against the best, {place}",
            metric="ttft_p95_s",
            ours=f"ours, {place}",
            theirs=tuple(f"{name}, {place}" for name in POLICIES if name != "ours"),
            expect=-1,
            at_most=-0.20 if place == "knee" else 0.05,
        )
        for place in (*PLACES, "agents")
    )
    + tuple(
        Compare(
            name=f"compliant output against the best, {place}",
            metric="compliance",
            ours=f"ours, {place}",
            theirs=tuple(f"{name}, {place}" for name in POLICIES if name != "ours"),
            how="absolute",
            expect=1,
        )
        for place in (*PLACES, "agents")
    ),
    columns=(
        ("ttft_p50_s", "TTFT p50 s", 1.0, 2),
        ("ttft_p95_s", "p95 s", 1.0, 2),
        ("ttft_p99_s", "p99 s", 1.0, 1),
        ("compliance", "compliance", 1.0, 3),
        ("prefix_hit", "hit", 1.0, 3),
        ("refused_share", "refused", 1.0, 3),
    ),
    plots=(
        Bars(
            title="TTFT P95, everybody with our ordering",
            metric="ttft_p95_s",
            cells=tuple(f"{name}, {place}" for place in (*PLACES, "agents") for name in POLICIES),
            unit="seconds",
            log=True,
        ),
    ),
    quick=Quick(cells=tuple(f"{name}, knee" for name in POLICIES), seeds=3),
    findings=FINDINGS,
)
