"""The HTTP side of an emulated instance: the engine's API on one port, faults and the oracle on another.

Decides which handler answers and how bytes reach the connection; what they say is `wire`'s, when they come is
`instance`'s. A streamed token costs one write and no task switch: streams are framed here rather than by aiohttp, the
end of a step writes straight to the connection, and a request's task wakes only for its last piece, a slow reader or a
fault.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader

from tokenfleet.emulator import faults, wire
from tokenfleet.emulator.instance import EmulatedInstance, Job

log = logging.getLogger("tokenfleet.emulator")

_JSON = {"Content-Type": "application/json", "Server": "uvicorn", "Vary": "Origin"}
_PLAIN = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Server": "uvicorn"}
_EMPTY = {"Server": "uvicorn", "Vary": "Origin"}
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Server": "uvicorn", "Vary": "Origin"}
#: SO_LINGER on, zero seconds: closing resets the connection
_RESET = struct.pack("ii", 1, 0)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: Any,
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    # The real server has no limit on bodies either; a prompt is refused by its tokens.
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=0)


def _answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, headers=_JSON)


def _detail(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(body=b'{"detail":"%s"}' % text.encode(), status=status, headers={**_JSON, **headers})


class _Server:
    """One port: a route table over aiohttp's low-level server."""

    def __init__(
        self, routes: dict[str, dict[str, Handler]], host: str, port: int, *, bind_host: str, keepalive_s: float
    ) -> None:
        self._bind_host = bind_host
        self._routes = routes
        self._host = host
        self._port = port
        self._keepalive_s = keepalive_s
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._server: web.Server | None = None

    async def start(self) -> str:
        """Listen; returns the URL. The port stays the same over `pause` and `resume`."""
        self._server = web.Server(
            self._handle,
            request_factory=_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._keepalive_s,
            lingering_time=0.5,
        )
        self._runner = web.ServerRunner(self._server, handle_signals=False, shutdown_timeout=0.25)
        await self._runner.setup()
        await self.resume()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def pause(self) -> None:
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def resume(self) -> None:
        assert self._runner is not None
        self._site = web.TCPSite(self._runner, self._bind_host, self._port, backlog=1024, reuse_address=True)
        await self._site.start()
        if not self._port:
            # `ServerRunner.addresses` lists what its sites are bound to.
            self._port = int(self._runner.addresses[-1][1])

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @property
    def connections(self) -> int:
        return len(self._server.connections) if self._server is not None else 0

    def close_connections(self) -> None:
        if self._server is not None:
            for connection in self._server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        methods = self._routes.get(request.path)
        if methods is None:
            return _detail(404, "Not Found")
        handler = methods.get(request.method)
        if handler is None:
            return _detail(405, "Method Not Allowed", Allow=", ".join(methods))
        return await handler(request)


class Endpoint:
    """Both ports of one instance."""

    def __init__(
        self, instance: EmulatedInstance, host: str, port: int, admin_port: int, *, bind_host: str = ""
    ) -> None:
        bind_host = bind_host or host
        api = EngineApi(instance)
        admin = AdminApi(instance, self)
        keepalive_s = instance.settings.keepalive_s
        self._api = _Server(api.routes(), host, port, bind_host=bind_host, keepalive_s=keepalive_s)
        self._admin = _Server(admin.routes(), host, admin_port, bind_host=bind_host, keepalive_s=60.0)
        instance.listener = self

    async def start(self) -> dict[str, str]:
        """Listen on both; returns their URLs."""
        return {"url": await self._api.start(), "admin": await self._admin.start()}

    async def stop(self) -> None:
        """Close both."""
        await asyncio.gather(self._api.stop(), self._admin.stop())

    @property
    def open_sockets(self) -> int:
        """Connections to the engine's port."""
        return self._api.connections

    def close_connections(self) -> None:
        """Break every connection to the engine's port."""
        self._api.close_connections()

    async def pause(self) -> None:
        """Close the engine's port."""
        await self._api.pause()

    async def resume(self) -> None:
        """Open it again."""
        await self._api.resume()


class EngineApi:
    """What a client, a gateway and a scraper see: vLLM's API."""

    def __init__(self, instance: EmulatedInstance) -> None:
        self._instance = instance

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Path → method → handler."""
        return {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/models": {"GET": self._guarded(self._models)},
            "/tokenize": {"POST": self._guarded(self._tokenize)},
            "/health": {"GET": self._guarded(self._health)},
            "/ping": {"GET": self._guarded(self._health), "POST": self._guarded(self._health)},
            "/version": {"GET": self._guarded(self._version)},
            "/load": {"GET": self._guarded(self._load)},
            "/metrics": {"GET": self._guarded(self._metrics)},
            "/kv_event_sources": {"GET": self._guarded(self._kv_event_sources)},
            "/reset_prefix_cache": {"POST": self._guarded(self._reset_prefix_cache)},
        }

    def _guarded(self, handler: Handler) -> Handler:
        """Faults with scope `all` meet these pages too."""

        async def guarded(request: web.BaseRequest) -> web.StreamResponse:
            active = self._instance.faults
            hang, refuse = active.get("hang"), active.get("refuse")
            if hang is not None and hang.scope == "all":
                await asyncio.Event().wait()
            if refuse is not None and refuse.scope == "all":
                return _answer(wire.busy(refuse.status).body(), refuse.status)
            return await handler(request)

        return guarded

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(headers=_EMPTY)

    async def _version(self, request: web.BaseRequest) -> web.StreamResponse:
        return _answer(msgspec.json.encode({"version": self._instance.settings.engine_version}))

    async def _load(self, request: web.BaseRequest) -> web.StreamResponse:
        return _answer(msgspec.json.encode({"server_load": self._instance.open_requests}))

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._instance.metrics_page(), headers=_PLAIN)

    async def _kv_event_sources(self, request: web.BaseRequest) -> web.StreamResponse:
        publisher = self._instance.kv
        if publisher is None:
            return _detail(404, "Not Found")
        return _answer(msgspec.json.encode({"0": publisher.source()}))

    async def _reset_prefix_cache(self, request: web.BaseRequest) -> web.StreamResponse:
        self._instance.engine.clear_cache()
        return _answer(b'{"success":true}')

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        instance = self._instance
        declared = instance.declared
        created = int(instance.started_unix_s)
        limit = instance.max_model_len
        return _answer(wire.models_page(declared.model, declared.version, limit, created, declared.adapters))

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        instance = self._instance
        body = await request.read()
        try:
            page = wire.tokenize(
                request.headers.get("Content-Type", ""),
                body,
                model=instance.declared.model,
                adapters=instance.declared.adapters,
                max_model_len=instance.max_model_len,
            )
        except wire.ApiError as error:
            return _answer(error.body(), error.status)
        return _answer(page)

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def _completion(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def _generate(self, request: web.BaseRequest, kind: wire.Kind) -> web.StreamResponse:
        instance = self._instance
        body = await request.read()
        request_id = request.headers.get("X-Request-Id") or secrets.token_hex(8)
        entry = self._note(request, request_id, len(body))
        active = instance.faults
        if active.meet("hang") is not None:
            await asyncio.Event().wait()
        refuse = active.meet("refuse")
        if refuse is not None:
            instance.meters.rejections += 1
            return _answer(wire.busy(refuse.status).body(), refuse.status)
        try:
            call = wire.parse_call(
                kind,
                request.headers.get("Content-Type", ""),
                body,
                model=instance.declared.model,
                adapters=instance.declared.adapters,
                max_model_len=instance.max_model_len,
                settings=instance.settings,
            )
        except wire.ApiError as error:
            return _answer(error.body(), error.status)
        entry["priority"] = call.priority
        entry["stream"] = call.stream
        entry["prompt_tokens"] = len(call.prompt)
        entry["cache_salt"] = call.salt.decode()
        if active.meet("error_first") is not None:
            return await self._refuse_late(request, call.stream)
        job = instance.open_job(call, request_id)
        try:
            writer = wire.Writer(
                call,
                id=request_id,
                model=call.adapter or instance.declared.model,
                created=int(time.time()),
                text=job.text,
                settings=instance.settings,
                block_tokens=instance.profile.block_tokens,
            )
            if call.stream:
                return await _Stream(request, job, writer, active).serve()
            return await self._whole(request, job, writer)
        finally:
            # Also on a disconnect: aiohttp cancels this task when the connection is lost.
            instance.close_job(job)

    def _note(self, request: web.BaseRequest, request_id: str, body_bytes: int) -> dict[str, Any]:
        instance = self._instance
        entry: dict[str, Any] = {
            "request_id": request_id,
            "path": request.path,
            "headers": {
                name.lower(): value
                for name, value in request.headers.items()
                if name.lower().startswith(("x-request-id", "x-tokenfleet-", "x-session-id"))
            },
            "header_names": sorted(name.lower() for name in request.headers),
            "authorization": "Authorization" in request.headers,
            "body_bytes": body_bytes,
            "received_unix_ms": time.time() * 1000.0,
            "priority": None,
        }
        instance.received.append(entry)
        instance.received_total += 1
        return entry

    async def _refuse_late(self, request: web.BaseRequest, stream: bool) -> web.StreamResponse:
        self._instance.meters.rejections += 1
        error = wire.busy()
        if not stream:
            return _answer(error.body(), error.status)
        response = web.StreamResponse(headers=_EVENTS)
        if request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write_eof(error.events().encode())
        return response

    async def _whole(self, request: web.BaseRequest, job: Job, writer: wire.Writer) -> web.StreamResponse:
        reset = self._instance.faults.meet("reset")

        def on_token() -> None:
            if job.finished or (reset is not None and job.tokens >= max(reset.n, 1)):
                job.woken.set()

        job.on_token = on_token
        await job.woken.wait()
        if job.failed:
            error = wire.dead()
            return _answer(error.body(), error.status)
        if reset is not None:
            _reset(request)
            return _answer(b"")
        assert job.sequence is not None
        writer.cached_tokens = max(0, job.sequence.cached_tokens)
        return _answer(writer.body())


class _Stream:
    """One streamed answer: written from the step's timer, finished by the request's own task."""

    def __init__(self, request: web.BaseRequest, job: Job, writer: wire.Writer, active: faults.Faults) -> None:
        self._request = request
        self._job = job
        self._writer = writer
        self._sent = 0
        #: the peer reads too slowly: nothing is written until the connection has drained
        self._blocked = False
        self._chunked = request.version >= HttpVersion11
        self._reset = active.meet("reset")
        self._split_done = active.meet("split_done")
        self._no_done = active.meet("no_done")

    async def serve(self) -> web.StreamResponse:
        request, job, writer = self._request, self._job, self._writer
        response = web.StreamResponse(headers=_EVENTS)
        if self._chunked:
            response.enable_chunked_encoding()
        # Status and headers go out before queueing and prefill, as from the real server.
        await response.prepare(request)
        job.on_token = self._on_token
        while True:
            await job.woken.wait()
            job.woken.clear()
            if job.failed:
                await response.write_eof(wire.dead().events().encode())
                return response
            if self._blocked:
                await request.writer.drain()
                self._blocked = False
                self._on_token()
            if self._reset is not None and self._due_reset():
                _reset(request)
                return response
            if job.finished and not self._blocked:
                break
        assert job.sequence is not None
        writer.cached_tokens = max(0, job.sequence.cached_tokens)
        await self._close(response)
        return response

    def _due_reset(self) -> bool:
        return self._reset is not None and self._job.tokens >= max(self._reset.n, 1)

    def _on_token(self) -> None:
        """A step gave this request a token: write it, unless the task has to act."""
        job = self._job
        if self._blocked:
            return
        if self._reset is not None and self._due_reset():
            self._write(self._writer.events(self._sent, min(job.tokens, self._reset.n)))
            job.woken.set()
        elif job.finished:
            job.woken.set()
        else:
            tokens = job.tokens
            self._write(self._writer.events(self._sent, tokens))
            self._sent = tokens
            if self._request.protocol.writing_paused:
                self._blocked = True
                job.woken.set()

    def _write(self, events: str) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            # The connection is lost; the task is being cancelled for it.
            return
        # All of our text is ASCII but a model's name or a request's id.
        data = events.encode()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def _close(self, response: web.StreamResponse) -> None:
        """The last token, usage, [DONE] and the end of the body in one write; or what a fault makes of it."""
        writer, job = self._writer, self._job
        rest = writer.events(self._sent, job.call.output_tokens, last=True) + writer.closing()
        if self._no_done is not None:
            if self._no_done.truncate:
                self._write(rest)
                transport = self._request.transport
                if transport is not None:
                    transport.close()
                return
            await response.write_eof(rest.encode())
        elif self._split_done is not None:
            cut = min(self._split_done.n, len(wire.DONE))
            self._write(rest + wire.DONE[:cut])
            await asyncio.sleep(self._split_done.pause_ms / 1000.0)
            await response.write_eof(wire.DONE[cut:].encode())
        else:
            await response.write_eof((rest + wire.DONE).encode())


def _reset(request: web.BaseRequest) -> None:
    """Break the connection with a TCP RST."""
    transport = request.transport
    if transport is None:
        return
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class _Power(msgspec.Struct, frozen=True, kw_only=True):
    """An order posted to `/power`."""

    on: bool
    cold_start_ms: float = 0.0


class AdminApi:
    """Faults on command, and what the instance really did. Not for production traffic: no authentication."""

    def __init__(self, instance: EmulatedInstance, endpoint: Endpoint) -> None:
        self._instance = instance
        self._endpoint = endpoint

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Path → method → handler."""
        return {
            "/faults": {"GET": self._list, "POST": self._post},
            "/power": {"POST": self._power},
            "/state": {"GET": self._state},
            "/requests": {"GET": self._received},
        }

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:
        return _answer(msgspec.json.encode({"active": self._instance.faults.active(), "kinds": faults.KINDS}))

    async def _post(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            fault = faults.parse(await request.read())
        except faults.FaultError as error:
            return _answer(msgspec.json.encode({"error": str(error)}), 400)
        await self._instance.apply(fault)
        return _answer(msgspec.json.encode({"active": self._instance.faults.active()}))

    async def _power(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            order = msgspec.json.decode(await request.read(), type=_Power)
        except msgspec.DecodeError as error:
            return _answer(msgspec.json.encode({"error": str(error)}), 400)
        await self._instance.power(on=order.on, cold_start_s=order.cold_start_ms / 1000.0)
        return _answer(msgspec.json.encode({"powered": self._instance.powered}))

    async def _state(self, request: web.BaseRequest) -> web.StreamResponse:
        state = self._instance.state()
        state["open_sockets"] = self._endpoint.open_sockets
        return _answer(msgspec.json.encode(state))

    async def _received(self, request: web.BaseRequest) -> web.StreamResponse:
        instance = self._instance
        return _answer(msgspec.json.encode({"total": instance.received_total, "requests": list(instance.received)}))
