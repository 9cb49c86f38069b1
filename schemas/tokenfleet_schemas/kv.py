"""KV content: which prefixes an instance holds. Plain messages, msgpack, never captured by a stream."""

from tokenfleet_schemas.event import Event


class KvChanged(Event, frozen=True, kw_only=True, tag="tokenfleet.kv.v1.changed"):
    """Digests that came and went on one instance since `sequence - 1`.

    Copies are counted by the sender: a digest is stored with its first copy and removed with its last, and never in
    both fields of one message. `cleared` comes before both. A sequence that does not follow means that something is
    lost: what is known of the instance is not to be relied on until a snapshot comes (`KvRequested`). Sequences rise
    over restarts of the sender.
    """

    model: str
    instance: str
    incarnation: str
    sequence: int
    #: packed 8-byte digests of `tokenfleet.prefix`
    stored: bytes = b""
    removed: bytes = b""
    cleared: bool = False
    #: the whole content, in answer to a snapshot request: forget what was known before
    snapshot: bool = False


class KvRequested(Event, frozen=True, kw_only=True, tag="tokenfleet.kv.v1.requested"):
    """A reader has lost its place: say a snapshot of one instance, or of all of the site's where none is named."""

    model: str = ""
    instance: str = ""
    #: who asks
    replica: str
    #: last sequence that it has; -1: none
    sequence: int = -1


class KvSummarised(Event, frozen=True, kw_only=True, tag="tokenfleet.kv.v1.summarised"):
    """A bounded summary of a site's prefixes for one model: the hottest digests with their hits."""

    model: str
    sequence: int
    digests: bytes
    hits: tuple[int, ...]
