"""KV content: which prefixes an instance holds. Plain messages, msgpack, never captured by a stream."""

from tokenfleet_schemas.event import Event


class KvChanged(Event, frozen=True, kw_only=True, tag="tokenfleet.kv.v1.changed"):
    """Digests stored and removed on one instance since `sequence - 1`; both are multisets."""

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


class KvSummarised(Event, frozen=True, kw_only=True, tag="tokenfleet.kv.v1.summarised"):
    """A bounded summary of a site's prefixes for one model: the hottest digests with their hits."""

    model: str
    sequence: int
    digests: bytes
    hits: tuple[int, ...]
