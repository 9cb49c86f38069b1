"""One run for each `Idempotency-Key`, whichever gateway its repeats reach.

Decides who runs a request that comes with a key, who follows that run, and who is told to come again. The claim on a
key is a value in a KV bucket that is made only where none is (compare-and-set), so of all gateways one runs. A run
with a key belongs to nobody's connection: it goes on when its client gives up, and its answer is kept in the memory of
the gateway that made it, for who asks there again. An answer is text and never travels to another gateway: there a
repeat gets 409 and the time after which to ask again.

What is not known is refused (503), never run: the bus is away, or does not say who holds a key. A run that ended
without a whole answer gives its key free. A claim that its gateway has not renewed for `claim_silent_s` by the bus's
own clock is free for others; who has lost a claim stops its run. After `answer_kept_s` a key is forgotten. The bucket
holds keyed hashes of tenant, key and body, and names of gateways.

Refuses to know what a request is and how it is served. Source: the IETF draft "The Idempotency-Key HTTP Header Field"
for 409 and 422, and for scoping keys to who is authenticated.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
import nats.errors
import nats.js.errors
from aiohttp import web

from tokenfleet.eligibility import retry_after_s
from tokenfleet.gateway.openai import ApiError, bad_request, refusal
from tokenfleet.gateway.settings import Limits
from tokenfleet.runtime.bus import Bus, unix_ms
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas.streams import IDEMPOTENCY_BUCKET

log = logging.getLogger("tokenfleet.gateway.idempotency")

HEADER = "Idempotency-Key"
#: says that the answer is that of an earlier request with this key
REPEATED = {"X-Tokenfleet-Repeated": "true"}
_KEY_CHARS = 255
#: a client that takes less than this in its time has stalled
_WRITE_BYTES = 65_536
#: what the bus may raise, and what it says when somebody else was faster
_BUS = (nats.errors.Error, nats.js.errors.Error, TimeoutError, msgspec.DecodeError)
_FASTER = nats.js.errors.KeyWrongLastSequenceError


class Claim(msgspec.Struct, frozen=True):
    """A key's value in the bucket."""

    gateway: str
    incarnation: str
    request_id: str
    #: keyed hash of the endpoint and the body's bytes
    body: str
    #: `free`: it ended without a whole answer
    state: Literal["running", "answered", "free"] = "running"


class Kept:
    """An answer in the making, as the relay writes it: kept whole, for any number of readers, however slow they are."""

    def __init__(self) -> None:
        self.status = 0
        self.error: ApiError | None = None
        #: all of it is here, and it is what the engine meant to say
        self.complete = False
        self.size = 0
        self._headers: dict[str, str] = {}
        self._whole = False
        self._pieces: list[bytes] = []
        self._over = False
        self._news = asyncio.Event()

    # --- as the relay sees it: a response of aiohttp's ---------------------------------------------------------

    def begin(self, headers: dict[str, str], body: bytes | None) -> "Kept":
        """The answer's head, and all of its body if it is there already."""
        self._headers, self._whole = headers, body is not None
        if body:
            self._add(body)
        return self

    async def prepare(self, _request: web.BaseRequest) -> None:
        """The head goes out."""
        self.status = 200
        self._tell()

    async def write(self, data: bytes) -> None:
        """A part of the body."""
        self._add(data)
        self._tell()

    async def write_eof(self, data: bytes = b"") -> None:
        """The last part of the body."""
        self._add(data)
        self._over = True
        self._tell()

    def _add(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self.size += len(data)

    # --- as its owner sees it ----------------------------------------------------------------------------------

    def fail(self, error: ApiError) -> None:
        """Whoever waits for it, or reads it, gets no (more) answer."""
        if not self._over:
            self.error, self._over = error, True
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # --- as a client's handler sees it -------------------------------------------------------------------------

    async def follow(self, request: web.BaseRequest, *, repeated: bool, stall_s: float) -> web.StreamResponse:
        """Answer a client with it, as it comes. Raises `ApiError`; ConnectionResetError when the client has left."""
        while not self.status and not self._over:
            await self._news.wait()
        if not self.status:
            assert self.error is not None
            raise self.error
        headers = {**self._headers, **(REPEATED if repeated else {})}
        response: web.StreamResponse
        try:
            if self._whole:
                response = web.Response(body=b"".join(self._pieces), headers=headers)
                async with asyncio.timeout(stall_s):
                    await response.prepare(request)
                    await response.write_eof()
                return response
            response = web.StreamResponse(headers=headers)
            async with asyncio.timeout(stall_s):
                await response.prepare(request)
            at = 0
            while True:
                news = self._news
                data, at = self._from(at)
                if data:
                    async with asyncio.timeout(stall_s):
                        await response.write(data)
                elif self._over:
                    break
                else:
                    await news.wait()
            if self.error is None:
                async with asyncio.timeout(stall_s):
                    await response.write_eof()
                return response
        except TimeoutError:
            pass  # it does not read
        if isinstance(request.transport, asyncio.Transport):
            request.transport.abort()  # what it has got is no whole answer
        return response

    def _from(self, at: int) -> tuple[bytes, int]:
        """The body from a piece on, as much as is written at once, and the piece after it."""
        end, size = at, 0
        while end < len(self._pieces) and size < _WRITE_BYTES:
            size += len(self._pieces[end])
            end += 1
        return b"".join(self._pieces[at:end]), end


class _Held(msgspec.Struct):
    """A claim of this process."""

    claim: Claim
    kept: Kept
    #: of the key in the bucket; 0: not there yet
    revision: int = 0
    work: "asyncio.Task[None] | None" = None
    #: when it is forgotten, once it is settled; monotonic, s
    until_s: float | None = None


class Once:
    """The keys that this gateway runs or has answered, and the way to those of others."""

    def __init__(self, bus: Bus, *, secret: str, gateway: str, incarnation: str, limits: Limits) -> None:
        self._bus = bus
        self._secret = secret.encode()
        self._gateway = gateway
        self._incarnation = incarnation
        self._limits = limits
        self._held: dict[str, _Held] = {}
        #: what the bucket must still be told
        self._unsettled: dict[str, _Held] = {}
        self._connection = (0, 0.0)
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    # --- names -------------------------------------------------------------------------------------------------

    def name(self, tenant: str, key: str) -> str:
        """A tenant's key as the bucket knows it: no other tenant's, and nothing of its words."""
        return self._hash(b"key", tenant.encode(), key.encode())

    def digest(self, endpoint: str, body: bytes | bytearray) -> str:
        """By which a repeat is known to ask the same."""
        return self._hash(b"body", endpoint.encode(), body)

    def _hash(self, *parts: bytes | bytearray) -> str:
        made = hmac.new(self._secret, digestmod="sha256")
        for part in (b"tokenfleet idempotency", *parts):
            made.update(b"%d\0" % len(part))
            made.update(part)
        return made.hexdigest()

    # --- requests ----------------------------------------------------------------------------------------------

    def find(self, name: str, body: str) -> Kept | None:
        """The run or the answer that this gateway has under a key. Raises `ApiError` 422 for another body."""
        held = self._held.get(name)
        if held is None:
            return None
        if held.claim.body != body:
            raise _other_body()
        return held.kept

    async def begin(
        self, name: str, body: str, request_id: str, work: Callable[[Kept], Coroutine[Any, Any, bool]]
    ) -> Kept:
        """Claim a key that `find` does not know, and run `work`: it writes the answer, and returns whether that is a
        whole one that may be handed out again. Raises `ApiError`: 409, 422, or 503 where nobody knows."""
        claim = Claim(self._gateway, self._incarnation, request_id, body)
        held = self._held[name] = _Held(claim, Kept())
        # a client that leaves in the middle must not leave a claim without a run
        starting = asyncio.ensure_future(self._start(name, held, work))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(starting)
        return held.kept

    async def _start(self, name: str, held: _Held, work: Callable[[Kept], Coroutine[Any, Any, bool]]) -> None:
        try:
            held.revision = await self._claim(name, held.claim)
        except ApiError as error:
            del self._held[name]
            held.kept.fail(error)
            raise
        held.work = asyncio.create_task(self._work(name, held, work))

    async def _work(self, name: str, held: _Held, work: Callable[[Kept], Coroutine[Any, Any, bool]]) -> None:
        kept = held.kept
        try:
            kept.complete = await work(kept)
        except ApiError as error:
            kept.fail(error)
        except Exception:
            # a fault of ours: clients get an answer, the log the story
            log.exception("request failed by a fault of the gateway", extra={"request_id": held.claim.request_id})
            kept.fail(ApiError(500, "internal_error", "The gateway failed."))
        finally:
            kept.fail(refusal("unavailable"))  # no effect where it has ended in any way
            self._settle(name, held)

    def _settle(self, name: str, held: _Held) -> None:
        """The run is over: keep its answer, or give its key free."""
        if self._held.get(name) is not held:
            return  # lost: others have the key
        held.work = None
        held.claim = msgspec.structs.replace(held.claim, state="answered" if held.kept.complete else "free")
        self._unsettled[name] = held
        if not held.kept.complete:
            del self._held[name]
        else:
            held.until_s = time.monotonic() + self._limits.answer_kept_s
            self.kept_bytes += held.kept.size
            self._make_room()
        self._bus.spawn(self._say(name, held))

    def _make_room(self) -> None:
        """Forget the oldest answers beyond what may be kept; their keys stay claimed."""
        for name, held in list(self._held.items()):
            if self.kept_bytes <= self._limits.kept_bytes:
                return
            if held.until_s is not None:
                self._forget(name, held)

    def _forget(self, name: str, held: _Held) -> None:
        self.kept_bytes -= held.kept.size
        del self._held[name]

    # --- the bucket --------------------------------------------------------------------------------------------

    async def _claim(self, name: str, claim: Claim) -> int:
        """The revision at which the key is ours. Raises `ApiError`."""
        value = msgspec.json.encode(claim)
        try:
            bucket = await self._bus.bucket(IDEMPOTENCY_BUCKET)
            last = 0
            for _ in range(3):
                try:
                    return await bucket.update(name, value, last=last)
                except _FASTER:
                    last = await self._free(name, claim)
        except _BUS as error:
            log.warning("key not claimed", extra={"request_id": claim.request_id, "error": repr(error)})
        raise refusal("unavailable")

    async def _free(self, name: str, mine: Claim) -> int:
        """The revision of a key that may be taken over, 0 if there is none (any more). Raises `ApiError` if not."""
        found = await self._read(name)
        if found is None:
            return 0
        revision, there, stored_ms = found
        if there.request_id == mine.request_id:
            return revision  # our own claim, whose acknowledgement was lost
        if there.body != mine.body:
            raise _other_body()
        if there.state == "free":
            return revision
        if there.state == "answered":
            if there.gateway == mine.gateway:
                raise ApiError(409, "answer_gone", "This request was answered before; the answer is not kept any more.")
            raise ApiError(
                409,
                "answered_elsewhere",
                "This request was answered before, by another gateway, which has the answer: ask again.",
                retry_after_s=retry_after_s(mine.request_id, 1000.0),
            )
        if there.gateway == mine.gateway or await self._silent(stored_ms):
            return revision  # nobody runs it: we do not (nor who had our name before), or its gateway is gone
        raise ApiError(
            409,
            "in_progress",
            "This request is being worked on already: ask again for its answer.",
            retry_after_s=retry_after_s(mine.request_id, 2000.0),
        )

    async def _read(self, name: str) -> tuple[int, Claim, float] | None:
        """Revision, value, and when the server stored it, by its own clock, ms."""
        subject = f"$KV.{IDEMPOTENCY_BUCKET}.{name}"
        try:
            found = await self._bus.js.get_msg(f"KV_{IDEMPOTENCY_BUCKET}", subject=subject, direct=True)
        except nats.js.errors.NotFoundError:
            return None
        stored = (found.headers or {}).get("Nats-Time-Stamp", "")
        return int(found.seq or 0), msgspec.json.decode(found.data or b"{}", type=Claim), unix_ms(stored)

    async def _silent(self, stored_ms: float) -> bool:
        """Whether a claim was not renewed for long, although its gateway could have."""
        if time.monotonic() - self._connected_s() < self._limits.claim_silent_s:
            return False  # the bus is just back, for its gateway perhaps later than for us
        answer = await self._bus.nc.request(f"$JS.API.STREAM.INFO.KV_{IDEMPOTENCY_BUCKET}", b"", timeout=2)
        now_ms = unix_ms(msgspec.json.decode(answer.data, type=_Info).ts)
        return now_ms - stored_ms > 1000 * self._limits.claim_silent_s

    def _connected_s(self) -> float:
        """Since when this connection is known to us; monotonic, s."""
        if self._connection[0] != self._bus.connections:
            self._connection = (self._bus.connections, time.monotonic())
        return self._connection[1]

    async def _say(self, name: str, held: _Held) -> None:
        await self._tell(name, held)

    async def _tell(self, name: str, held: _Held) -> bool:
        """Write a claim as it is now; True if it is ours still. Trouble with the bus is for the next beat."""
        try:
            bucket = await self._bus.bucket(IDEMPOTENCY_BUCKET)
            try:
                held.revision = await bucket.update(name, msgspec.json.encode(held.claim), last=held.revision)
            except _FASTER:
                found = await self._read(name)
                if found is not None and found[1].request_id == held.claim.request_id:
                    held.revision = found[0]  # our own words, whose acknowledgement was lost: again with the next beat
                    return True
                self._settled(name, held)
                return False
        except _BUS as error:
            log.debug("claim not told", extra={"request_id": held.claim.request_id, "error": repr(error)})
            return True
        if held.claim.state != "running":
            self._settled(name, held)
        return True

    def _settled(self, name: str, held: _Held) -> None:
        if self._unsettled.get(name) is held:
            del self._unsettled[name]

    # --- time --------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Every `lease_s`: renew the claims of what runs, tell what was not told, forget what is old."""
        now_s = time.monotonic()
        for name, held in list(self._held.items()):
            if held.until_s is not None and held.until_s <= now_s:
                self._forget(name, held)
        self._connected_s()
        if not self._bus.connected:
            return
        claims = [(name, held) for name, held in self._held.items() if held.work is not None]
        claims += self._unsettled.items()
        told = await asyncio.gather(*(self._tell(name, held) for name, held in claims))
        for (name, held), ours in zip(claims, told, strict=True):
            if not ours and self._held.get(name) is held and held.work is not None:
                log.warning("claim lost: its run ends", extra={"request_id": held.claim.request_id})
                del self._held[name]
                held.kept.fail(refusal("unavailable"))
                held.work.cancel()

    async def close(self) -> None:
        """End what still runs and tell the bucket."""
        await cancel_and_wait([held.work for held in self._held.values() if held.work is not None])
        await asyncio.gather(*(self._tell(name, held) for name, held in list(self._unsettled.items())))


class _Info(msgspec.Struct):
    ts: str


def key_of(request: web.BaseRequest) -> str | None:
    """The client's key; None: it sent none. Raises `ApiError` 400."""
    sent = request.headers.getall(HEADER, [])
    if not sent:
        return None
    key = sent[0].strip()
    if len(sent) > 1 or not 0 < len(key) <= _KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise bad_request("invalid_idempotency_key", f"'{HEADER}' must be one line of 1 to {_KEY_CHARS} characters.")
    return key


def _other_body() -> ApiError:
    return ApiError(422, "idempotency_key_reused", "This key was used before for a request with another body.")
