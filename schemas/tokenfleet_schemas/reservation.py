"""Capacity promised to a tenant or class in a time window."""

from tokenfleet_schemas.event import Event


class ReservationGranted(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.granted"):
    """GPU-seconds per second of a model at `site`, exclusive within the window, borrowed while idle."""

    reservation: str
    model: str
    tenant: str = ""
    service_class: str = ""
    gpu_seconds_per_s: float
    from_unix_ms: int
    until_unix_ms: int
    revision: int = 0


class ReservationRevoked(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.revoked"):
    """A reservation ended before its window did."""

    reservation: str
    model: str
    reason: str
    revision: int = 0
