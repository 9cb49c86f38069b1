"""What the gateway remembers of its open requests. Decides nothing."""

from enum import Enum
from typing import Literal

import msgspec

from tokenfleet.effects import Effect
from tokenfleet_schemas.outcome import Outcome
from tokenfleet_schemas.placement import PlacementAssigned
from tokenfleet_schemas.request import Ask

Phase = Literal["waiting", "held", "dispatched", "streaming"]
_PHASES: dict[str, Phase] = {"held": "held", "dispatched": "dispatched", "streaming": "streaming"}


class Stage(Enum):
    """Whose answer an open request waits for."""

    #: SLOMax, FleetMind or a TokenPilot: the road takes its course
    ROAD = "road"
    #: FleetMind, after the gateway's own admission
    SITE = "site"
    #: a TokenPilot that the gateway asked itself
    INSTANCE = "instance"
    #: SLOMax's release, held by a TokenPilot
    HELD = "held"
    #: the instance's first token
    DISPATCHED = "dispatched"
    #: the instance's last token
    STREAMING = "streaming"

    #: no instance is booked
    unplaced: bool
    #: as the lease names it
    phase: Phase

    def __init__(self, value: str) -> None:
        # Asked of every open request in every lease: attributes, because members are dear to look up (Python 3.11).
        self.unplaced = value not in ("dispatched", "streaming")
        self.phase = _PHASES.get(value, "waiting")


class Open(msgspec.Struct, kw_only=True):
    """One open request."""

    ask: Ask
    #: the gateway's clock at receipt, ms
    received_ms: float
    #: when it is refused unless placed, ms
    patience_ms: float
    attempt: int = 1
    revision: int = 0
    stage: Stage = Stage.ROAD
    #: rises with every change of stage, so that old timers find nobody
    step: int = 0
    #: `request.received` sent for this attempt
    sends: int = 0
    #: a TokenPilot has held it: its end by patience is called so
    was_held: bool = False
    #: the gateway admitted it itself
    fallback: bool = False
    #: sites still to ask in this round
    sites: list[str] = []
    #: site that the gateway asked itself last
    asked_site: str = ""
    #: no allowed site was ready when last looked
    no_site: bool = False
    excluded: tuple[str, ...] = ()
    assigned: PlacementAssigned | None = None
    dispatched_ms: float | None = None
    first_token_ms: float | None = None


class End(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an attempt, as its relay saw it."""

    outcome: Outcome
    #: typed code of what went wrong
    reason: str = ""
    #: status that the client got; 0: none could be sent
    status: int = 0
    #: tokens delivered: by the engine's usage if seen, else counted
    output_tokens: int = 0
    #: prompt tokens by the engine's usage
    input_tokens: int | None = None
    cached_tokens: int | None = None
    usage_seen: bool = False
    finish_reason: str = ""
    model_served: str = ""
    response_bytes: int = 0
    #: by the gateway's clock, ms; None: did not happen
    first_byte_ms: float | None = None
    last_token_ms: float | None = None


class Dispatch(Effect, frozen=True, tag=True):
    """Send the request to this instance."""

    request_id: str
    attempt: int
    assigned: PlacementAssigned


class Refuse(Effect, frozen=True, tag=True):
    """Answer the client with this refusal; its outcome is published already."""

    request_id: str
    reason: str
    status: int
    retry_after_s: float | None = None


class Interrupt(Effect, frozen=True, tag=True):
    """End an attempt that waits for its first token: `first_token_timeout` or `instance_gone`."""

    request_id: str
    attempt: int
    reason: str
