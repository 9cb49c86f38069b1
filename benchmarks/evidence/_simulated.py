"""Cells that simulate: a scenario with changes, one policy, one seed.

Decides how a run becomes figures. Whatever must hold at the end of a run and does not makes the cell fail.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.evidence._part import Figures
from tokenfleet.replay.report import Result
from tokenfleet.simulator import clairvoyant
from tokenfleet.simulator import scenario as scenarios
from tokenfleet.simulator.experiment import Done, Task, make
from tokenfleet.simulator.scenario import Scenario

ROOT = Path(__file__).parents[2]


class UnsoundRunError(Exception):
    """A run ended with something that must never be; its figures are worth nothing."""


def trace_dir() -> Path | None:
    """Where traces are: $TOKENFLEET_TRACES (`--traces`), $TOKENFLEET_SHARED/traces or ../shared/traces."""
    if named := os.environ.get("TOKENFLEET_TRACES"):
        return Path(named)
    shared = Path(os.environ.get("TOKENFLEET_SHARED") or ROOT.parent / "shared")
    return shared / "traces" if (shared / "traces").is_dir() else None


def merged(below: Any, above: Any) -> Any:
    """`above` laid over `below`: tables by key, a table over a list of tables on each of them, all else replaces."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
    if isinstance(below, list) and isinstance(above, Mapping):
        return [merged(one, above) for one in below]
    return above


def tables(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A scenario's tables, a packaged one's or a file's (relative to the checkout), with changes laid over them."""
    place = ROOT / name if name.endswith(".toml") else scenarios.PACKAGED / f"{name}.toml"
    data = place.read_bytes()
    found: dict[str, Any] = msgspec.toml.decode(data)
    changes = dict(overrides or {})
    if "fleet" in changes and isinstance(changes["fleet"], Mapping) and found.get("fleet", "reference") == "reference":
        reference = (resources.files("tokenfleet.local") / "reference.fleet.toml").read_bytes()
        found["fleet"] = msgspec.toml.decode(reference)
    result: dict[str, Any] = merged(found, changes)
    return result


def traces_of(args: Mapping[str, Any]) -> list[str]:
    """Names of the traces that a simulated cell with these arguments reads."""
    sources = tables(args["scenario"], args.get("overrides"))["workload"]
    return sorted({one["trace"] for one in sources} - {"builtin"})


def load(scenario: str, overrides: Mapping[str, Any] | None = None, speed: float = 1.0) -> Scenario:
    """A scenario, changed and made faster. Raises `ScenarioError`."""
    return _load(scenario, json.dumps(overrides or {}, sort_keys=True), speed)


@functools.lru_cache(maxsize=2)
def _load(scenario: str, overrides: str, speed: float) -> Scenario:
    data = msgspec.toml.encode(tables(scenario, json.loads(overrides)))
    return scenarios.parse(data, source=scenario, base=ROOT, trace_dir=trace_dir(), speed=speed)


def simulate(
    seed: int,
    *,
    scenario: str,
    policy: str,
    speed: float = 1.0,
    overrides: Mapping[str, Any] | None = None,
    keep_records: bool = False,
) -> Done:
    """One run. Raises `UnsoundRunError`, and what `experiment.make` raises."""
    done = make(load(scenario, overrides, speed), Task(policy, seed), keep_records=keep_records)
    if done.findings:
        raise UnsoundRunError(f"{scenario}, {policy}, seed {seed}: {'; '.join(done.findings[:3])}")
    return done


def simulated(seed: int, **args: Any) -> Figures:
    """The cell function of a plain simulation: `scenario`, `policy`, `speed`, `overrides`."""
    return Figures(metrics=figures(simulate(seed, **args)))


def bounded(seed: int, *, policy: str = "", **args: Any) -> dict[str, float | None]:
    """The cell function of the clairvoyant bound: what no policy exceeds on the same arrivals. `policy` is ignored."""
    found = clairvoyant.bound(load(**args), seed)
    return {
        "compliance": found.compliance,
        "compliance_requests": found.compliance_requests,
        "goodput_tokens_per_s": found.goodput_tokens_per_s,
    }


def figures(done: Done) -> dict[str, float | None]:
    """A run's figures by name: overall ones plainly (`ttft_p95_s`), others as `class.short.ttft_p95_s` and so on."""
    one = done.report
    found = _group(one.overall, "")
    for scope, groups in (("class", one.classes), ("tenant", one.tenants), ("site", one.sites)):
        for name, result in groups.items():
            found |= _group(result, f"{scope}.{name}.")
    found["prefix_hit"] = done.prefix_hit
    found["jain_tenants"] = one.jain_tenants
    found["jain_classes"] = one.jain_classes
    return found


_FIGURES: dict[str, Callable[[Result], float | None]] = {
    "offered": lambda r: float(r.offered),
    "compliance": lambda r: r.compliance,
    "compliance_requests": lambda r: r.compliance_requests,
    "goodput_tokens_per_s": lambda r: r.goodput_tokens_per_s,
    "output_tokens_per_s": lambda r: r.output_tokens_per_s,
    "completed_share": lambda r: r.completed / r.offered,
    "refused_share": lambda r: r.refused / r.offered,
    "late_share": lambda r: r.late / r.offered,
    "unfinished_share": lambda r: (r.unfinished + r.cancelled + r.failed) / r.offered,
    "ttft_p50_s": lambda r: _seconds(r.ttft_ms.p50),
    "ttft_p90_s": lambda r: _seconds(r.ttft_ms.p90),
    "ttft_p95_s": lambda r: _seconds(r.ttft_ms.p95),
    "ttft_p99_s": lambda r: _seconds(r.ttft_ms.p99),
    "ttft_p999_s": lambda r: _seconds(r.ttft_ms.p999),
    "tpot_p50_ms": lambda r: r.tpot_ms.p50,
    "tpot_p95_ms": lambda r: r.tpot_ms.p95,
}


def _group(result: Result, before: str) -> dict[str, float | None]:
    return {before + name: of(result) for name, of in _FIGURES.items()}


def _seconds(value_ms: float | None) -> float:
    """Seconds; a rank that falls on what never came is infinite, which is worse than any number."""
    return float("inf") if value_ms is None else value_ms / 1000
