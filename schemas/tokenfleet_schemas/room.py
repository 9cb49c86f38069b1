"""Room: what TokenPilot offers and SLOMax fills."""

from tokenfleet_schemas.event import Event


class RoomOffered(Event, frozen=True, kw_only=True, tag="tokenfleet.room.v1.offered"):
    """The present room of one instance, a level and not an increment, while its pool holds requests."""

    model: str
    version: str
    instance: str
    revision: int
    #: look-ahead left, prompt tokens; a request larger than it fits an instance without backlog
    prefill_tokens: int
    #: nothing waits for prefill there
    idle: bool
    sequences: int
    kv_tokens: int
    #: number of the last release that this level includes
    last_released: int
    held: int
    #: a longer prefill must not begin there now, shorter ones need the instance; 0: no limit
    longest_tokens: int = 0


class RoomDeclined(Event, frozen=True, kw_only=True, tag="tokenfleet.room.v1.declined"):
    """SLOMax leaves offered room empty for now: nothing held fits it."""

    model: str
    version: str
    instance: str
    #: id of the offer
    offer: str
    #: for how long, ms; a newer offer may come sooner
    for_ms: float
    reason: str
