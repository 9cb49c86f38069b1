"""The one place that spells subjects: message ↔ subject ↔ stream, who says it and who hears it.

A subject is always seven tokens, `tf.v1.<family>.<fact>.<site>.<model>.<leaf>`, with `_` where one does not apply.
"""

from collections.abc import Callable
from operator import attrgetter

import msgspec

from tokenfleet_schemas import streams
from tokenfleet_schemas.admission import AdmissionDecided, AdmissionLent, AdmissionOwned, AdmissionShared
from tokenfleet_schemas.capacity import CapacityProbed, CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.kv import KvChanged, KvRequested, KvSummarised
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.placement import (
    PlacementAssigned,
    PlacementDeclined,
    PlacementHeld,
    PlacementOwned,
    PlacementRefused,
    PlacementReleased,
    PlacementRequested,
    PlacementWithdrawn,
)
from tokenfleet_schemas.plan import PlanApplied, PlanIssued
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.reservation import (
    ReservationGranted,
    ReservationOwned,
    ReservationRefused,
    ReservationRequested,
    ReservationRevoked,
    ReservationWithdrawn,
)
from tokenfleet_schemas.room import RoomDeclined, RoomOffered
from tokenfleet_schemas.tokens import NONE, slug

_Getter = Callable[[Event], str]


def _none(_event: Event) -> str:
    return NONE


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """How one message travels."""

    message: type[Event]
    family: str
    fact: str
    #: stream that captures it; None: a plain message
    stream: str | None
    model: _Getter
    leaf: _Getter
    #: what the leaf is, for people and for permissions
    leaf_name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    #: must not be lost: published with acknowledgement from an outbox
    durable: bool = False

    @property
    def prefix(self) -> str:
        """First four tokens."""
        return f"tf.v1.{self.family}.{self.fact}"


def _route(
    message: type[Event],
    leaf: str,
    producers: str,
    consumers: str,
    *,
    model: str = "model",
    durable: bool = False,
) -> Route:
    family, _, fact = _family_fact(message)
    stream = next((s.name for s in streams.STREAMS if s.family == family), None)
    return Route(
        message=message,
        family=family,
        fact=fact,
        stream=stream,
        model=attrgetter(model) if model else _none,
        leaf=attrgetter(leaf) if leaf else _none,
        leaf_name=leaf.rpartition(".")[2] or NONE,
        producers=tuple(producers.split()),
        consumers=tuple(consumers.split()),
        durable=durable,
    )


def _family_fact(message: type[Event]) -> tuple[str, str, str]:
    """`tokenfleet.<family>.v1.<fact>` → (family, version, fact)."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), message
    _, family, version, fact = tag.split(".")
    return family, version, fact


ROUTES: tuple[Route, ...] = (
    _route(CapacityReported, "instance", "siteagent", "tokenpilot fleetmind slomax gateway subscriber"),
    _route(CapacityProbed, "other_site", "siteagent", "fleetmind subscriber", model=""),
    _route(RequestReceived, "ask.gateway", "gateway", "slomax accountant", model="ask.model"),
    _route(AdmissionDecided, "ask.tenant", "slomax gateway", "fleetmind slomax", model="ask.model"),
    _route(AdmissionLent, "tenant", "slomax", "slomax", model=""),
    _route(AdmissionShared, "", "slomax", "slomax"),
    _route(AdmissionOwned, "", "slomax", "slomax fleetmind", model=""),
    _route(
        PlacementRequested,
        "ask.gateway",
        "fleetmind slomax gateway",
        "tokenpilot fleetmind slomax",
        model="ask.model",
    ),
    _route(PlacementWithdrawn, "gateway", "fleetmind", "tokenpilot slomax fleetmind"),
    _route(PlacementHeld, "gateway", "tokenpilot", "slomax fleetmind gateway tokenpilot"),
    _route(PlacementReleased, "gateway", "slomax", "tokenpilot slomax"),
    _route(PlacementAssigned, "gateway", "tokenpilot", "gateway slomax fleetmind tokenpilot"),
    _route(PlacementDeclined, "gateway", "gateway", "tokenpilot slomax fleetmind"),
    _route(
        PlacementRefused,
        "gateway",
        "slomax fleetmind tokenpilot",
        "gateway slomax fleetmind tokenpilot",
    ),
    _route(PlacementOwned, "", "tokenpilot fleetmind", "tokenpilot fleetmind slomax"),
    _route(RoomOffered, "instance", "tokenpilot", "slomax tokenpilot"),
    _route(RoomDeclined, "instance", "slomax", "tokenpilot slomax"),
    _route(OutcomeStarted, "instance", "gateway", "tokenpilot accountant"),
    _route(
        OutcomeFinished,
        "instance",
        "gateway accountant",
        "accountant slomax fleetmind tokenpilot",
        durable=True,
    ),
    _route(GoodputMeasured, "service_class", "accountant", "slomax fleetmind tokenpilot subscriber"),
    _route(PlanIssued, "", "fleetmind", "siteagent fleetmind", durable=True),
    _route(PlanApplied, "", "siteagent", "fleetmind"),
    _route(ReservationRequested, "reservation", "operator", "fleetmind", durable=True),
    _route(ReservationWithdrawn, "reservation", "operator", "fleetmind", durable=True),
    _route(ReservationGranted, "reservation", "fleetmind", "fleetmind slomax", durable=True),
    _route(ReservationRefused, "reservation", "fleetmind", "fleetmind operator", durable=True),
    _route(ReservationRevoked, "reservation", "fleetmind", "fleetmind slomax", durable=True),
    _route(ReservationOwned, "", "fleetmind", "fleetmind", model=""),
    _route(GatewayLeased, "gateway", "gateway", "tokenpilot slomax fleetmind accountant", model=""),
    _route(KvChanged, "instance", "siteagent", "tokenpilot"),
    _route(KvRequested, "instance", "tokenpilot", "siteagent"),
    _route(KvSummarised, "", "siteagent", "fleetmind"),
)

BY_MESSAGE: dict[type[Event], Route] = {route.message: route for route in ROUTES}


def subject_of(event: Event) -> str:
    """The subject on which an event travels."""
    route = BY_MESSAGE[type(event)]
    return f"{route.prefix}.{slug(event.site)}.{slug(route.model(event))}.{slug(route.leaf(event))}"


def subject_filter(
    message: type[Event] | str,
    *,
    site: str | None = None,
    model: str | None = None,
    leaf: str | None = None,
) -> str:
    """A subscription filter: one message type, or a whole family by name; unnamed tokens are wildcards."""
    head = f"tf.v1.{message}.*" if isinstance(message, str) else BY_MESSAGE[message].prefix
    parts = ["*" if name is None else slug(name) for name in (site, model, leaf)]
    return ".".join([head, *parts])


def stream_of(message: type[Event] | str) -> str:
    """The stream that captures a message type or family; raises KeyError for plain messages."""
    family = message if isinstance(message, str) else BY_MESSAGE[message].family
    for spec in streams.STREAMS:
        if spec.family == family:
            return spec.name
    raise KeyError(family)
