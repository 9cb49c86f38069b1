"""Where: the road of a request from a site to an instance, held or at once."""

from tokenfleet_schemas.event import Event, Part
from tokenfleet_schemas.request import Ask


class Considered(Part, frozen=True, kw_only=True):
    """One candidate (site or instance) of a decision: why it was out, or what it scored."""

    name: str
    #: why it was filtered out; empty when it was scored
    out: str = ""
    #: the terms of the score, lower total is better
    terms: dict[str, float] = {}
    chosen: bool = False


class Work(Part, frozen=True, kw_only=True):
    """What a request will occupy on an instance."""

    #: prompt tokens to compute, after the expected prefix hit
    prefill_tokens: int
    #: output tokens expected (not the budget)
    decode_tokens: int
    #: KV room at its end, tokens
    kv_tokens: int
    #: those of them that sequences hold there already, and that need no room a second time
    shared_kv_tokens: int = 0

    @property
    def own_kv_tokens(self) -> int:
        """KV room that it needs beside what is there, tokens."""
        return self.kv_tokens - self.shared_kv_tokens


class PlacementRequested(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.requested"):
    """FleetMind (or a fallback) asks the TokenPilot of `site` for an instance."""

    ask: Ask
    attempt: int = 1
    revision: int = 0
    elapsed_ms: float = 0.0
    #: instances that failed this request before
    excluded: tuple[str, ...] = ()
    sites: tuple[Considered, ...] = ()
    #: who asked in FleetMind's stead; empty: FleetMind itself
    fallback: str = ""


class PlacementWithdrawn(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.withdrawn"):
    """FleetMind takes a held request back from `site`, to move it."""

    request_id: str
    gateway: str
    model: str
    version: str
    attempt: int
    revision: int
    moved_to: str


class PlacementHeld(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.held"):
    """No instance worth using has room: the request waits for SLOMax's release. Nothing is booked."""

    request_id: str
    gateway: str
    entry: str
    tenant: str
    service_class: str
    model: str
    version: str
    attempt: int
    revision: int
    #: instance that would serve it best
    home_instance: str
    prefix_hit_tokens: int = 0
    work: Work
    #: wait at the home instance and the request's own prefill there, ms
    predicted_wait_ms: float
    predicted_own_ms: float
    #: time left until the first token is late, ms, when said; None: no objective
    slack_ms: float | None = None
    #: of the request's patience, when said
    patience_left_ms: float
    received_unix_ms: int
    #: which room was lacking: prefill_tokens, kv_tokens, sequences or newcomer (others wait already); or instance:
    #: none here can serve it now, releasing it is no use until it is held again for want of room
    lacks: str
    #: number of the release that could not be used, if one was tried; the request keeps its place
    after_release: int = 0
    #: only room of its home instance is worth waiting for: elsewhere its cached prefix would be lost
    bound: bool = False
    #: how often this revision was held here before: the newest answer counts
    turn: int = 0
    candidates: tuple[Considered, ...] = ()


class PlacementReleased(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.released"):
    """SLOMax lets the next held request of a pool go; `number` counts per pool and owner's term."""

    request_id: str
    gateway: str
    model: str
    version: str
    attempt: int
    revision: int
    number: int
    #: the instance whose room is filled
    instance: str
    #: why this one was next
    reason: str = ""


class PlacementAssigned(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.assigned"):
    """An instance is booked for a request; the booking is known by this event's id."""

    request_id: str
    gateway: str
    tenant: str
    service_class: str
    model: str
    version: str
    attempt: int
    revision: int
    instance: str
    #: of the instance, when booked
    incarnation: str
    endpoint_url: str
    #: name of the credential to send
    credential: str = ""
    work: Work
    prefix_hit_tokens: int = 0
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    #: `room`, `released`, `unanswered` (offer filled without SLOMax) or `fallback`
    how: str = "room"
    release_number: int = 0
    candidates: tuple[Considered, ...] = ()
    #: sites that were considered, carried on from the request for `explain`
    sites: tuple[Considered, ...] = ()


class PlacementDeclined(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.declined"):
    """A gateway does not use an assignment or hold (closed, superseded): it is dropped, no row is written."""

    request_id: str
    gateway: str
    model: str
    version: str
    attempt: int
    revision: int
    #: id of the `assigned` or `held` that is declined
    declined: str
    instance: str = ""
    reason: str


class PlacementRefused(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.refused"):
    """The request will not be served: the gateway answers with this status."""

    request_id: str
    gateway: str
    model: str
    version: str
    attempt: int
    revision: int
    #: of `tokenfleet_schemas.admission.REASONS`
    reason: str
    status: int
    retry_after_s: float | None = None
    #: for the operator; never shown to the client
    detail: str = ""
    sites: tuple[Considered, ...] = ()


class PlacementOwned(Event, frozen=True, kw_only=True, tag="tokenfleet.placement.v1.owned"):
    """A replica took office for a scope; lower terms after this mark are void."""

    #: `pool:<site>:<model>:<version>` (TokenPilot) or `model:<model>` (FleetMind)
    scope: str
    owner: str
    model: str
