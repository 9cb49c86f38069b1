"""What a core is and what it may ask for.

A core is a pure function of its inputs: a message or a wake-up goes in together with the time, effects come out.
It never awaits, logs, reads a clock or rolls dice, so the same object runs live (under `tokenfleet.runtime`) and on
the simulator's virtual clock. This module refuses to know what carries the messages or who keeps the time.
"""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from tokenfleet_schemas.event import Event


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Something a core asks its shell to do; effects are imperative, events are past."""


class Publish(Effect, frozen=True, tag=True):
    """Publish one event on the subject that `tokenfleet_schemas.routes` gives it.

    A `durable` event must not be lost: the shell keeps it in its outbox until the stream acknowledged it.
    """

    event: Event
    durable: bool = False


class WakeAt(Effect, frozen=True, tag=True):
    """Call `wake` at this time or shortly after; only the earliest outstanding wish counts."""

    at_ms: float


class Note(Effect, frozen=True, tag=True):
    """A fact for the shell to count (and, above level `debug`, to log once): reasons are data, shells log.

    `name` is a metric-safe snake_case word of a closed set per core; `labels` have few possible values;
    `detail` goes to the log line only.
    """

    name: str
    labels: dict[str, str] = {}
    detail: dict[str, str] = {}
    level: str = "debug"


class Core(Protocol):
    """The pure half of a service: `(message, now) -> effects`.

    `now_ms` is milliseconds since the epoch from a clock that never runs backwards. Handling a message twice, or a
    core's own message coming back over the bus, changes nothing the second time.
    """

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """Fold one event and return what follows from it."""
        ...

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Do what time alone makes due (hops that stayed silent, patience, leases)."""
        ...
