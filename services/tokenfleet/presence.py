"""Which open requests have outlived their gateway: the fold of `gateway.leased`.

Decides that a request has expired: two successive leases received after it omit it, its gateway has been silent for
six seconds, or a new incarnation of the gateway speaks. Refuses to call it silence while the listener itself heard
nothing from anybody: that is its own deafness, and after it every gateway starts anew.
"""

import msgspec

from tokenfleet_schemas.lease import GatewayLeased

#: a gateway says every 2 s what it has open; three missed in a row and it is gone
SILENT_MS = 6_000.0
#: agents report every second and gateways lease every two: so long without any message means that we are deaf
DEAF_MS = 3_500.0
OMITTED_MAX = 2


class Watched(msgspec.Struct):
    """One open request of a gateway; incarnation is empty where the message that opened it does not say."""

    incarnation: str
    omitted: int = 0


class Sign(msgspec.Struct):
    """The last sign of life of a gateway."""

    heard_ms: float
    incarnation: str = ""
    revision: int = -1
    open: dict[str, Watched] = {}


class Presence(msgspec.Struct):
    """Gateways, what they have open, and when anything at all was heard. Part of a core's checkpoint."""

    gateways: dict[str, Sign] = {}
    heard_ms: float = 0.0

    def hear(self, now_ms: float) -> bool:
        """Some message arrived; True when it ends a deaf spell, so that every timer must start anew."""
        was_deaf = self.heard_ms > 0 and now_ms - self.heard_ms > DEAF_MS
        if now_ms > self.heard_ms:
            self.heard_ms = now_ms
        if was_deaf:
            for sign in self.gateways.values():
                sign.heard_ms = max(sign.heard_ms, now_ms)
        return was_deaf

    def open(self, request_id: str, gateway: str, incarnation: str, now_ms: float) -> None:
        """A gateway has a request open; a gateway not heard before starts its silence here."""
        sign = self.gateways.setdefault(gateway, Sign(now_ms))
        known = sign.open.get(request_id)
        if known is None:
            sign.open[request_id] = Watched(incarnation)
        elif incarnation and not known.incarnation:
            known.incarnation = incarnation

    def close(self, request_id: str, gateway: str) -> None:
        """The request ended; unknown ones are fine."""
        sign = self.gateways.get(gateway)
        if sign is not None:
            sign.open.pop(request_id, None)

    def lease(self, lease: GatewayLeased, now_ms: float) -> list[str]:
        """Fold a lease; returns the requests that expire with it. A redelivered lease proves nothing new."""
        sign = self.gateways.setdefault(lease.gateway, Sign(now_ms))
        expired: list[str] = []
        if lease.gateway_incarnation != sign.incarnation:
            # A request of a third incarnation may be the newest: it is only counted as omitted until its lease comes.
            old = sign.incarnation
            expired += [rid for rid, one in sign.open.items() if old and one.incarnation == old]
            sign.incarnation, sign.revision = lease.gateway_incarnation, -1
        if lease.revision <= sign.revision:
            return expired
        sign.revision = lease.revision
        sign.heard_ms = max(sign.heard_ms, now_ms)
        said = {one.request_id for one in lease.open}
        for request_id, watched in sign.open.items():
            watched.omitted = 0 if request_id in said else watched.omitted + 1
            if watched.omitted >= OMITTED_MAX or (lease.closing and request_id not in said):
                expired.append(request_id)
        return list(dict.fromkeys(expired))

    def silent(self, now_ms: float) -> list[str]:
        """Requests whose gateway has been silent too long, unless we are deaf ourselves; forgets idle gateways."""
        if now_ms - self.heard_ms > DEAF_MS:
            return []
        expired: list[str] = []
        for name, sign in list(self.gateways.items()):
            if now_ms - sign.heard_ms > SILENT_MS:
                expired += sign.open
                if now_ms - sign.heard_ms > 10 * SILENT_MS and not sign.open:
                    del self.gateways[name]
        return expired

    def next_ms(self) -> float:
        """When `silent` may first have something to say; infinity while nothing is open."""
        oldest_ms = float("inf")
        for sign in self.gateways.values():  # asked after every message: no generator
            if sign.open and sign.heard_ms < oldest_ms:
                oldest_ms = sign.heard_ms
        return oldest_ms + SILENT_MS + 1
