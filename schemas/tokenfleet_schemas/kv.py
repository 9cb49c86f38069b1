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
    """A bounded summary of a site's prefixes for one model: a sample of the digests that its instances hold.

    A digest is in it if any instance holds it and its lowest `sampled_bits` bits (little endian) are zero, so that
    whoever has a prompt's chain knows which of its digests would be here. The bits are as many as the bound on the
    message needs.
    """

    model: str
    #: rises over restarts of the sender
    sequence: int
    #: packed 8-byte digests of `tokenfleet.prefix`
    digests: bytes
    #: how often each was hit; empty where the sender does not count
    hits: tuple[int, ...]
    sampled_bits: int = 0
