"""Every read and every office of the real services is covered by their users' grants."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenfleet.accountant import service as accountant
from tokenfleet.accountant.settings import OFFICE
from tokenfleet.fleet import Fleet, parse
from tokenfleet.fleetmind import service as fleetmind
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.ownership import Lease
from tokenfleet.runtime.permissions import nats_users, user_name, user_names
from tokenfleet.runtime.runner import Read
from tokenfleet.slomax import service as slomax
from tokenfleet.slomax.core import SLOMax
from tokenfleet.tokenpilot import service as tokenpilot
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet_schemas.streams import OWNERS_BUCKET

REFERENCE = Path(__file__).resolve().parents[3] / "services/tokenfleet/local/reference.fleet.toml"


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return parse(REFERENCE.read_bytes())


def allowed(fleet: Fleet, user: str, subject: str) -> bool:
    """Whether a user may publish a subject, by NATS' rule."""
    (found,) = [one for one in nats_users(fleet, dict.fromkeys(user_names(fleet), "x")) if one.user == user]
    return any(_matches(pattern.split("."), subject.split(".")) for pattern in found.publish)


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    if pattern[-1] == ">":
        if len(tokens) < len(pattern):
            return False
        pattern, tokens = pattern[:-1], tokens[: len(pattern) - 1]
    return len(pattern) == len(tokens) and all(p in ("*", t) for p, t in zip(pattern, tokens, strict=True))


def reads(fleet: Fleet) -> list[tuple[str, Read]]:
    """(user, read) of every service that runs a core."""
    found = [("slomax", read) for read in slomax.READS]
    found += [("fleetmind", read) for read in fleetmind.READS]
    found += [("accountant", read) for read in accountant.READS]
    for site, declared in fleet.sites.items():
        if declared.instances:
            service = cast(Any, SimpleNamespace(settings=SimpleNamespace(site=site), fleet=fleet))
            found += [(user_name("tokenpilot", site), read) for read in tokenpilot.reads(service)]
    return found


def test_every_read_of_every_service_is_granted(fleet: Fleet) -> None:
    """A service reads one more message: without its grant it would wait for ever, in production only."""
    for user, read in reads(fleet):
        assert allowed(fleet, user, f"$JS.API.CONSUMER.CREATE.{read.stream}.reader-1.{read.filter}"), (user, read)
        assert allowed(fleet, user, f"$JS.API.STREAM.INFO.{read.stream}")
        assert allowed(fleet, user, f"$JS.FC.{read.stream}.reader-1.x")


def test_every_office_can_be_held_by_its_service_and_by_no_other(fleet: Fleet) -> None:
    """A new kind of office whose lease nobody may write decides nothing, and says nothing either."""
    scopes = [("accountant", OFFICE)]
    scopes += [("slomax", scope) for scope in SLOMax(fleet, replica="r").scopes()]
    scopes += [("fleetmind", scope) for scope in FleetMind(fleet, replica="r").scopes()]
    for site, declared in fleet.sites.items():
        if declared.instances:
            pilot = TokenPilot(fleet, site=site, replica="r")
            scopes += [(user_name("tokenpilot", site), scope) for scope in pilot.scopes()]
    assert len({scope for _, scope in scopes}) == len(scopes)
    for holder, scope in scopes:
        key = Lease(cast(Bus, None), scope, "r")._key
        for user in user_names(fleet):
            may = allowed(fleet, user, f"$KV.{OWNERS_BUCKET}.{key}")
            assert may == (user in (holder, "admin")), (user, scope)
