"""The gateway's small rules: how long to wait for whom, and what an engine is told about urgency. Pure."""

from tokenfleet.eligibility import HOP_BASE_MS, hop_timeout_ms
from tokenfleet.fleet import Fleet
from tokenfleet.gateway.settings import Limits
from tokenfleet_schemas.placement import PlacementAssigned
from tokenfleet_schemas.request import Ask

#: engines that take a `priority` in the body, and whether a lower number is served sooner. vLLM: lower is sooner, and
#: ignored silently unless it schedules by priority (captured from 0.32). SGLang's meaning depends on how it was
#: started, so nothing is sent.
LOWER_IS_SOONER = {"vllm": True}

#: status that a client gets when the last attempt failed before its first token, by what failed; else 502
FAILED_STATUS = {"upstream_busy": 503, "instance_gone": 503, "first_token_timeout": 504}


def road_timeout_ms(fleet: Fleet, entry: str, model: str) -> float:
    """How long the whole road may stay silent, ms: three hops, of which the two to the farthest home site count RTTs.

    SLOMax and FleetMind watch the hops behind them; their own fallbacks must have had time to work.
    """
    homes = fleet.sites[entry].homes.get(model, ()) if entry in fleet.sites else ()
    return HOP_BASE_MS + 2 * max((hop_timeout_ms(fleet, entry, home) for home in homes), default=HOP_BASE_MS)


def first_token_limit_ms(ask: Ask, assigned: PlacementAssigned, limits: Limits) -> float:
    """How long an instance may work without a first token before it counts as failed, ms.

    Ten times the objective (a miss is no failure), five times what was predicted for a long prompt, within bounds; a
    class without objective gets the upper one.
    """
    if ask.ttft_ms is None:
        return limits.first_token_max_ms
    wished = max(10 * ask.ttft_ms, 5 * (assigned.predicted_ttft_ms or 0.0), limits.first_token_min_ms)
    return min(wished, limits.first_token_max_ms)


def engine_priority(engine: str, tier: int) -> int | None:
    """The body's `priority` for a class's tier (0 is served first); None: say nothing to this engine."""
    lower_is_sooner = LOWER_IS_SOONER.get(engine)
    if lower_is_sooner is None:
        return None
    return tier if lower_is_sooner else -tier
