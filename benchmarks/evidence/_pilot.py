"""What the parts about TokenPilot have in common: a scenario of agents, and TTFT's floor."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.evidence import _agents
from benchmarks.evidence._part import Figures
from benchmarks.evidence._simulated import UnsoundRunError, figures, load, simulate
from tokenfleet.engine_model import profile
from tokenfleet.simulator.arrivals import draw
from tokenfleet.simulator.experiment import Task, make
from tokenfleet.simulator.scenario import Scenario

_WORKLOADS = {"generated": _agents.generated, "recorded": _agents.recorded}


def agents(
    seed: int, *, policy: str, workload: str, rates: Sequence[float], stage_s: float, warmup_s: float
) -> Figures:
    """The headline's shape: thirteen instances of a 480B model, agents in closed loops at stepped rates."""
    scenario = agents_scenario(seed, workload, rates, stage_s, warmup_s)
    done = make(scenario, Task(policy, seed))
    if done.findings:
        raise UnsoundRunError(f"{workload}, {policy}, seed {seed}: {'; '.join(done.findings[:3])}")
    return Figures(metrics={**figures(done), **floor(scenario, seed)})


def agents_scenario(seed: int, workload: str, rates: Sequence[float], stage_s: float, warmup_s: float) -> Scenario:
    """What `agents` runs: a site of its own with the workload in place of a trace's."""
    trace = _WORKLOADS[workload](seed, rates, stage_s)
    changes: dict[str, Any] = {
        "scenario": {"duration_s": stage_s * len(rates), "warmup_s": warmup_s, "drain_s": 600},
        "workload": {"trace": "builtin", "rate_per_s": 1.0, "class_rule": "", "service_class": "agent"},
        "pools": {"profile": "480b-h200x8", "count": 13},
        "engines": {"block_tokens": 512},
        "fleet": {
            "fleet": {"default_class": "agent"},
            "classes": {"agent": {"ttft_ms": 5000, "tpot_ms": 100, "patience_ms": 300_000}},
            "tenants": {"all": {"classes": ["agent"]}},
        },
    }
    base = load("conversation-70b", changes)
    source = msgspec.structs.replace(base.sources[0], trace=trace.name, rate_per_s=0.0, closed_loop=True)
    return msgspec.structs.replace(base, sources=(source,), traces=(trace,))


def floor(scenario: Scenario, seed: int) -> dict[str, float | None]:
    """TTFT if nobody ever waited and all instances were one cache, least recently used out first.

    No router that knows the future reaches less with these engines and this cache: it is own prefill alone, alone in
    its steps, plus the engine's delay to take a request.
    """
    instances = [one for site in scenario.fleet.sites.values() for one in site.instances.values()]
    engine = profile(instances[0].profile)
    room = sum(one.kv_tokens or profile(one.profile).kv_tokens for one in instances)
    cache: OrderedDict[int, None] = OrderedDict()
    found, hits, tokens = [], 0, 0
    for arrival in draw(scenario, seed):
        hit = 0
        for block in arrival.blocks:
            if block not in cache:
                break
            hit += arrival.block_tokens
        for block in reversed(arrival.blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) * arrival.block_tokens > room:
            cache.popitem(last=False)
        hit = min(hit, arrival.input_tokens - 1)
        own = arrival.input_tokens - hit
        if arrival.at_ms >= 1000.0 * scenario.info.warmup_s:
            pairs = own * (hit + own / 2)
            found.append(
                (engine.t_fix_ms + max(engine.t_w_ms, engine.c_us_per_token * own * 1e-3))
                + engine.a_ns_per_pair * pairs * 1e-6
                + engine.api_delay_ms
            )
            hits, tokens = hits + hit, tokens + arrival.input_tokens
    found.sort()
    return {
        "floor_p50_s": found[len(found) // 2] / 1000.0,
        "floor_p95_s": found[int(0.95 * len(found))] / 1000.0,
        "floor_hit": hits / tokens,
    }


def conversation(seed: int, *, scenario: str, policy: str, speed: float, overrides: dict[str, Any]) -> Figures:
    """Mooncake's conversations on one site's instances, with the floor beside the usual figures."""
    done = simulate(seed, scenario=scenario, policy=policy, speed=speed, overrides=overrides)
    return Figures(metrics={**figures(done), **floor(load(scenario, overrides, speed), seed)})
