"""A gateway's sign of life: everything it has open."""

from typing import Literal

from tokenfleet_schemas.event import Event, Part


class OpenRequest(Part, frozen=True, kw_only=True):
    """One open request of a gateway."""

    request_id: str
    attempt: int
    phase: Literal["waiting", "held", "dispatched", "streaming"]
    #: id of the booking in use; empty when none
    booking: str = ""
    #: where the present attempt was sent; empty when it was not, or by a gateway that does not say
    served_site: str = ""
    instance: str = ""


class GatewayLeased(Event, frozen=True, kw_only=True, tag="tokenfleet.gateway.v1.leased"):
    """Every open request of a gateway, held ones too, every two seconds.

    A booking or hold that two successive leases received after it omit, or whose gateway is silent for six seconds
    or has a new incarnation, expires.
    """

    gateway: str
    gateway_incarnation: str
    revision: int
    open: tuple[OpenRequest, ...]
    #: the gateway is shutting down in order and leaves nothing open
    closing: bool = False
