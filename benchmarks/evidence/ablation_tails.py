"""Who pays for compliance: the P99.9 of every class and tenant under each policy of the ablation, and Jain's index."""

from benchmarks.evidence import Bars, Compare, Part, Quick, simulated
from benchmarks.evidence.ablation import PART as ABLATION

CLASSES = ("interactive", "chat", "agent", "document", "batch")
TENANTS = ("studio", "bank", "devtools", "research", "trial")
#: the ablation's own runs: what it has run is not run again
CELLS = tuple(cell for cell in ABLATION.cells if cell.name.startswith("reference: ") and cell.run is simulated)

FINDINGS = ""

PART = Part(
    title="Ablation: the tail of every class and tenant",
    question="""
Compliance over all tokens can be bought by making somebody wait for ever. These are the runs of the part `ablation` on
the reference fleet, by class and by tenant: the P99.9 of TTFT over offered requests, in seconds. In a minute a class
has some tens to some hundreds of requests, so its P99.9 is its worst request; where one got no token in a seed
(refused, or out of patience) it is *never*. Jain's index is that of compliance (1: all alike).
""",
    cells=CELLS,
    seeds=ABLATION.seeds,
    compare=tuple(
        Compare(
            name=f"Jain of {whom}, tokenfleet against {theirs}",
            metric=f"jain_{whom}",
            ours="reference: tokenfleet",
            theirs=f"reference: {theirs}",
            how="absolute",
            expect=1,
        )
        for whom in ("classes", "tenants")
        for theirs in ("llm-d, engine's queue", "ours, FCFS", "ours, feasible EDF")
    ),
    columns=(
        *((f"class.{name}.ttft_p999_s", name, 1.0, 1) for name in CLASSES),
        *((f"tenant.{name}.ttft_p999_s", name, 1.0, 1) for name in TENANTS),
        ("jain_classes", "Jain, classes", 1.0, 3),
        ("jain_tenants", "Jain, tenants", 1.0, 3),
    ),
    plots=(
        Bars(
            title="Jain's index of classes' compliance",
            metric="jain_classes",
            cells=tuple(cell.name for cell in CELLS),
        ),
    ),
    quick=Quick(
        cells=("reference: llm-d, engine's queue", "reference: ours, FCFS", "reference: tokenfleet"),
        seeds=4,
    ),
    findings=FINDINGS,
)
