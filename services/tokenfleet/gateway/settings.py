"""The gateway's knobs. Decides nothing; every number has its unit in its name."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway allows and waits for; the defaults are for production, tests shorten them."""

    #: open requests at once; one more is refused with 429 `gateway_full`
    max_open: int = 4000
    #: requests that the gateway lets in by itself while SLOMax is silent, open at once
    fallback_open: int = 64
    #: attempts of one request that may be dispatched
    max_attempts: int = 3
    #: longest hold, whatever a class says
    hold_ms: float = 300_000.0
    #: after the patience, for the refusal of the service that owns the hold to arrive first
    patience_grace_ms: float = 1_000.0
    #: bounds of the wait for a first token; between them ten times the class's TTFT objective
    first_token_min_ms: float = 20_000.0
    first_token_max_ms: float = 300_000.0
    #: an engine that streams must say something within
    token_gap_ms: float = 60_000.0
    #: a client must take something within, else it has stalled
    client_stall_ms: float = 30_000.0
    #: TCP and TLS to an instance
    connect_ms: float = 3_000.0
    #: a POST that loses its connection this soon met an idle connection being closed: once more on a fresh one
    reconnect_ms: float = 500.0
    #: between two rounds over all allowed sites
    round_ms: float = 1_000.0
    #: least time a request gets for another attempt, even when its patience is over
    again_ms: float = 5_000.0
    #: how long open requests may go on after a stop was asked for
    stop_grace_s: float = 20.0
    #: an answer of a client that did not ask for a stream; a bigger one is cut
    answer_bytes: int = 64 * 1024 * 1024
    #: one SSE event; a bigger one is no event
    event_bytes: int = 8 * 1024 * 1024
    lease_s: float = 2.0
    #: a run with an idempotency key whose claim is not renewed (every `lease_s`) for this long has lost its gateway
    claim_silent_s: float = 10.0
    #: how long answers to requests with an idempotency key are kept for a repeat, no longer than the bucket keeps the
    #: key (`tokenfleet_schemas.streams`), and how much of them
    answer_kept_s: float = 600.0
    kept_bytes: int = 64 * 1024 * 1024
    #: how often silent engines and stalled clients are looked for
    watch_s: float = 0.5


class KeyCache(msgspec.Struct, frozen=True, kw_only=True):
    """How long what Postgres says of a key is believed."""

    #: a revocation takes effect within this time
    known_s: float = 30.0
    unknown_s: float = 5.0
    #: while Postgres is down, keys known before go on working for
    outage_s: float = 3600.0
    #: how long a look-up may take before a key known from before is believed without it, and an unknown one is not
    stale_s: float = 0.25
    look_up_s: float = 3.0
    entries: int = 10_000
