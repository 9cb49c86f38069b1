"""What came of it: the gateway's facts about each attempt."""

from typing import Literal

from tokenfleet_schemas.event import Event, Part
from tokenfleet_schemas.request import Ask

#: the closed list: one classifier for breaker, ledger and goodput
Outcome = Literal[
    "completed",
    "refused",  # by admission or placement, or patience ran out: nothing was served
    "cancelled",  # the client left
    "client_stalled",  # the client stopped reading
    "rejected",  # the engine says that the request itself is wrong (4xx): neutral for the breaker
    "failed",  # before the first token
    "failed_midstream",  # after the first token
    "timed_out",  # the gateway's limit on a silent instance
    "owner_lost",  # the gateway died with the request open; written by the accountant
]


class OutcomeStarted(Event, frozen=True, kw_only=True, tag="tokenfleet.outcome.v1.started"):
    """The first content, reasoning or tool token of an attempt reached the gateway."""

    request_id: str
    attempt: int
    gateway: str
    tenant: str
    service_class: str
    model: str
    version: str
    served_site: str
    instance: str
    #: id of the `assigned` that booked it; empty: nobody booked, so this books
    booking: str
    #: from receipt to first token, the gateway's monotonic clock
    ttft_ms: float
    #: from dispatch to first token
    engine_ttft_ms: float
    predicted_ttft_ms: float | None = None
    ttft_objective_ms: float | None = None
    input_tokens: int = 0
    kv_tokens: int = 0


class Times(Part, frozen=True, kw_only=True):
    """Durations of one attempt, ms, all from the gateway's one monotonic clock; None: did not happen."""

    #: from receipt to dispatch
    queue_ms: float | None = None
    #: from receipt to the first byte of the engine's answer
    first_byte_ms: float | None = None
    #: from receipt to the first content, reasoning or tool token
    ttft_ms: float | None = None
    #: mean per output token after the first
    tpot_ms: float | None = None
    #: from receipt to the end
    e2e_ms: float


class OutcomeFinished(Event, frozen=True, kw_only=True, tag="tokenfleet.outcome.v1.finished"):
    """An attempt ended. Exactly one per request is `final`; attempt 0 stands for a request never dispatched."""

    request_id: str
    attempt: int
    final: bool
    outcome: Outcome
    #: typed code: of `REASONS` for a refusal, else what failed (upstream_disconnected, upstream_error, …)
    reason: str = ""
    #: HTTP status that the client got; 0: none could be sent
    status: int = 0
    gateway: str
    gateway_incarnation: str
    tenant: str
    service_class: str
    task: str = ""
    model_asked: str
    model: str
    version: str
    #: model name that the engine's answer carried
    model_served: str = ""
    served_site: str = ""
    instance: str = ""
    #: id of the `assigned`; empty when none was used
    booking: str = ""
    stream: bool = False
    input_tokens: int
    output_tokens: int = 0
    #: of the prompt, as the engine reports; None: it does not say
    cached_tokens: int | None = None
    prefix_hit_tokens_predicted: int = 0
    #: `engine` when the engine's usage was seen, else `estimated` (tokens counted from chunks)
    usage_source: Literal["engine", "estimated"] = "estimated"
    output_budget_tokens: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    received_unix_ms: int
    times: Times
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    #: objectives that hold for this request, ms
    ttft_objective_ms: float | None = None
    tpot_objective_ms: float | None = None
    e2e_objective_ms: float | None = None
    finish_reason: str = ""
    #: all that FleetMind needs to try elsewhere; only when not final
    ask: Ask | None = None
    #: instances not to try again; only when not final
    excluded: tuple[str, ...] = ()
    fallback: bool = False
