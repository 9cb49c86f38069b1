"""What TokenPilot loses when hardware is mixed or sick, when reports are old, and when its constants are wrong."""

from typing import Any

from benchmarks.evidence import Bars, Cell, Compare, Part, Quick, simulated

SPEED = 1.5
_SITE: dict[str, Any] = {"site": "b", "model": "m", "version": "1", "token_budget": 8192}
LATER = 300.0
SHORT: dict[str, Any] = {"scenario": {"duration_s": 100, "warmup_s": 30}}
#: counted from when the fault begins
LONG: dict[str, Any] = {"scenario": {"duration_s": 450, "warmup_s": 300}}
#: eight H100 and as much prefill from five of them and eight A100
MIXED = [
    {**_SITE, "name": "h", "profile": "70b-h100x4", "count": 5},
    {**_SITE, "name": "a", "profile": "70b-a100x4", "count": 8},
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two generations": ("as it is", {"pools": MIXED}),
    "reports 1 s old": ("as it is", {"agents": {"late_ms": 1000.0}}),
    "rates declared at half": ("as it is", {"agents": {"rate_error": 0.5}}),
    "rates declared twice": ("as it is", {"agents": {"rate_error": 2.0}}),
    "one 3 times as slow": (
        "as it is, later",
        {"faults": [{"kind": "engine_slow", "target": "gpu-0", "at_s": LATER, "for_s": 600.0, "factor": 3.0}]},
    ),
    "one lost": (
        "as it is, later",
        {"faults": [{"kind": "engine_down", "target": "gpu-0", "at_s": LATER, "for_s": 600.0}]},
    ),
}

FINDINGS = """
- Two generations cost P95, not goodput: a long prompt takes longer on the older ones, and still comes in time. A slow
  instance is found by its first answers and gets less; a lost one's requests are placed again.
- Wrong declared rates cost nothing that shows: the fit starts from them and leaves them within tens of requests.
  Reports one second old cost nothing either: between them the bookings say what the load is.
- Constants of the engines themselves are not scaled here, because that changes what the fleet can do at all.
"""


def _args(window: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    overrides = {**window, **changes}
    return {"scenario": "conversation-70b", "policy": "tokenfleet", "speed": SPEED, "overrides": overrides}


PART = Part(
    title="TokenPilot: what disturbs it",
    question="""
TokenFleet against itself undisturbed, on Mooncake's conversations on eight 70B instances at speed 1.5 (85% of what
(3, 2, 2) carries in a stable way). Two hardware generations: five H100 and eight A100 instances with together the
prefill rate of eight H100. One instance three times as slow, or gone, from minute 5 to the end, which is what is
counted. Reports one second old instead of 50 ms; prefill rates declared at half and at twice the true ones, which
nobody tells the policy. 70 and 150 s are counted.
""",
    cells=(
        Cell(name="as it is", run=simulated, args=_args(SHORT, {})),
        Cell(name="as it is, later", run=simulated, args=_args(LONG, {})),
        *(
            Cell(name=name, run=simulated, args=_args(LONG if base.endswith("later") else SHORT, changes))
            for name, (base, changes) in CASES.items()
        ),
    ),
    seeds=(1, 2, 3, 4, 5),
    compare=tuple(
        Compare(
            name=f"goodput, {name}",
            metric="goodput_tokens_per_s",
            ours=name,
            theirs=base,
            expect=0,
            at_least=-0.10 if name == "one lost" else -0.05,
        )
        for name, (base, _) in CASES.items()
    ),
    columns=(
        ("goodput_tokens_per_s", "goodput tok/s", 1.0, 0),
        ("compliance", "compliance", 1.0, 3),
        ("ttft_p50_s", "TTFT p50 s", 1.0, 2),
        ("ttft_p95_s", "p95 s", 1.0, 2),
        ("prefix_hit", "hit", 1.0, 3),
    ),
    plots=(
        Bars(
            title="Goodput, disturbed and undisturbed",
            metric="goodput_tokens_per_s",
            cells=(
                "as it is",
                *(n for n, (b, _) in CASES.items() if b == "as it is"),
                "as it is, later",
                *(n for n, (b, _) in CASES.items() if b != "as it is"),
            ),
            unit="tokens/s",
        ),
    ),
    quick=Quick(cells=("as it is", "two generations", "rates declared twice"), seeds=3),
    findings=FINDINGS,
)
