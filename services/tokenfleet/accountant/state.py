"""What the accountant remembers between messages. Decides nothing; all of it can be saved in a checkpoint."""

import msgspec

from tokenfleet.accountant.windows import Bucket, Sample
from tokenfleet.presence import Presence
from tokenfleet_schemas.request import Ask


class OpenRequest(msgspec.Struct, kw_only=True):
    """A request without its final outcome."""

    #: without the prefix digest, which is long and needed by nobody here
    ask: Ask
    #: when it was first heard of, ms
    seen_ms: float
    #: last attempt known; 0 as long as nobody saw it dispatched
    attempt: int = 0
    #: highest attempt that ended without being final
    ended_attempt: int = 0
    booking: str = ""
    served_site: str = ""
    instance: str = ""
    ttft_ms: float | None = None
    predicted_ttft_ms: float | None = None


class Expired(msgspec.Struct):
    """A request whose gateway is gone: closed at `close_ms` unless its outcome comes."""

    close_ms: float
    reason: str
    #: this replica said so already; nobody else did as long as the outcome was not read back
    said: bool = False


class Clock(msgspec.Struct):
    """How far a gateway's clock is behind ours: stream time of its last lease − its own stamp, ms."""

    offset_ms: float


class State(msgspec.Struct, kw_only=True):
    """The whole fold, apart from the windows' sums, which follow from the samples."""

    open: dict[str, OpenRequest] = {}
    expired: dict[str, Expired] = {}
    presence: Presence = msgspec.field(default_factory=Presence)
    clocks: dict[str, Clock] = {}
    #: request id → when its final outcome came; true ones and `owner_lost` alike
    closed: dict[str, float] = {}
    #: (request id, attempt) in one string → when it was counted
    counted: dict[str, float] = {}
    #: request id → its `owner_lost` as counted, to be taken back when the truth comes
    lost: dict[str, Sample] = {}


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. `layout` rises when an older one can no longer be read."""

    layout: int
    state: State
    buckets: list[Bucket]
    medians: list[tuple[str, str, list[int]]]


#: of `Saved`
LAYOUT = 3
