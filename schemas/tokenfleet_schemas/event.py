"""The base of every message: who caused it, when, where, and under which term of office.

Decides only what all messages share. Subjects, streams and producers are `routes.py`'s business.
"""

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One past fact on the bus. The tag in field `type` is the truth about its shape and version.

    Unknown fields are ignored when decoding, so a field with a default may be added within a version; any other
    change is a new Struct with a new version.
    """

    #: derives from the cause, attempt and revision; sent as `Nats-Msg-Id`, so a repeat keeps its id
    id: str
    #: id of the event that this one follows from; empty when a client or a clock began it
    cause: str = ""
    #: term of the deciding owner that said it; 0 where nobody needs an office to say it
    term: int = 0
    #: sender's clock, milliseconds since the epoch: for people and reports, never for judging a lease
    time_unix_ms: int = 0
    #: where the fact is captured: entry site for requests, admissions, outcomes, leases; target site for placement
    site: str = ""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A structure inside messages; the same rules of evolution hold."""
