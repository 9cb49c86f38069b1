"""Capacity promised to a tenant or class in a time window."""

from tokenfleet_schemas.event import Event


class ReservationRequested(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.requested"):
    """An operator asks for capacity, or for other terms of a reservation of the same name."""

    reservation: str
    model: str
    tenant: str = ""
    service_class: str = ""
    gpu_seconds_per_s: float
    from_unix_ms: int
    until_unix_ms: int


class ReservationWithdrawn(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.withdrawn"):
    """An operator gives a reservation up."""

    reservation: str
    model: str


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


class ReservationRefused(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.refused"):
    """A reservation that cannot be kept was not granted; one of the same name that stood before still stands."""

    reservation: str
    model: str
    #: over_budget, no_replicas, window, residency, …: `tokenfleet.fleetmind.planning.reservations.denial`
    reason: str


class ReservationRevoked(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.revoked"):
    """A reservation ended before its window did."""

    reservation: str
    model: str
    reason: str
    revision: int = 0


class ReservationOwned(Event, frozen=True, kw_only=True, tag="tokenfleet.reservation.v1.owned"):
    """A FleetMind replica took the office that plans and grants; grants of lower terms after this mark are void."""

    #: `plan:fleet`
    scope: str
    owner: str
