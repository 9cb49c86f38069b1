"""TokenPilot's knobs, with units. Constants of the rules, not of a site: `fleet.toml` says what differs by site."""

import msgspec


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are what the design says or, where it is silent, what the comment says."""

    #: an engine gets so many prefill chunks of look-ahead: what makes its next step a full one, as what waits inside
    #: cannot be reordered
    lookahead_budgets: float = 1.0
    #: share of the KV capacity that may be booked beyond it: engines admit block by block, as sequences end, which is
    #: finer than bookings know; what waits inside cannot be reordered
    kv_lookahead: float = 0.0
    #: it grows in these steps up to so many, by the last so many first tokens: up where running dry costs more than
    #: this share of the time, down again where it costs less than half of that
    lookahead_max: float = 4.0
    dry_share: float = 0.03
    lookahead_step: float = 0.25
    lookahead_patience: int = 50
    #: from a first token until the next request is at the engine: less prefill than that is as good as none, ms
    feedback_ms: float = 40.0
    #: an offer unanswered for the larger of this and three round trips is filled without SLOMax, ms
    offer_answer_ms: float = 200.0
    #: offers of one instance keep this distance: several ends in one engine step make one offer, ms
    offer_gap_ms: float = 20.0
    #: an unchanged level is offered again after this, ms
    offer_repeat_ms: float = 1000.0
    #: own decisions that have not come back from the stream are said again after this, ms
    unconfirmed_ms: float = 1000.0
    #: a hold is refused here when SLOMax has not done so this long after its patience ran out, ms
    patience_grace_ms: float = 1500.0
    #: no hold lasts longer, ms
    hold_max_ms: float = 300_000.0
    #: sequences at once on an instance whose KV capacity nobody knows: unknown is never counted as free
    unknown_kv_sequences: int = 16
    #: prefill rate for comparing instances of which no rate is known at all; never used in a prediction, tokens/s
    unknown_prefill_tokens_per_s: float = 2000.0
    #: output tokens expected of a class before any has been seen
    prior_decode_tokens: int = 256
    #: successive failures that open an instance's breaker
    breaker_failures: int = 3
    #: an open breaker lets one trial through after this, ms
    breaker_cooldown_ms: float = 10_000.0
    #: trials that must succeed
    breaker_successes: int = 2
    #: half open so long without a failure while the agent says ready: closed, even if no client came, ms
    breaker_quiet_ms: float = 60_000.0
    #: digests remembered per instance by the approximate prefix index (64 tokens each)
    prefix_digests: int = 32_768
    #: highest price of compute that a prefill burns, in its own time: mu of the scorer `predicted-latency`
    burn_price: float = 5.0
    #: price of the delay that a prefill inflicts on each sequence there, in its own time: w
    delay_price: float = 0.05
    #: price of the share of an instance's KV that a request takes for as long as it stays there, where it is full
    kv_price: float = 1.0
    #: price of being late on an instance while another would be in time, in the time that it is late
    late_price: float = 5.0
    #: price of an answer that comes more slowly than promised, in the time that it was promised to take
    pace_price: float = 0.1
    #: an instance that has become slow and got nothing for so long is tried again with one request, ms
    retry_ms: float = 10_000.0
    #: whether long prefills leave room for short ones on some instances (`tokenpilot.lanes`)
    lanes: bool = True
    #: a prefill is held for that at most so many times its own length, and this part of the time that it has
    lanes_patience: float = 4.0
    lanes_slack: float = 0.5
    #: candidates named in a decision where there are more: the cheapest
    shortlist: int = 8
    #: tombstones of ended requests are kept this long against late and repeated messages, ms
    tombstone_ms: float = 120_000.0
