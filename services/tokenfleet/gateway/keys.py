"""Who a client is, by its API key and nothing else.

Decides how long what Postgres says is believed: a revocation takes effect within `KeyCache.known_s`, and while
Postgres is down keys that were known go on working (an outage of the database is none of the service), while a key
never seen cannot be judged and is refused as unavailable. Unknown, revoked and malformed keys are told apart nowhere:
all are hashed and looked up the same way.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from tokenfleet.database import DatabaseError
from tokenfleet.gateway.openai import GatewayError
from tokenfleet.gateway.settings import KeyCache
from tokenfleet.keys import ApiKey, hash_key

#: longer ones are cut before hashing: no key is that long, and no client makes us hash megabytes
_KEY_CHARS = 256

Find = Callable[[bytes], Awaitable[ApiKey | None]]


class KeysUnavailable(GatewayError):
    """Postgres does not answer, and the key is not known from before."""


class _Entry(msgspec.Struct):
    key: ApiKey | None
    #: monotonic, seconds
    asked_s: float


class Keys:
    """A bounded cache over one look-up (`tokenfleet.keys.find`)."""

    def __init__(self, find: Find, secret: str, *, clock_s: Callable[[], float], knobs: KeyCache | None = None) -> None:
        self._find = find
        self._secret = secret
        self._salt = secrets.token_bytes(32)
        self._clock_s = clock_s
        self._knobs = knobs or KeyCache()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[ApiKey | None]] = {}
        #: the last look-up failed
        self.down = False

    async def who(self, key: str) -> ApiKey | None:
        """The key's record; None if there is none or it was revoked. Raises `KeysUnavailable`."""
        # the cache's own key, new with every process: what Postgres is asked for costs fifty times as much to make
        short = blake2b(key[:_KEY_CHARS].encode("utf-8", "surrogatepass"), digest_size=32, key=self._salt).digest()
        entry = self._entries.get(short)
        if entry is not None and self._age_s(entry) < (
            self._knobs.unknown_s if entry.key is None else self._knobs.known_s
        ):
            return entry.key
        task = self._asking.get(short)
        if task is None:
            # one look-up for all who ask at once, and none of them leaving ends it for the others
            task = asyncio.get_running_loop().create_task(
                self._look_up(short, hash_key(self._secret, key[:_KEY_CHARS]))
            )
            self._asking[short] = task
            task.add_done_callback(lambda done: self._asked(short, done))
        # a database that hangs must not hold up a client whose key was good a moment ago
        known = entry is not None and entry.key is not None and self._age_s(entry) < self._knobs.outage_s
        done, _ = await asyncio.wait({task}, timeout=self._knobs.stale_s if known else self._knobs.look_up_s)
        if done:
            return task.result()
        if entry is not None and known:
            return entry.key
        raise KeysUnavailable("API keys cannot be looked up in time")

    def _asked(self, short: bytes, done: "asyncio.Task[ApiKey | None]") -> None:
        del self._asking[short]
        if not done.cancelled():
            done.exception()  # seen: whoever waited has left, or gets it too

    async def _look_up(self, short: bytes, hashed: bytes) -> ApiKey | None:
        try:
            found = await self._find(hashed)
        except (SQLAlchemyError, OSError, TimeoutError, DatabaseError) as error:
            self.down = True
            entry = self._entries.get(short)
            if entry is not None and entry.key is not None and self._age_s(entry) < self._knobs.outage_s:
                return entry.key
            raise KeysUnavailable(f"API keys cannot be looked up: {type(error).__name__}") from None
        self.down = False
        self._entries[short] = _Entry(found, self._clock_s())
        self._entries.move_to_end(short)
        while len(self._entries) > self._knobs.entries:
            self._entries.popitem(last=False)
        return found

    def _age_s(self, entry: _Entry) -> float:
        return self._clock_s() - entry.asked_s
