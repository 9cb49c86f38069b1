"""Who may say and hear what on NATS: one user per service and site, made from the routes' producers and consumers.

Decides the users' allow lists; everything that is not named is denied by the server. Pure: it knows no passwords but
those it is handed, opens no connection and writes no file.

What holds:

- Everybody says only what `routes` names it a producer of; a site's agent and TokenPilot only for their own site, a
  gateway's own facts only for its entry.
- Reading a stream means creating a consumer, and that is granted only as `…CREATE.<stream>.*.<filter>`: the server
  holds the request's body to the filter in the subject. Without the filter a site could read others' placements. A
  family is the unit, because one ordered reader takes a whole family to keep its facts in order.
- Nobody may fetch messages by sequence (`STREAM.MSG.GET`, `DIRECT.GET` of a stream), list or delete consumers: names of
  consumers are random and known to their owners only, and they end by themselves.
- Replies arrive under the user's own prefix `_INBOX_<user>`, which nobody else may subscribe to.
- An office's lease may be written only by services that hold such offices, at a site only for that site.

Sources: NATS documentation, "Authorization" and the JetStream API subjects of ADR-15 (simplified consumers).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tokenfleet.fleet import Fleet
from tokenfleet_schemas.routes import ROUTES, Route, subject_filter
from tokenfleet_schemas.streams import CHECKPOINTS_BUCKET, IDEMPOTENCY_BUCKET, OWNERS_BUCKET, STREAMS
from tokenfleet_schemas.tokens import slug

#: may do everything: creates streams and buckets
ADMIN = "admin"
#: reads what is public: capacity and goodput
SUBSCRIBER = "subscriber"
#: one user each for the whole fleet
FLEET_SERVICES = ("slomax", "fleetmind", "accountant")
#: one user each for every site
SITE_SERVICES = ("siteagent", "tokenpilot")
#: families captured at the entry; in all others `site` is the one that the fact is about
ENTRY_FAMILIES = frozenset({"request", "admission", "outcome", "gateway"})

#: first part of the scopes whose leases a service may hold
_OFFICES = {"tokenpilot": ("pool",), "slomax": ("admission", "release"), "fleetmind": ("model", "plan")}
#: offices without parts: one for the whole fleet
_FLEET_OFFICES = {"accountant": ("goodput",)}
_CHECKPOINTED = (*FLEET_SERVICES, *SITE_SERVICES)


class PermissionsError(ValueError):
    """Users cannot be made from this fleet and these passwords."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One NATS user with what it may publish and subscribe to."""

    user: str
    password: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    @property
    def inbox_prefix(self) -> str:
        """To be passed to `nats.connect(inbox_prefix=…)`: replies elsewhere are denied."""
        return f"_INBOX_{self.user}"

    def entry(self) -> dict[str, object]:
        """The user as an entry of NATS' `authorization.users`."""
        return {
            "user": self.user,
            "password": self.password,
            "permissions": {"publish": {"allow": list(self.publish)}, "subscribe": {"allow": list(self.subscribe)}},
        }


def user_name(service: str, site: str = "") -> str:
    """The user of a service, of a site where it has one there: `siteagent-b`, `slomax`."""
    return f"{service}-{slug(site)}" if site else service


def user_names(fleet: Fleet) -> list[str]:
    """Every user that a fleet needs a password for, in a fixed order."""
    return [name for name, _, _ in _people(fleet)]


def nats_users(fleet: Fleet, passwords: Mapping[str, str]) -> list[User]:
    """All users of a fleet; raises `PermissionsError` naming those without a password."""
    missing = [name for name in user_names(fleet) if not passwords.get(name)]
    if missing:
        raise PermissionsError(f"no password for {', '.join(missing)}")
    return [
        User(
            user=name,
            password=passwords[name],
            publish=_unique(_may_publish(service, site)),
            subscribe=_unique(_may_subscribe(name, service, site)),
        )
        for name, service, site in _people(fleet)
    ]


def render_config(users: Iterable[User]) -> str:
    """The `authorization` block, to be included in a server's configuration. Contains the passwords."""
    block = json.dumps({"users": [user.entry() for user in users]}, indent=2)
    return f"authorization: {block}\n"


def _people(fleet: Fleet) -> Iterator[tuple[str, str, str]]:
    """(user, service, site) of everybody."""
    yield ADMIN, ADMIN, ""
    yield SUBSCRIBER, SUBSCRIBER, ""
    for service in FLEET_SERVICES:
        yield service, service, ""
    for name, site in fleet.sites.items():
        if site.entry:
            yield user_name("gateway", name), "gateway", name
        for service in SITE_SERVICES:
            yield user_name(service, name), service, name


def _may_publish(service: str, site: str) -> Iterator[str]:
    if service == ADMIN:
        yield ">"
        return
    for route in ROUTES:
        if service in route.producers:
            yield subject_filter(route.message, site=_bound(service, site, route))
    families = _families(service)
    readable = {route.stream for route in ROUTES if route.family in families and route.stream}
    # every service waits for all streams to be there; a subscriber learns only of those that it reads
    for spec in STREAMS:
        if service != SUBSCRIBER or spec.name in readable:
            yield f"$JS.API.STREAM.INFO.{spec.name}"
    for route in ROUTES:
        if route.family not in families or route.stream is None:
            continue
        head = f"$JS.API.CONSUMER.CREATE.{route.stream}.*"
        yield f"{head}.{subject_filter(route.family, site=_bound(service, site, route))}"
        if route.fact == "owned" and service in route.consumers:
            yield f"{head}.{subject_filter(route.message)}"  # marks of office of others void what they said
        yield f"$JS.FC.{route.stream}.>"
    if service == SUBSCRIBER:
        yield from _any_client(readable)
    if service == "accountant":
        yield from _work_queue(readable)
    yield from _buckets(service, site)


def _may_subscribe(name: str, service: str, site: str) -> Iterator[str]:
    if service == ADMIN:
        yield ">"
        return
    yield f"_INBOX_{name}.>"
    for route in ROUTES:
        # plain messages have no stream to read from; a subscriber may use any NATS client without JetStream
        if service in route.consumers and (route.stream is None or service == SUBSCRIBER):
            yield subject_filter(route.message, site=_bound(service, site, route))


def _bound(service: str, site: str, route: Route) -> str | None:
    """The site that a user's subjects of a route are held to; None: any."""
    if service in SITE_SERVICES:
        # a site's TokenPilot hears outcomes and leases of every entry that it serves
        return site if route.family not in ENTRY_FAMILIES or service in route.producers else None
    if service == "gateway":
        return site if route.family in ENTRY_FAMILIES and service in route.producers else None
    return None


def _families(service: str) -> frozenset[str]:
    return frozenset(route.family for route in ROUTES if service in route.consumers)


def _any_client(readable: Iterable[str]) -> Iterator[str]:
    """What common clients use beside named, filtered consumers; all of these streams may be read anyway."""
    yield "$JS.API.STREAM.NAMES"
    for stream in sorted(readable):
        yield f"$JS.API.CONSUMER.CREATE.{stream}"
        yield f"$JS.API.CONSUMER.CREATE.{stream}.>"
        yield f"$JS.API.CONSUMER.INFO.{stream}.*"
        yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
        yield f"$JS.ACK.{stream}.>"


def _work_queue(readable: Iterable[str]) -> Iterator[str]:
    """Durable pull consumers, shared by the replicas of one service."""
    for stream in sorted(readable):
        yield f"$JS.API.CONSUMER.INFO.{stream}.*"
        yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
        yield f"$JS.ACK.{stream}.>"


def _buckets(service: str, site: str) -> Iterator[str]:
    """Leases of office, the fold's own checkpoint and gateways' claims, as nats-py reads and writes KV buckets."""
    keys = [
        (OWNERS_BUCKET, ".".join([office, *([_key(site)] if service in SITE_SERVICES else []), ">"]))
        for office in _OFFICES.get(service, ())
    ]
    keys += [(OWNERS_BUCKET, office) for office in _FLEET_OFFICES.get(service, ())]
    if service in _CHECKPOINTED:
        keys.append((CHECKPOINTS_BUCKET, f"{service}.{_key(site) if service in SITE_SERVICES else '>'}"))
    if service == "gateway":
        keys.append((IDEMPOTENCY_BUCKET, "*"))  # one bucket for all: a key's repeat may come to any gateway
    for bucket, key in keys:
        yield f"$JS.API.STREAM.INFO.KV_{bucket}"
        yield f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}"
        yield f"$KV.{bucket}.{key}"


def _key(name: str) -> str:
    """A name as the runtime writes it into a bucket's key."""
    return re.sub(r"[^A-Za-z0-9._=-]", "-", name)


def _unique(subjects: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subjects))
