"""Who pays for compliance: the P99.9 of every class and tenant under each policy of the ablation, and Jain's index."""

from benchmarks.evidence import Bars, Compare, Part, Quick, simulated
from benchmarks.evidence.ablation import PART as ABLATION

CLASSES = ("interactive", "chat", "agent", "document", "batch")
TENANTS = ("studio", "bank", "devtools", "research", "trial")
#: the ablation's own runs: what it has run is not run again
CELLS = tuple(cell for cell in ABLATION.cells if cell.name.startswith("reference: ") and cell.run is simulated)

FINDINGS = """
- **Whoever complies most leaves somebody without an answer**: under feasible EDF and under our pools the worst request
  of `interactive`, `agent` and `document` got no token in some seed. It was refused early, or ran out of patience
  when it could not be in time any more. Plain EDF and a limit per instance answer everybody and keep fewer promises.
- **Compliance is spread more evenly all the same**: Jain's index of classes is higher than in the engine's queue and
  than with FCFS in our holds, where the urgent classes pay. Between our pools and feasible EDF nothing is decided.
- **Batch does not pay for it**: its last requests begin sooner under our pools than in the engine's queue.
"""

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
    traces=("mooncake-conversation",),  # not read here: so that kept runs of the ablation stand for these
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
