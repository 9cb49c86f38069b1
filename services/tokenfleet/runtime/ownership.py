"""Offices: one owner at a time for each scope, by compare-and-set in a KV bucket.

A lease is judged by the age of its last change on this process's monotonic clock, never by a time that another
machine wrote (clock skew makes two owners otherwise). The term of an owner is the bucket's revision at which it took
office, so a later owner always has a higher one, and its mark in the streams voids what a predecessor still says.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable

import msgspec
import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from tokenfleet.runtime.bus import Bus
from tokenfleet_schemas.streams import OWNERS_BUCKET

log = logging.getLogger("tokenfleet.ownership")

#: an unchanged lease of this age may be taken over
LEASE_S = 1.2
#: how often an owner renews and a standby looks
RENEW_S = 0.4
LOOK_S = 0.3


class _Holder(msgspec.Struct, frozen=True):
    owner: str
    beat: int = 0
    released: bool = False


class Lease:
    """One scope's lease: `await run()` tries to hold it until cancelled, then gives it back."""

    def __init__(
        self,
        bus: Bus,
        scope: str,
        replica: str,
        *,
        taken: Callable[[int], None] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> None:
        self.scope = scope
        self.replica = replica
        #: this replica holds the office now
        self.held = False
        #: the bucket's revision at which it was taken
        self.term = 0
        self._bus = bus
        self._key = re.sub(r"[^A-Za-z0-9._=-]", "-", scope.replace(":", "."))
        self._taken = taken
        self._lost = lost
        self._revision = 0
        self._seen = (0, 0.0)
        self._connection = 0
        self._beat = 0

    async def run(self) -> None:
        """Hold or stand by until cancelled."""
        try:
            while True:
                try:
                    if self._bus.connected:
                        await self._step(await self._bus.bucket(OWNERS_BUCKET))
                except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                    log.debug("lease", extra={"scope": self.scope, "error": repr(error)})
                await asyncio.sleep(RENEW_S if self.held else LOOK_S)
        finally:
            await self._give_back()

    async def _step(self, bucket: KeyValue) -> None:
        if self._connection != self._bus.connections:
            # silence counts only while connected: look at the lease anew
            self._connection = self._bus.connections
            self._seen = (0, 0.0)
        if self.held:
            await self._renew(bucket)
        else:
            await self._look(bucket)

    async def _renew(self, bucket: KeyValue) -> None:
        self._beat += 1
        value = msgspec.json.encode(_Holder(self.replica, self._beat))
        try:
            self._revision = await bucket.update(self._key, value, last=self._revision)
        except nats.js.errors.KeyWrongLastSequenceError:
            entry = await self._get(bucket)
            if entry is not None and entry[1].owner == self.replica and not entry[1].released:
                self._revision = entry[0]  # our own update whose acknowledgement was lost
                return
            self._drop()

    async def _look(self, bucket: KeyValue) -> None:
        found = await self._get(bucket)
        now = time.monotonic()
        if found is not None and not found[1].released:
            if self._seen[0] != found[0]:
                self._seen = (found[0], now)
                return
            if now - self._seen[1] < LEASE_S:
                return
        value = msgspec.json.encode(_Holder(self.replica))
        try:
            if found is None:
                self._revision = await bucket.create(self._key, value)
            else:
                self._revision = await bucket.update(self._key, value, last=found[0])
        except nats.js.errors.KeyWrongLastSequenceError:
            return  # somebody else was faster
        self.held, self.term = True, self._revision
        log.info("took office", extra={"scope": self.scope, "term": self.term})
        if self._taken is not None:
            self._taken(self.term)

    async def _get(self, bucket: KeyValue) -> tuple[int, _Holder] | None:
        try:
            entry = await bucket.get(self._key)
        except nats.js.errors.NotFoundError:
            return None
        holder = msgspec.json.decode(entry.value or b"{}", type=_Holder)
        return int(entry.revision or 0), holder

    def _drop(self) -> None:
        self.held = False
        self._seen = (0, 0.0)
        log.warning("lost office", extra={"scope": self.scope, "term": self.term})
        if self._lost is not None:
            self._lost()

    async def _give_back(self) -> None:
        if not self.held or not self._bus.connected:
            return
        self.held = False
        value = msgspec.json.encode(_Holder(self.replica, self._beat, released=True))
        try:
            bucket = await self._bus.bucket(OWNERS_BUCKET)
            try:
                await bucket.update(self._key, value, last=self._revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                # a renewal was on its way when we were told to stop
                entry = await self._get(bucket)
                if entry is not None and entry[1].owner == self.replica and not entry[1].released:
                    await bucket.update(self._key, value, last=entry[0])
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            log.debug("lease not given back", extra={"scope": self.scope, "error": repr(error)})
