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
    #: changes of an instance's KV content are gathered for so long
    kv_flush_ms: float = 100.0
    #: blocks of one instance that are kept in the books; about 280 bytes each
    kv_blocks_max: int = 131_072
    #: an engine without KV events is asked again after this; a lost publisher sooner
    kv_absent_ms: float = 60_000.0
    kv_retry_ms: float = 2_000.0
    #: how long a replay may stay silent
    kv_replay_timeout_ms: float = 5_000.0
    #: a publisher is silent that says nothing over so many ended requests, or so long a traffic, and so many tokens
    kv_silent_requests: int = 50
    kv_silent_ms: float = 60_000.0
    kv_silent_tokens: int = 4_096
    #: between two looks at an instance whose content does not change
    kv_look_ms: float = 1_000.0
    #: between two summaries of the site's KV content for the fleet
    kv_summary_ms: float = 5_000.0
    #: between two probes of another site
    probe_ms: float = 10_000.0
    probe_timeout_ms: float = 3_000.0
    #: connections of one probe
    probe_connects: int = 3
    #: probes that a reported round-trip time and loss are made of
    probe_window: int = 6
    #: a measured bandwidth is said for so long, ms
    bandwidth_kept_ms: float = 600_000.0
