"""The long cycle: FleetMind's replica targets and what agents made of them."""

from tokenfleet_schemas.event import Event, Part


class Target(Part, frozen=True, kw_only=True):
    """How many replicas of a model version a site should run."""

    version: str
    replicas: int
    #: of them, kept warm without traffic
    prewarmed: int = 0
    reason: str = ""


class PlanIssued(Event, frozen=True, kw_only=True, tag="tokenfleet.plan.v1.issued"):
    """Replica targets of one model at `site`."""

    model: str
    revision: int
    targets: tuple[Target, ...]


class PlanApplied(Event, frozen=True, kw_only=True, tag="tokenfleet.plan.v1.applied"):
    """What the agent at `site` made of a plan."""

    model: str
    revision: int
    #: id of the plan
    plan: str
    ok: bool
    replicas: dict[str, int]
    detail: str = ""
