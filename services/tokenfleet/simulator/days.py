"""Days of requests: arrivals whose rate rises and falls once a day, each group of clients at its own hour.

Decides when who asks for what: a Poisson process by thinning, sizes lognormal, all from one seed. A day may be lived in
minutes (`day_s`); whoever does that divides every other duration too (`[planning] time_scale`). Refuses to know
policies.
"""

import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenfleet.simulator.arrivals import Arrival


class Clients(msgspec.Struct, frozen=True, kw_only=True):
    """One group of clients."""

    entry: str
    tenant: str
    service_class: str
    model: str
    #: at the busiest moment of their day, requests/s
    peak_per_s: float
    #: peak over trough
    swing: float = 3.0
    #: `sine`: rises and falls all day. `shift`: hot for eight hours, with a rise before and a fall after
    shape: Literal["sine", "shift"] = "sine"
    #: of a shift: how long its rise and its fall take, hours of a day
    ramp_h: float = 1.0
    #: when their peak is, part of a day
    peak_at: float = 0.5
    input_tokens_median: float = 400.0
    output_tokens_median: float = 200.0
    sigma: float = 0.6
    output_tokens_max: int = 800
    input_tokens_max: int = 4_000


def rate_per_s(clients: Clients, at: float) -> float:
    """Their rate at a part of a day, between trough and peak."""
    low = clients.peak_per_s / clients.swing
    away = abs((at - clients.peak_at + 0.5) % 1.0 - 0.5)
    if clients.shape == "sine":
        height = (1 + math.cos(2 * math.pi * away)) / 2
    else:
        height = min(1.0, max(0.0, ((4.0 + clients.ramp_h) / 24 - away) * 24 / clients.ramp_h))
    return low + (clients.peak_per_s - low) * height


def days(groups: Sequence[Clients], seed: int, *, day_s: float, count: float = 1.0) -> list[Arrival]:
    """So many days of arrivals, in order."""
    found: list[tuple[float, int, Clients, int, int]] = []
    for number, clients in enumerate(groups):
        dice = random.Random(f"days {seed} {number}")
        at_s = 0.0
        while True:
            at_s += dice.expovariate(clients.peak_per_s)
            if at_s >= count * day_s:
                break
            if dice.random() * clients.peak_per_s > rate_per_s(clients, at_s / day_s):
                continue
            size = min(
                clients.input_tokens_max, int(dice.lognormvariate(math.log(clients.input_tokens_median), clients.sigma))
            )
            answer = min(
                clients.output_tokens_max,
                int(dice.lognormvariate(math.log(clients.output_tokens_median), clients.sigma)),
            )
            found.append((at_s, number, clients, max(16, size), max(8, answer)))
    found.sort(key=lambda one: one[:2])
    return [
        Arrival(
            index=index,
            at_ms=1000.0 * at_s,
            entry=clients.entry,
            tenant=clients.tenant,
            service_class=clients.service_class,
            task="chat",
            model=clients.model,
            input_tokens=size,
            output_tokens=answer,
            stated_output_tokens=answer,
            output_budget_tokens=clients.output_tokens_max,
            deadline_ms=None,
            blocks=(),
            block_tokens=64,
            salt=number,
        )
        for index, (at_s, number, clients, size, answer) in enumerate(found)
    ]
