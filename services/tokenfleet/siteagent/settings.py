"""The site agent's knobs. Decides nothing; every number has its unit in its name."""

import msgspec


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for production; tests shorten them."""

    #: between two polls of an instance
    poll_ms: float = 1_000.0
    #: one HTTP request to an engine
    request_timeout_ms: float = 2_000.0
    #: which models an instance serves, and its engine's version, are asked for again after this
    identity_ms: float = 10_000.0
    #: an unchanged instance is reported again after this
    report_ms: float = 1_000.0
    #: an instance that stays silent (does not refuse) is unreachable after this and so many polls
    unreachable_ms: float = 3_000.0
    unreachable_polls: int = 2
    #: requests run and no token comes: stalled after this
    stalled_ms: float = 15_000.0
    #: times the longest possible prefill that a newly started request may take before its first token
    prefill_allowance: float = 1.5
    #: prefill rate assumed for that when none is known, tokens/s: rather too patient than a false alarm
    slow_prefill_tokens_per_s: float = 2_000.0
    #: an engine that cannot say its exact version is believed to serve the declared one if it serves the model's name
    trust_declared_version: bool = True
    #: between two probes of another site
    probe_ms: float = 10_000.0
    probe_timeout_ms: float = 3_000.0
    #: probes that a reported round-trip time and loss are made of
    probe_window: int = 6
