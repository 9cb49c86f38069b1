"""Knobs of the emulator. Decides nothing; what an instance is (model, profile, limits) is the fleet file's."""

from typing import Literal

import msgspec


class EmulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the emulated engines behave beyond their hardware profile."""

    #: 2.0 runs everything twice as fast
    time_scale: float = 1.0
    #: publish KV events where pyzmq is installed
    kv_events: bool = True
    #: interface to listen on instead of the host of an instance's URL (containers: 0.0.0.0)
    bind_host: str = ""
    #: version that `/version` states
    engine_version: str = "0.32.0"
    #: vLLM: --enable-prompt-tokens-details
    prompt_tokens_details: bool = True
    #: `fcfs` accepts a request's `priority` and ignores it, as vLLM does without its priority policy
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    #: answers of requests that force no length: lognormal, by a hash of the prompt
    output_tokens_median: float = 120.0
    output_tokens_sigma: float = 0.8
    output_tokens_max: int = 2048
    #: idle connections are closed after this, as uvicorn does
    keepalive_s: float = 5.0
    #: a step that ends this much late no longer delays the next by it: the engine catches up
    lag_forgiven_ms: float = 100.0
    #: received requests and per-request token counts kept for `/requests` and `/state`
    requests_kept: int = 20_000
