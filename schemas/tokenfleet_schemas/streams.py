"""The JetStream streams: what captures each family and how long it is kept."""

from typing import Literal

import msgspec

_MIB = 1024 * 1024
_HOUR = 3600


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stream; `family` names the subjects that it captures, in every version."""

    name: str
    family: str
    max_age_s: int
    max_bytes: int
    #: 0: all; 1: a late joiner sees the last value of every subject
    max_msgs_per_subject: int = 0
    #: `new` refuses when full (facts that must not be lost), `old` drops the oldest
    discard: Literal["old", "new"] = "old"
    #: seconds in which a repeated id is stored once; never relied on for exactly-once
    duplicate_window_s: int = 10

    @property
    def subjects(self) -> tuple[str, ...]:
        """Every version of the family, so that a new version needs no reconfiguration."""
        return (f"tf.*.{self.family}.>",)


STREAMS: tuple[StreamSpec, ...] = (
    StreamSpec(
        name="TF_CAPACITY",
        family="capacity",
        max_age_s=60,
        max_bytes=64 * _MIB,
        max_msgs_per_subject=1,
    ),
    StreamSpec(name="TF_REQUEST", family="request", max_age_s=2 * _HOUR, max_bytes=1024 * _MIB),
    StreamSpec(name="TF_ADMISSION", family="admission", max_age_s=2 * _HOUR, max_bytes=1024 * _MIB),
    StreamSpec(name="TF_PLACEMENT", family="placement", max_age_s=2 * _HOUR, max_bytes=1024 * _MIB),
    StreamSpec(name="TF_ROOM", family="room", max_age_s=300, max_bytes=128 * _MIB),
    StreamSpec(
        name="TF_OUTCOME",
        family="outcome",
        max_age_s=7 * 24 * _HOUR,
        max_bytes=2048 * _MIB,
        discard="new",
    ),
    StreamSpec(name="TF_GOODPUT", family="goodput", max_age_s=28 * 24 * _HOUR, max_bytes=1024 * _MIB),
    StreamSpec(name="TF_PLAN", family="plan", max_age_s=0, max_bytes=64 * _MIB, max_msgs_per_subject=1),
    StreamSpec(
        name="TF_RESERVATION",
        family="reservation",
        max_age_s=0,
        max_bytes=64 * _MIB,
        max_msgs_per_subject=1,
    ),
    StreamSpec(name="TF_LEASE", family="gateway", max_age_s=120, max_bytes=128 * _MIB),
)

#: KV buckets (streams `KV_<name>`): leases of office, checkpoints of folds, who runs a request with an idempotency key
OWNERS_BUCKET = "TF_OWNERS"
CHECKPOINTS_BUCKET = "TF_CHECKPOINTS"
IDEMPOTENCY_BUCKET = "TF_IDEMPOTENCY"


class BucketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket: how long a key is kept after its last value, and how much it may hold; a full one refuses."""

    #: None: for ever
    ttl_s: float | None = None
    max_bytes: int | None = None


BUCKETS: dict[str, BucketSpec] = {
    OWNERS_BUCKET: BucketSpec(),
    CHECKPOINTS_BUCKET: BucketSpec(),
    IDEMPOTENCY_BUCKET: BucketSpec(ttl_s=600.0, max_bytes=64 * _MIB),
}
