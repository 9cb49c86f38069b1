"""The cores with their feedback stopped at a moment: what a run would be if nobody learned from it any more.

Decides what counts as feedback: all that is learned from outcomes and goodput windows, namely TokenPilot's predictions
(prefill, pace, residuals, margins), lengths and trust in prefixes, SLOMax's shares and what it knows of answers' pace.
What a core sees at once stays: bookings, reports, holds, breakers, look-ahead. So a frozen run still balances load and
orders deadlines; it only believes for ever what it had learned when it was frozen.
"""

from collections.abc import Iterator

import msgspec

from tokenfleet.effects import Effect
from tokenfleet.slomax.core import SLOMax
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet.tokenpilot.state import Booking
from tokenfleet_schemas.outcome import OutcomeFinished


class FrozenPilot(TokenPilot):
    """A TokenPilot that learns from no outcome after `frozen_ms`."""

    frozen_ms = 0.0

    def _learn(self, message: OutcomeFinished, booking: Booking | None, now_ms: float) -> Iterator[Effect]:
        if now_ms < self.frozen_ms:
            yield from super()._learn(message, booking, now_ms)


class FrozenSLOMax(SLOMax):
    """A SLOMax whose shares and paces stay as they are at `frozen_ms`."""

    frozen_ms = 0.0

    def _share(self, now_ms: float) -> None:
        if now_ms >= self.frozen_ms and self.fleet.policy.feedback != "off":
            self.fleet = msgspec.structs.replace(
                self.fleet, policy=msgspec.structs.replace(self.fleet.policy, feedback="off")
            )
        super()._share(now_ms)

    def _finished(self, message: OutcomeFinished, now_ms: float) -> None:
        kept = {model: msgspec.structs.replace(tempo) for model, tempo in self.state.tempos.items()}
        super()._finished(message, now_ms)
        if now_ms >= self.frozen_ms:
            self.state.tempos = kept
