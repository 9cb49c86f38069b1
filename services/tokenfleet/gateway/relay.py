"""Sends one attempt to one instance and hands its answer on.

Decides what an attempt's end was (`End`), from what engine and client did: whether it failed before or after the first
token, whose fault that was, what was delivered. Refuses to know where an attempt should go, and whether there will be
another: that is the core's.

The client gets nothing, not even a status, before the first token: until then the attempt can be repeated elsewhere.
Each instance has connections of its own, so that a hung one keeps nobody else waiting, and the reading of an answer
stops while its client does not take it (both ends' buffers are bounded; the engine feels it through TCP).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from tokenfleet.gateway import sse
from tokenfleet.gateway.assembly import Assembly
from tokenfleet.gateway.idempotency import Kept
from tokenfleet.gateway.openai import PATHS, ApiError, Parsed, engine_body, midstream_event, refusal, rejection
from tokenfleet.gateway.settings import Limits
from tokenfleet.gateway.state import Dispatch, End, Refuse
from tokenfleet_schemas.outcome import Outcome
from tokenfleet_schemas.placement import PlacementAssigned
from tokenfleet_schemas.request import Ask

#: engine statuses that say: this request is wrong wherever it goes
_REJECTED = frozenset({400, 413, 415, 422})
#: and: not now, not here
_BUSY = frozenset({408, 429, 503})
#: instead of the names and versions of the libraries
SERVER = {"Server": "tokenfleet"}
#: bytes of an error page that are read
_ERROR_BYTES = 65_536
#: vLLM closes an idle connection after 5.0 s; one that is about to be closed is not used again
_KEEPALIVE_S = 4.0
#: how long the engine may take to end its answer after the last event, before the connection is given up
_TRAILER_S = 0.25


class Engines:
    """Connections to instances, a pool for each, and the credentials that they want."""

    def __init__(self, limits: Limits, environ: Mapping[str, str]) -> None:
        self._limits = limits
        self._environ = environ
        self._sessions: dict[tuple[str, str], aiohttp.ClientSession] = {}
        self._used_s: dict[tuple[str, str], float] = {}
        self._open: Counter[tuple[str, str]] = Counter()
        self._fresh: aiohttp.ClientSession | None = None

    def credential(self, name: str) -> str:
        """The secret of that name, from `TOKENFLEET_CREDENTIAL_<NAME>`; empty if there is none."""
        token = "".join(char if char.isalnum() else "_" for char in name.upper())
        return self._environ.get(f"TOKENFLEET_CREDENTIAL_{token}", "") if name else ""

    @contextlib.contextmanager
    def using(self, instance: str, endpoint_url: str) -> Iterator[aiohttp.ClientSession]:
        """The instance's pool; it is not closed while somebody uses it."""
        key = (instance, endpoint_url)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = self._new_session(force_close=False)
        self._open[key] += 1
        try:
            yield session
        finally:
            self._open[key] -= 1
            self._used_s[key] = asyncio.get_running_loop().time()

    async def post(
        self, session: aiohttp.ClientSession, url: str, body: Callable[[], bytes], headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a body; returns when the engine's headers are there. Raises `aiohttp.ClientError`, TimeoutError."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await session.post(url, data=body(), headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, TimeoutError):
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError):
            # A pooled connection may be closed by the engine's idle timer just as it is used again: not a byte of an
            # answer came, and it came apart at once. If the engine had begun, it has stopped with the disconnect, so
            # a second send never runs beside the first. Later than that, something was at work and died: a failure.
            if (loop.time() - began_s) * 1000 > self._limits.reconnect_ms:
                raise
            if self._fresh is None:
                self._fresh = self._new_session(force_close=True)
            return await self._fresh.post(url, data=body(), headers=headers, allow_redirects=False)

    async def forget_idle(self, idle_s: float = 60.0) -> None:
        """Close the pools of instances that were not used for a while."""
        now_s = asyncio.get_running_loop().time()
        for key in [key for key, used_s in self._used_s.items() if now_s - used_s > idle_s]:
            if self._open[key]:
                continue
            del self._used_s[key], self._open[key]
            await self._sessions.pop(key).close()

    async def close(self) -> None:
        """Close everything."""
        sessions = [*self._sessions.values(), *([self._fresh] if self._fresh is not None else [])]
        self._sessions.clear()
        self._used_s.clear()
        self._fresh = None
        for session in sessions:
            await session.close()

    def _new_session(self, *, force_close: bool) -> aiohttp.ClientSession:
        kept: dict[str, Any] = {"force_close": True} if force_close else {"keepalive_timeout": _KEEPALIVE_S}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **kept),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_ms / 1000),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )


class Exchange:
    """One client's request as the shell holds it: the connection, the body, and how far its answer has come."""

    def __init__(
        self,
        request: web.BaseRequest,
        parsed: Parsed,
        ask: Ask,
        *,
        cache_salt: str,
        priority: Callable[[str], int | None],
        on_first_token: Callable[["Exchange"], None],
        on_end: Callable[["Exchange", End], None],
        kept: Kept | None = None,
    ) -> None:
        self.request = request
        #: takes the answer instead of the client's connection, which may end meanwhile
        self.kept = kept
        self.parsed = parsed
        self.ask = ask
        self.cache_salt = cache_salt
        self.priority = priority
        self.request_id = ask.request_id
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._decided: Dispatch | Refuse | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        #: attempt that is being relayed; 0: none
        self.attempt = 0
        #: why the attempt is being broken off, by us
        self.cut = ""
        #: set while a write waits for the client
        self.write_since_ms: float | None = None
        self.last_read_ms = 0.0
        self.first_byte_ms: float | None = None
        self.last_token_ms: float | None = None
        self.first_token = False
        self.scanner: sse.Scanner | None = None
        #: what the client gets, once it gets something
        self.response: web.StreamResponse | Kept | None = None
        self.response_bytes = 0
        #: the present attempt's end has been told
        self.concluded = False
        #: the client has its answer, or the error is in `error`
        self.answered = False
        #: and it is all that the engine meant to say
        self.completed = False
        self.error: ApiError | None = None

    def respond(self, headers: dict[str, str], body: bytes | None = None) -> web.StreamResponse | Kept:
        """The client's answer from now on: a stream, or whole."""
        if self.kept is not None:
            self.response = self.kept.begin(headers, body)
        elif body is not None:
            self.response = web.Response(body=body, headers=headers)
        else:
            self.response = web.StreamResponse(headers=headers)
        return self.response

    def decide(self, decision: Dispatch | Refuse) -> None:
        """The core's word on what is next. A dispatch begins a new attempt, whose end is still to be told."""
        self._decided = decision
        if isinstance(decision, Dispatch):
            self.cut, self.concluded = "", False
            self.write_since_ms = self.first_byte_ms = self.last_token_ms = None
            self.first_token, self.scanner = False, None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def decision(self) -> Dispatch | Refuse:
        """Wait for it."""
        if self._decided is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        decided, self._decided = self._decided, None
        assert decided is not None
        return decided

    def begin(self, attempt: int) -> None:
        """The attempt is relayed by the present task from now on."""
        self._task = asyncio.current_task()
        self.attempt = attempt

    def interrupt(self, attempt: int, reason: str) -> None:
        """Break off this attempt, if it is still the one: its task is woken, with the reason in `cut`."""
        if reason in ("instance_gone", "first_token_timeout") and self.first_token:
            return  # just in time
        if self.attempt == attempt != 0 and not self.cut and not self.concluded and self._task is not None:
            self.cut = reason
            self._task.cancel()

    def uncancelled(self) -> bool:
        """Whether a cancellation just caught was ours alone, and take it back."""
        return bool(self.cut) and self._task is not None and self._task.uncancel() == 0

    def token(self) -> None:
        """The first token is here."""
        self.first_token = True
        self._on_first_token(self)

    def conclude(self, end: End) -> None:
        """Tell the attempt's end, once."""
        if not self.concluded:
            self.concluded = True
            self.completed = end.outcome == "completed"
            self._on_end(self, end)

    def end(self, outcome: Outcome, reason: str = "", status: int = 0) -> End:
        """An end with what has been seen so far."""
        seen = self.scanner
        usage = seen.usage if seen is not None else None
        return End(
            outcome=outcome,
            reason=reason,
            status=status,
            output_tokens=seen.output_tokens if seen is not None else 0,
            input_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            usage_seen=usage is not None,
            finish_reason=seen.finish_reason if seen is not None else "",
            model_served=seen.model if seen is not None else "",
            response_bytes=self.response_bytes,
            first_byte_ms=self.first_byte_ms,
            last_token_ms=self.last_token_ms,
        )


class _Usage(msgspec.Struct):
    finish_reason: str | None = None


class _Whole(msgspec.Struct):
    """What is looked at in an engine's whole answer."""

    choices: list[_Usage] = []
    usage: sse.Usage | None = None
    model: str | None = None
    error: Any = None


class Relay:
    """Runs attempts. `now_ms` is the gateway's clock."""

    def __init__(self, engines: Engines, limits: Limits, now_ms: Callable[[], float]) -> None:
        self._engines = engines
        self._limits = limits
        self._now_ms = now_ms

    async def run(self, exchange: Exchange, attempt: int, assigned: PlacementAssigned, engine: str) -> None:
        """One attempt: its end is told to the exchange; `exchange.answered` if the client has got its answer.

        A cancellation that did not come from `Exchange.interrupt` (the client left) passes through; whoever catches
        it tells the end.
        """
        exchange.begin(attempt)
        try:
            await self._attempt(exchange, assigned, engine)
        except asyncio.CancelledError:
            if not exchange.uncancelled():
                raise
            await self._cut(exchange)
        except ConnectionResetError:
            # our client's connection: what goes wrong with the engine's is an aiohttp.ClientError
            exchange.conclude(exchange.end("cancelled", "client_left", _status(exchange)))
            exchange.answered = True
        finally:
            exchange.attempt = 0

    async def _attempt(self, exchange: Exchange, assigned: PlacementAssigned, engine: str) -> None:
        parsed = exchange.parsed
        stream = parsed.stream or parsed.assembled
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": f"{exchange.request_id}-{exchange.attempt}",
            "X-Tokenfleet-Request-Id": exchange.request_id,
            "X-Tokenfleet-Attempt": str(exchange.attempt),
            "X-Tokenfleet-Class": exchange.ask.service_class,
        }
        credential = self._engines.credential(assigned.credential)
        if credential:
            headers["Authorization"] = f"Bearer {credential}"
        with self._engines.using(assigned.instance, assigned.endpoint_url) as session:
            await self._exchange(exchange, assigned, session, headers, engine, stream=stream)

    async def _exchange(
        self,
        exchange: Exchange,
        assigned: PlacementAssigned,
        session: aiohttp.ClientSession,
        headers: dict[str, str],
        engine: str,
        *,
        stream: bool,
    ) -> None:
        url = assigned.endpoint_url.rstrip("/") + PATHS[exchange.parsed.endpoint]

        def body() -> bytes:
            return engine_body(
                exchange.parsed,
                model=exchange.ask.adapter or assigned.model,
                stream=stream,
                cache_salt=exchange.cache_salt,
                priority=exchange.priority(engine),
                engine=engine,
            )

        try:
            # made for the call and kept by nobody: while a long answer runs, only the client's own copy stays
            upstream = await self._engines.post(session, url, body, headers)
        except (aiohttp.ClientConnectorError, TimeoutError):
            exchange.conclude(exchange.end("failed", "upstream_unreachable"))
            return
        except (aiohttp.ClientError, ValueError):
            exchange.conclude(exchange.end("failed", "upstream_disconnected"))
            return
        exchange.first_byte_ms = exchange.last_read_ms = self._now_ms()
        try:
            if upstream.status != 200:
                await self._refused(exchange, upstream)
            elif not stream:
                await self._whole(exchange, upstream, assigned)
            elif upstream.content_type != "text/event-stream":
                exchange.conclude(exchange.end("failed", "upstream_protocol"))
            else:
                await self._stream(exchange, upstream, assigned)
        finally:
            upstream.close()  # no effect on one that was read to its end: its connection is in the pool again

    # --- streams -----------------------------------------------------------------------------------------------

    async def _stream(self, exchange: Exchange, upstream: aiohttp.ClientResponse, assigned: PlacementAssigned) -> None:
        parsed = exchange.parsed
        scanner = exchange.scanner = sse.Scanner(
            choices=parsed.choices,
            include_usage=parsed.include_usage or not parsed.stream,
            continuous_usage=parsed.include_usage and parsed.stream_options.get("continuous_usage_stats") is True,
            event_bytes=self._limits.event_bytes,
        )
        assembly = None if parsed.stream else Assembly(parsed.endpoint)
        content = upstream.content
        out = b""
        while not scanner.over:
            try:
                data = await content.readany()
            except (aiohttp.ClientError, OSError):
                # What came before the break: `readany` raises before it hands that over, so a reset in the same
                # breath as tokens would lose them. The second time there is nothing left.
                data = content._read_nowait(-1)
            tokens = scanner.tokens
            out = scanner.feed(data) if data else scanner.end()
            exchange.last_read_ms = now_ms = self._now_ms()
            if scanner.tokens != tokens:
                exchange.last_token_ms = now_ms
                if scanner.first_token and not exchange.first_token:
                    exchange.token()
            if not data or scanner.over:
                break
            if not out:
                continue
            if assembly is not None:
                assembly.take(out)
                if assembly.size > self._limits.answer_bytes:
                    scanner.fault = "upstream_protocol"
                    break
            else:
                await self._write(exchange, assigned, out)
                if exchange.kept is not None and exchange.kept.size > self._limits.answer_bytes:
                    scanner.fault, out = "upstream_protocol", b""
                    break
        if not scanner.complete:
            if out and assembly is None and exchange.first_token:
                await self._write(exchange, assigned, out)  # tokens that came in the same breath as the fault
            await self._broken(exchange, "failed", scanner.fault or "upstream_disconnected")
            return
        if not exchange.first_token and scanner.output_tokens > 0:
            exchange.token()  # generated, but nothing that could be shown: the end is its first sign
            exchange.last_token_ms = exchange.last_read_ms
        if assembly is not None:
            assembly.take(out)
            await self._answer(exchange, assigned, assembly.body())
        else:
            response = exchange.response or await self._begin(exchange, assigned)
            out += sse.DONE
            exchange.write_since_ms = self._now_ms()
            await response.write_eof(out)
            exchange.write_since_ms = None
            exchange.response_bytes += len(out)
        exchange.answered = True
        exchange.conclude(exchange.end("completed", status=200))
        await _trailer(content)

    async def _begin(self, exchange: Exchange, assigned: PlacementAssigned) -> web.StreamResponse | Kept:
        response = exchange.respond(
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **_served(exchange, assigned),
            }
        )
        await response.prepare(exchange.request)
        return response

    async def _write(self, exchange: Exchange, assigned: PlacementAssigned, out: bytes) -> None:
        response = exchange.response or await self._begin(exchange, assigned)
        exchange.write_since_ms = self._now_ms()
        await response.write(out)
        exchange.write_since_ms = None
        exchange.response_bytes += len(out)

    async def _broken(self, exchange: Exchange, outcome: Outcome, reason: str) -> None:
        """The answer cannot be completed: before the first token the attempt failed, after it the client is told."""
        if not exchange.first_token:
            exchange.conclude(exchange.end(outcome, reason))
            return
        if outcome == "failed":
            outcome = "failed_midstream"
        response, exchange.answered = exchange.response, True
        if response is None:
            exchange.error = refusal(reason, 504 if outcome == "timed_out" else 502)
        exchange.conclude(exchange.end(outcome, reason, 200 if response is not None else 502))
        if response is not None:
            try:
                async with asyncio.timeout(1.0):
                    await response.write_eof(midstream_event(reason))
            except (TimeoutError, ConnectionResetError):
                abort(exchange)

    # --- whole answers -----------------------------------------------------------------------------------------

    async def _whole(self, exchange: Exchange, upstream: aiohttp.ClientResponse, assigned: PlacementAssigned) -> None:
        """The engine's own answer, passed on: only its usage is looked at. When its first token came is unknown."""
        scanner = exchange.scanner = sse.Scanner()
        body = bytearray()
        try:
            while data := await upstream.content.readany():
                body += data
                exchange.last_read_ms = self._now_ms()
                if len(body) > self._limits.answer_bytes:
                    exchange.conclude(exchange.end("failed", "upstream_protocol"))
                    return
            found = msgspec.json.decode(body, type=_Whole)
        except (aiohttp.ClientError, OSError):
            exchange.conclude(exchange.end("failed", "upstream_disconnected"))
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            exchange.conclude(exchange.end("failed", "upstream_protocol"))
            return
        reasons = [choice.finish_reason for choice in found.choices]
        if found.error is not None or not reasons or "abort" in reasons:
            exchange.conclude(exchange.end("failed", "upstream_error"))
            return
        scanner.usage, scanner.model, scanner.finish_reason = found.usage, found.model or "", reasons[0] or ""
        exchange.last_token_ms = exchange.last_read_ms
        await self._answer(exchange, assigned, bytes(body))
        exchange.answered = True
        exchange.conclude(exchange.end("completed", status=200))

    async def _answer(self, exchange: Exchange, assigned: PlacementAssigned, body: bytes) -> None:
        headers = {"Content-Type": "application/json", **_served(exchange, assigned)}
        response = exchange.respond(headers, body)
        exchange.write_since_ms = self._now_ms()
        await response.prepare(exchange.request)
        await response.write_eof()
        exchange.write_since_ms = None
        exchange.response_bytes = len(body)

    async def _refused(self, exchange: Exchange, upstream: aiohttp.ClientResponse) -> None:
        """A status other than 200: the request is wrong (passed on, once), or the instance is."""
        status = upstream.status
        if status not in _REJECTED:
            exchange.conclude(exchange.end("failed", "upstream_busy" if status in _BUSY else "upstream_error"))
            return
        try:
            async with asyncio.timeout(5.0):
                page = await upstream.content.read(_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError):
            page = b""
        exchange.error = rejection(status, page)
        exchange.answered = True
        exchange.conclude(exchange.end("rejected", exchange.error.code, status))

    # --- broken off by us --------------------------------------------------------------------------------------

    async def _cut(self, exchange: Exchange) -> None:
        reason = exchange.cut
        if exchange.concluded:
            return
        if reason == "client_stalled":
            exchange.answered = True
            exchange.conclude(exchange.end("client_stalled", reason, _status(exchange)))
            abort(exchange)
        elif reason == "gateway_stopping" and not exchange.first_token:
            exchange.answered = True
            exchange.error = refusal(reason, 503)
            exchange.conclude(exchange.end("failed_midstream", reason, 503))
        else:
            timed_out = reason in ("first_token_timeout", "token_timeout")
            await self._broken(exchange, "timed_out" if timed_out else "failed", reason)


def _served(exchange: Exchange, assigned: PlacementAssigned) -> dict[str, str]:
    """Who served it, without any address."""
    return {
        **SERVER,
        "X-Request-Id": exchange.request_id,
        "X-Tokenfleet-Request-Id": exchange.request_id,
        "X-Tokenfleet-Attempts": str(exchange.attempt),
        "X-Tokenfleet-Site": assigned.site,
        "X-Tokenfleet-Model": f"{assigned.model}@{assigned.version}",
    }


def _status(exchange: Exchange) -> int:
    return 0 if exchange.response is None else exchange.response.status


def abort(exchange: Exchange) -> None:
    """Break the client's connection: what it has got is no whole answer."""
    if exchange.kept is not None:
        exchange.kept.fail(refusal("unavailable"))
        return
    transport = exchange.request.transport
    if isinstance(transport, asyncio.Transport):
        transport.abort()


async def _trailer(content: aiohttp.StreamReader) -> None:
    """Read what is left of an answer that is over, so that its connection can be used again."""
    if content.at_eof():
        return
    try:
        async with asyncio.timeout(_TRAILER_S):
            while not content.at_eof():
                await content.readany()
    except (aiohttp.ClientError, OSError, TimeoutError):
        pass  # then it is closed
