"""What each part of the policy is worth: placement, ordering and admission exchanged one at a time."""

from typing import Any

from benchmarks.evidence import Bars, Cell, Compare, Part, Quick, bounded, simulated

#: the built-in workload on the reference fleet, above what it carries: five classes, five tenants, three sites
REFERENCE: dict[str, Any] = {
    "scenario": "reference",
    "overrides": {
        "scenario": {"duration_s": 60, "warmup_s": 5, "drain_s": 120},
        "workload": {"rate_per_s": 14.0},
    },
}
#: the beginning of a public trace, above the knee of the reference policy: one class by size, one tenant, one site
CONVERSATION: dict[str, Any] = {
    "scenario": "conversation-70b",
    "speed": 2.2,
    "overrides": {"scenario": {"duration_s": 180, "warmup_s": 30, "drain_s": 400}},
}
#: name of a cell → its policy: placement, who holds and in which order, who is let in
POLICIES = {
    "llm-d, engine's queue": "llm-d//none",
    "llm-d, saturation gate": "llm-d//gate",
    "llm-d, limit of 8": "llm-d//concurrency-8",
    "llm-d, split by class": "llm-d//split",
    "llm-d, our holds, FCFS": "llm-d+queue//fcfs",
    "llm-d, our holds, SJF": "llm-d+queue//sjf",
    "llm-d, our holds, EDF": "llm-d+queue//edf",
    "llm-d, our holds, feasible EDF": "llm-d+queue//feasible-edf",
    "llm-d, our pools": "llm-d+queue//pools",
    "ours, FCFS": "predicted-latency//fcfs",
    "ours, SJF": "predicted-latency//sjf",
    "ours, EDF": "predicted-latency//edf",
    "ours, feasible EDF": "predicted-latency//feasible-edf",
    "ours, shares never moved": "predicted-latency//static",
    "tokenfleet": "tokenfleet",
}
WHERE = {"reference": REFERENCE, "conversation": CONVERSATION}
#: on the trace only the steps from theirs to ours: it has one tenant, and classes of one tier
ON_TRACE = (
    "llm-d, engine's queue",
    "llm-d, our holds, FCFS",
    "llm-d, our holds, feasible EDF",
    "ours, FCFS",
    "ours, feasible EDF",
    "tokenfleet",
)
SEEDS = {"reference": (1, 2, 3, 4), "conversation": (1, 2, 3)}


def _cells() -> list[Cell]:
    found = []
    for where, args in WHERE.items():
        found += [
            Cell(name=f"{where}: {name}", run=simulated, args={**args, "policy": policy}, seeds=SEEDS[where])
            for name, policy in POLICIES.items()
            if where == "reference" or name in ON_TRACE
        ]
        found.append(Cell(name=f"{where}: clairvoyant bound", run=bounded, args=args, seeds=SEEDS[where]))
    return found


def _compare(what: str, ours: str, theirs: str, expect: Any = 1) -> list[Compare]:
    return [
        Compare(
            name=f"{where}: {what}",
            metric="compliance",
            ours=f"{where}: {ours}",
            theirs=f"{where}: {theirs}",
            how="absolute",
            expect=expect,
        )
        for where in WHERE
        if where == "reference" or {ours, theirs} <= set(ON_TRACE)
    ]


FINDINGS = """
- **Ordering is the largest lever on mixed work**: 16 points from FCFS to feasible EDF under their placement and under
  ours. Plain EDF is 6 points behind: it goes on serving what is lost. SJF is in between.
- **Holding before the engine is the largest on long prompts**: 63 points on the trace with FCFS in both, none on the
  reference fleet. A hold that does not fit an instance's look-ahead is passed by one that does, so `FCFS` in our
  holds lets short prompts by, which an engine's queue does not.
- **Placement adds little once holds are ordered**: with FCFS one point on the reference fleet and three on the trace,
  less with feasible EDF or our pools, all of it undecided. The reference fleet has one instance of a model version at
  most sites, so there is hardly a choice; and once holds are ordered, time to the first token, not compliance, shows
  what placement saves.
- **Our pools hardly beat feasible EDF in compliance**: by half a point on the reference fleet, level on the trace.
  What they are for, floods of one tenant or class, neither load has; the part `admission` has one.
- **Shares that follow compliance change nothing in a minute**: not one figure.
- **Others' admission**: a limit of 8 requests per instance (as many as the engine runs at once) is worth 8 points
  over none, a saturation gate three. The split equals the engine's queue: with one instance in a pool there is
  nothing to split, so that comparison says no more than the first.
- **The tail pays**: with feasible EDF the last requests of the trace wait 160 to 170 s at P99.9, two and a half times
  as long as in the engine's queue, and where some are refused the P99.9 is *never*. By class and tenant: part
  `ablation_tails`.
- **The clairvoyant bound is 100% at both loads** and so tells nothing: by compute alone, with a perfect cache and
  memory without end, all of it could have been served in time.
"""

PART = Part(
    title="Ablation: placement × ordering × admission, one by one",
    question="""
Which of its parts makes the policy better? Everything starts from llm-d's weights (3, 2, 2), dispatched at once and
queued in the engine, and changes one thing at a time: who admits (a saturation gate, a limit per instance, a split by
class), who holds (the engine, or our holds before it), in which order, and who places. The measure is compliance:
output tokens of requests that kept their objectives over offered output tokens.

Two loads, both above what the fleet carries: the built-in mixed workload on the reference fleet at 14 requests/s, and
three minutes of the Mooncake conversation trace at 2.2 times its speed on 70B × 8 (three seeds of the four). The
clairvoyant bound is what no policy can exceed on the same arrivals (`docs/simulation.md`); it is a relaxation and may
be out of reach.
""",
    cells=tuple(_cells()),
    seeds=(1, 2, 3, 4),
    compare=(
        *_compare("all of it", "tokenfleet", "llm-d, engine's queue"),
        *_compare("our holds, FCFS in both", "llm-d, our holds, FCFS", "llm-d, engine's queue"),
        *_compare("ordering, under their placement", "llm-d, our holds, feasible EDF", "llm-d, our holds, FCFS"),
        *_compare("EDF that sees what is lost, against EDF", "ours, feasible EDF", "ours, EDF"),
        *_compare("ordering, under ours", "ours, feasible EDF", "ours, FCFS"),
        *_compare("placement, FCFS in both", "ours, FCFS", "llm-d, our holds, FCFS"),
        *_compare("placement, feasible EDF in both", "ours, feasible EDF", "llm-d, our holds, feasible EDF"),
        *_compare("placement, our pools in both", "tokenfleet", "llm-d, our pools"),
        *_compare("our pools against feasible EDF", "tokenfleet", "ours, feasible EDF"),
        *_compare("our pools against SJF", "tokenfleet", "ours, SJF"),
        *_compare("shares that follow compliance", "tokenfleet", "ours, shares never moved", 0),
        *_compare("ours against a saturation gate", "tokenfleet", "llm-d, saturation gate"),
        *_compare("ours against a limit per instance", "tokenfleet", "llm-d, limit of 8"),
        *_compare("ours against a split by class", "tokenfleet", "llm-d, split by class"),
    ),
    columns=(
        "compliance",
        ("goodput_tokens_per_s", "goodput tok/s", 1.0, 0),
        ("output_tokens_per_s", "output tok/s", 1.0, 0),
        ("refused_share", "refused %", 100.0, 1),
        ("late_share", "late %", 100.0, 1),
        ("ttft_p50_s", "TTFT p50 s", 1.0, 2),
        ("ttft_p95_s", "p95 s", 1.0, 2),
        ("ttft_p999_s", "p99.9 s", 1.0, 1),
        ("jain_classes", "Jain, classes", 1.0, 3),
        ("jain_tenants", "Jain, tenants", 1.0, 3),
    ),
    plots=tuple(
        Bars(
            title=f"Compliance, {where}",
            metric="compliance",
            cells=tuple(
                f"{where}: {name}" for name in (*(POLICIES if where == "reference" else ON_TRACE), "clairvoyant bound")
            ),
            unit="% of offered output tokens",
            scale=100.0,
        )
        for where in WHERE
    ),
    quick=Quick(
        cells=tuple(
            f"reference: {name}"
            for name in (
                "llm-d, engine's queue",
                "llm-d, our holds, FCFS",
                "ours, FCFS",
                "ours, feasible EDF",
                "tokenfleet",
            )
        ),
        seeds=4,
    ),
    findings=FINDINGS,
)
