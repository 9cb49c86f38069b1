"""The policies that can be compared, by name: which rule places, which orders sites, which admits and orders holds.

Decides only what a name means. A name is `placement`, or `placement/sites/admission` where a part left empty is the
default of the policy `tokenfleet` (`predicted-latency/home-first/pools`). A baseline's placement is that rule alone,
with `+queue` the rule inside our holds and releases, with `+hold` one that waits for its best instance. Admissions
`fcfs`, `edf`, `sjf`, `feasible-edf` and `priced-edf` let everybody in and order what is held by that one rule; `static`
is ours with the classes' shares as configured. `concurrency` (or `concurrency-N`) and `gate` hold at the router what an
instance, or a saturated pool, may not have; `split` gives each class its own instances.

After a name, `@frozen=SECONDS` stops all feedback at that time of the run (the fleet file's `feedback = "frozen"`), and
`@shares=CLASS:SHARE,…` are classes' shares of every pool in place of the configured ones, fixed for the whole run.
"""

from typing import Any

import msgspec

from tokenfleet.fleet import Fleet, Policy
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.simulator.baselines import ORDERS, RULES, SITE_RULES, pilot, stay
from tokenfleet.simulator.errors import UnknownPolicyError
from tokenfleet.simulator.gates import Bands, Gate, Split, gate_named
from tokenfleet.slomax.core import SLOMax
from tokenfleet.slomax.policy import Chooser
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet.tokenpilot.policy import AT_ONCE

SITES = ("home-first", "round-robin", *SITE_RULES)
ADMISSIONS = ("pools", "static", "none", "concurrency", "gate", "split", *ORDERS)
#: placement rules of the live TokenPilot
LIVE_PLACEMENTS = ("predicted-latency", "least-work", "round-robin", "least-requests")

#: names for whole combinations; a baseline alone admits everybody and asks the home site
NAMED: dict[str, str] = {
    "tokenfleet": "predicted-latency/home-first/pools",
    "round-robin": "round-robin/round-robin/none",
    **{name: f"{name}/home-first/none" for name in RULES},
    **{f"{name}+{queue}": f"{name}+{queue}/home-first/pools" for name in RULES for queue in ("queue", "hold")},
}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as a run applies it."""

    name: str
    placement: str
    sites: str
    admission: str
    #: when feedback stops, s of the run; None: never
    frozen_s: float | None = None
    #: class → its share in every pool instead of the configured one; empty: as configured, and moved by feedback
    shares: dict[str, float] = {}

    @property
    def gate(self) -> Gate | None:
        """What keeps requests at the router, if anything does."""
        return gate_named(self.admission)

    def applied(self, fleet: Fleet) -> Fleet:
        """The fleet under this policy; a rule that dispatches at once has the live round robin's place."""
        gated = self.gate is not None
        others = "round-robin" if self.placement in RULES and not gated else "least-work"
        # What dispatches at once asks no gate: under one, its rule picks among those that are open.
        live = [name for name in LIVE_PLACEMENTS if not gated or name not in AT_ONCE]
        tables: dict[str, Any] = {
            "placement": self.placement if self.placement in live else others,
            "sites": "home-first" if self.sites in SITE_RULES else self.sites,
            "admission": "pools" if self.admission in ("pools", "static") else "none",
            "feedback": "off" if self.admission == "static" or self.shares else fleet.policy.feedback,
        }
        unknown = set(self.shares) - set(fleet.classes)
        if unknown:
            raise UnknownPolicyError(self.name, known())
        classes = {
            name: msgspec.structs.replace(cls, share=self.shares.get(name, cls.share))
            for name, cls in fleet.classes.items()
        }
        return msgspec.structs.replace(fleet, policy=msgspec.convert(tables, type=Policy), classes=classes)

    def tokenpilot(self, fleet: Fleet, site: str, replica: str) -> TokenPilot:
        """The TokenPilot of a site under this policy."""
        return pilot(self.placement, self.admission, fleet, site, replica)

    def fleetmind(self, fleet: Fleet, replica: str) -> FleetMind:
        """FleetMind under this policy; other systems' rules do not move what is held."""
        rule = SITE_RULES.get(self.sites)
        if rule is None:
            return FleetMind(fleet, replica=replica)
        return FleetMind(fleet, replica=replica, ranker=rule, mover=stay)

    def slomax(self, fleet: Fleet, replica: str) -> SLOMax:
        """SLOMax under this policy."""
        order: Chooser | None = ORDERS.get(self.admission)
        if self.gate is not None:
            order = Bands()
        elif self.admission == "split":
            order = Split(fleet)
        return SLOMax(fleet, replica=replica) if order is None else SLOMax(fleet, replica=replica, choose=order)


def known() -> list[str]:
    """Every name that needs no slash."""
    return [*NAMED, *(name for name in LIVE_PLACEMENTS if name not in NAMED)]


def choose(name: str) -> Choice:
    """What a policy's name means. Raises `UnknownPolicyError`."""
    base, *options = name.split("@")
    parts = NAMED.get(base, base).split("/")
    if len(parts) > 3:
        raise UnknownPolicyError(name, known())
    placement, sites, admission = (*parts, "", "")[:3]
    placement, sites, admission = placement or "predicted-latency", sites or "home-first", admission or "pools"
    rule, plus, queue = placement.partition("+")
    sound = rule in RULES and queue in ("queue", "hold") if plus else rule in RULES or rule in LIVE_PLACEMENTS
    gate = gate_named(admission)
    if gate is not None and placement == "round-robin":
        sound = False  # its turn is no rule that could pick among those that are open
    if not sound or sites not in SITES or (admission not in ADMISSIONS and gate is None):
        raise UnknownPolicyError(name, known())
    frozen_s, shares = _options(name, options)
    if (frozen_s is not None or shares) and (placement not in LIVE_PLACEMENTS or admission not in ("pools", "static")):
        raise UnknownPolicyError(name, known())  # who has no feedback cannot be frozen
    return Choice(name=name, placement=placement, sites=sites, admission=admission, frozen_s=frozen_s, shares=shares)


def _options(name: str, options: list[str]) -> tuple[float | None, dict[str, float]]:
    frozen_s: float | None = None
    shares: dict[str, float] = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            if key == "frozen":
                frozen_s = float(value)
            elif key == "shares":
                for one in value.split(","):
                    cls, _, share = one.partition(":")
                    shares[cls] = float(share)
            else:
                raise ValueError(key)
        except ValueError:
            raise UnknownPolicyError(name, known()) from None
    if any(not share > 0.0 for share in shares.values()) or (frozen_s is not None and not frozen_s >= 0.0):
        raise UnknownPolicyError(name, known())
    return frozen_s, shares
