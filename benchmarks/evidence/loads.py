"""How much load the reference policy carries: stable load and knee, by which other parts name their loads."""

from benchmarks.evidence import Cell, Compare, Figures, Goal, Part, Quick, figures, simulate
from tokenfleet.simulator.search import probe

POLICY = "llm-d//none"
#: speeds by scenario: the stable load and the knee that a search found, and a speed between them
SPEEDS = {"70b": (1.766, 1.788, 1.832), "8b": (5.71, 5.80, 5.894)}


def probed(seed: int, *, scenario: str, speed: float) -> Figures:
    """A run of the reference policy, and whether its backlog grew in the second half of the window."""
    done = simulate(seed, scenario=scenario, policy=POLICY, speed=speed, keep_records=True)
    begin_ms = min(record.planned_ms for record in done.records)
    found = probe(done.records, begin_ms, max(record.planned_ms for record in done.records))
    growth = (found.backlog_end - found.backlog_middle) / max(1, found.arrived_late)
    return Figures(metrics={**figures(done), "backlog_growth": growth, "grows": float(found.grows)})


def _cells(name: str) -> list[Cell]:
    stable, between, knee = SPEEDS[name]
    speeds = {"half": round(stable / 2, 4), "stable": stable, "between": between, "knee": knee}
    return [
        Cell(name=f"{name} {word}", run=probed, args={"scenario": f"conversation-{name}", "speed": speed})
        for word, speed in speeds.items()
    ]


def _compare(name: str) -> list[Compare]:
    return [
        Compare(
            name=f"{name}: the stable load's P95 is at most three times that at half of it",
            metric="ttft_p95_s",
            ours=f"{name} stable",
            theirs=f"{name} half",
            expect=1,
            at_most=2.0,
        ),
        Compare(
            name=f"{name}: 1.3% to 1.6% above the stable load it is more",
            metric="ttft_p95_s",
            ours=f"{name} between",
            theirs=f"{name} half",
            expect=1,
            at_least=2.0,
        ),
        Compare(
            name=f"{name}: the knee's P95 is at least five times that at half",
            metric="ttft_p95_s",
            ours=f"{name} knee",
            theirs=f"{name} half",
            expect=1,
            at_least=4.0,
        ),
    ]


FINDINGS = """
Three seeds agree with the search: the stable load is 1.766 (70B × 8) and 5.71 (8B × 16) times the trace's speed, the
knee 1.832 and 5.894. The speed between them is not stable and not yet the knee. So little lies between a load that
is served and one that is not: within 4% of speed, P95 grows more than threefold and compliance falls as the table
shows. A policy that is compared at one speed near the knee looks as good or as bad as one likes; compare at several.

The search has 2% of tolerance, and the constants of the engine model are published ones, not measured here: the ranking
of speeds carries over to hardware, the speeds themselves do not.
"""

PART = Part(
    title="Stable load and knee of the reference policy",
    question="""
*Stable load*: the highest speed of the trace (within 2%) at which P95 TTFT is at most three times that at half the
speed and the backlog does not grow in the second half of the window, for all seeds. *Knee*: the lowest speed (within
2%) with a P95 of at least five times that at half the speed, for any seed. TTFT is over offered requests.

Both for llm-d's weights (3, 2, 2), dispatched at once and first come first served in the engine (`llm-d//none`), on the
de-quantised Mooncake conversation trace with 70B × 8 and 8B × 16 instances; speeds are multiples of the trace's own.

The speeds come from a search with one seed:

```text
tokenfleet simulate conversation-70b --traces DIR --policy llm-d//none --knee 1.2 2.6  # stable 1.7664, knee 1.8316
tokenfleet simulate conversation-8b --traces DIR --policy llm-d//none --knee 3 8  # stable 5.7104, knee 5.8938
```

Here three seeds run what it found: the stable load, half of it, the knee, and a speed between the two.
""",
    cells=(*_cells("70b"), *_cells("8b")),
    seeds=(1, 2, 3),
    compare=(*_compare("70b"), *_compare("8b")),
    goals=tuple(
        Goal(name=f"{name}: no backlog grows at the stable load", cell=f"{name} stable", metric="grows", at_most=0.0)
        for name in SPEEDS
    ),
    columns=(
        ("ttft_p50_s", "TTFT p50 s", 1.0, 2),
        ("ttft_p95_s", "p95 s", 1.0, 2),
        ("ttft_p99_s", "p99 s", 1.0, 2),
        "compliance",
        ("backlog_growth", "backlog growth %", 100.0, 1),
    ),
    quick=Quick(cells=("70b knee", "70b half"), seeds=3),
    traces=("mooncake-conversation",),
    findings=FINDINGS,
)
