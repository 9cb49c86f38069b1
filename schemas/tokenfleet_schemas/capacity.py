"""What is there: site agents' reports about instances and the network."""

from typing import Literal

from tokenfleet_schemas.event import Event


class CapacityReported(Event, frozen=True, kw_only=True, tag="tokenfleet.capacity.v1.reported"):
    """One instance as its agent sees it. None means unknown: never zero, healthy or free."""

    zone: str
    instance: str
    #: changes when the engine was restarted, in place or not
    incarnation: str
    revision: int
    model: str
    #: exact version that the engine says it serves; empty: unknown, not eligible
    version: str
    ready: bool
    #: why it is not ready: starting, unreachable, unhealthy, stalled, version_mismatch, draining, stopped (by a plan)
    reason: str = ""
    draining: bool = False
    endpoint_url: str
    credential: str = ""
    routable_from: tuple[str, ...] = ()
    engine: Literal["vllm", "sglang"] = "vllm"
    engine_version: str = ""
    gpus: int = 0
    max_model_len: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_tokens_total: int | None = None
    kv_usage: float | None = None
    #: prompt tokens computed and tokens generated since the incarnation began
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    preemptions_total: int | None = None
    token_budget: int = 2048
    max_sequences: int | None = None
    #: observed or declared prefill rate, tokens/s
    prefill_tokens_per_s: float | None = None
    adapters: tuple[str, ...] = ()
    #: age of the sample when sent, ms
    sample_age_ms: float = 0.0


class CapacityProbed(Event, frozen=True, kw_only=True, tag="tokenfleet.capacity.v1.probed"):
    """The network between two sites, measured from `site`."""

    other_site: str
    revision: int
    rtt_ms: float | None = None
    loss: float | None = None
    #: what a transfer from the other site to this one got, its slow start included
    bytes_per_s: float | None = None
    #: age of `bytes_per_s` when sent, ms: bandwidth is measured more seldom than the round trip
    bandwidth_age_ms: float | None = None
