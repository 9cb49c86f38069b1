"""The long cycle: FleetMind's replica targets and what agents made of them."""

from tokenfleet_schemas.event import Event, Part


class Target(Part, frozen=True, kw_only=True):
    """How many replicas of a model version a site should run."""

    version: str
    replicas: int
    #: of them, kept warm without traffic
    prewarmed: int = 0
    reason: str = ""
    #: work expected here within the horizon, margins included, in replicas; None: not said
    demand: float | None = None
    #: replicas that served or were starting when this was decided; None: not said
    now: int | None = None


class PlanIssued(Event, frozen=True, kw_only=True, tag="tokenfleet.plan.v1.issued"):
    """Replica targets of one model at `site`."""

    model: str
    revision: int
    targets: tuple[Target, ...]
    #: how far ahead the demand was looked at, seconds
    horizon_s: float = 0.0
    #: GPUs of the site, and what all models' targets take of them
    gpus: int = 0
    gpus_planned: int = 0


class PlanApplied(Event, frozen=True, kw_only=True, tag="tokenfleet.plan.v1.applied"):
    """What the agent at `site` made of a plan; said again whenever reality changed."""

    model: str
    revision: int
    #: id of the plan
    plan: str
    ok: bool
    #: version → replicas that are ready
    replicas: dict[str, int]
    detail: str = ""
    #: version → replicas on their way: starting, or draining before they stop
    starting: dict[str, int] = {}
    draining: dict[str, int] = {}
    #: version → replicas whose actuator refused or did not answer
    failed: dict[str, int] = {}
