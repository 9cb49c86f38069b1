"""The policies that can be compared, by name: which rule places, which orders sites, which admits and orders holds.

Decides only what a name means. A name is `placement`, or `placement/sites/admission` where a part left empty is the
default of the policy `tokenfleet` (`least-work/home-first/pools`).
"""

import msgspec

from tokenfleet.fleet import Fleet, Policy
from tokenfleet.simulator.errors import UnknownPolicyError

SITES = ("home-first", "round-robin")
ADMISSIONS = ("pools", "none")

#: names for whole combinations
NAMED: dict[str, str] = {
    "tokenfleet": "least-work/home-first/pools",
    "round-robin": "round-robin/round-robin/none",
}
#: placement rules of the live TokenPilot
LIVE_PLACEMENTS = ("least-work", "round-robin")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as a run applies it."""

    name: str
    placement: str
    sites: str
    admission: str

    def applied(self, fleet: Fleet) -> Fleet:
        """The fleet under this policy."""
        policy = msgspec.convert(
            {"placement": self.placement, "sites": self.sites, "admission": self.admission}, type=Policy
        )
        return msgspec.structs.replace(fleet, policy=policy)


def known() -> list[str]:
    """Every name that needs no slash."""
    return [*NAMED, "least-work"]


def choose(name: str) -> Choice:
    """What a policy's name means. Raises `UnknownPolicyError`."""
    parts = NAMED.get(name, name).split("/")
    if len(parts) > 3:
        raise UnknownPolicyError(name, known())
    placement, sites, admission = (*parts, "", "")[:3]
    placement, sites, admission = placement or "least-work", sites or "home-first", admission or "pools"
    if placement not in LIVE_PLACEMENTS or sites not in SITES or admission not in ADMISSIONS:
        raise UnknownPolicyError(name, known())
    return Choice(name=name, placement=placement, sites=sites, admission=admission)
