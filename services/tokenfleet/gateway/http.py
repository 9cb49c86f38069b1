"""The clients' side: routes, who is asking, reading a body within its limit, and one answer for each request.

Decides which status and which words a client gets; never whether, when or where its request is served. Order matters:
the key is judged first, the tenant's zones before a byte of the body is read, entitlements before tokens are counted.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader

from tokenfleet import classification, prefix
from tokenfleet.fleet import Fleet, Tenant
from tokenfleet.gateway.idempotency import Kept, key_of
from tokenfleet.gateway.keys import KeysUnavailable
from tokenfleet.gateway.openai import ApiError, Endpoint, Parsed, bad_request, parse, refusal
from tokenfleet.gateway.relay import SERVER, Exchange
from tokenfleet.gateway.state import Refuse
from tokenfleet_schemas.request import Ask

if TYPE_CHECKING:
    from tokenfleet.gateway.service import Gatekeeper

#: a client that sends its body slower than this is not waited for, seconds
_BODY_S = 60.0
#: bodies up to this size are parsed on the event loop
_INLINE_BYTES = 262_144

Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """Who a key stands for, and what it may."""

    tenant: str
    entitled: Tenant
    #: of the tenant's classes, those that the key may use
    classes: tuple[str, ...]


def make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: "web.RequestHandler",
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    """A request without aiohttp's own limit on bodies: ours is the fleet's, and judged while reading."""
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=0)


class Api:
    """Handles every request of the clients' port."""

    def __init__(self, keeper: "Gatekeeper") -> None:
        self._keeper = keeper
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/healthz": {"GET": self._healthz, "HEAD": self._healthz},
            "/readyz": {"GET": self._readyz, "HEAD": self._readyz},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request; never raises but for a client that left."""
        request_id = "req-" + secrets.token_hex(12)
        try:
            return await self._route(request)(request, request_id)
        except ApiError as error:
            return self._error(request, request_id, error)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:
            # a fault of ours: the client gets an answer, the log the story
            self._keeper.log.exception("request failed by a fault of the gateway", extra={"request_id": request_id})
            return self._error(request, request_id, ApiError(500, "internal_error", "The gateway failed."), quiet=True)

    def _route(self, request: web.BaseRequest) -> Handler:
        path = request.path
        methods = self._routes.get(path)
        if methods is None:
            if path.startswith("/v1/models/"):
                methods = {"GET": self._model}
            else:
                raise ApiError(404, "unknown_route", "There is no such route.")
        handler = methods.get(request.method)
        if handler is None:
            raise ApiError(405, "method_not_allowed", "This route has no such method.", allow=", ".join(methods))
        return handler

    def _error(
        self, request: web.BaseRequest, request_id: str, error: ApiError, *, quiet: bool = False
    ) -> web.Response:
        self._keeper.count_error(error)
        if not quiet:
            self._keeper.log.info(
                "request answered with an error",
                extra={"request_id": request_id, "status": error.status, "code": error.code},
            )
        headers = {
            **SERVER,
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
            "X-Tokenfleet-Request-Id": request_id,
            **error.headers,
        }
        return web.Response(status=error.status, body=error.body(), headers=headers)

    # --- small routes ------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return web.Response(text="ok\n", headers=SERVER)

    async def _readyz(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        failing = self._keeper.not_ready()
        if failing:
            return web.Response(status=503, text="not ready: " + ", ".join(failing) + "\n", headers=SERVER)
        return web.Response(text="ready\n", headers=SERVER)

    async def _models(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        client = await self._client(request)
        data = [_model_object(name) for name in _model_names(self._keeper.fleet, client)]
        return _json({"object": "list", "data": data}, request_id)

    async def _model(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        client = await self._client(request)
        asked = request.path.removeprefix("/v1/models/")
        if asked not in _model_names(self._keeper.fleet, client):
            raise _unknown_model(asked)
        return _json(_model_object(asked), request_id)

    # --- generation --------------------------------------------------------------------------------------------

    async def _chat(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return await self._generate(request, request_id, "chat")

    async def _completions(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return await self._generate(request, request_id, "completions")

    async def _generate(self, request: web.BaseRequest, request_id: str, endpoint: Endpoint) -> web.StreamResponse:
        keeper = self._keeper
        received_ms = keeper.now_ms()
        client = await self._client(request)
        fleet = keeper.fleet
        zone = fleet.sites[keeper.site].zone
        if "*" not in client.entitled.zones and zone not in client.entitled.zones:
            raise refusal("residency")
        key = key_of(request)
        body = await _read_body(request, fleet.info.max_body_bytes)
        parsed = parse(body, endpoint) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse, body, endpoint)
        digest = keeper.once.digest(endpoint, body) if key is not None else ""
        del body
        ask = self._ask(parsed, client, request_id, received_ms)
        if key is not None:
            return await self._once(request, parsed, ask, client, received_ms, key, digest)
        self._open_to_newcomers(ask, received_ms)
        exchange = await self._serve(request, parsed, ask, client, received_ms)
        # none where the client left: nobody reads it
        return exchange.response if isinstance(exchange.response, web.StreamResponse) else web.Response(status=499)

    def _open_to_newcomers(self, ask: Ask, received_ms: float) -> None:
        """Raises `ApiError` if no request can be opened now."""
        reason = self._keeper.closed_to_newcomers()
        if reason:
            self._keeper.refused(ask, reason, received_ms)
            raise refusal(reason)

    async def _once(
        self,
        request: web.BaseRequest,
        parsed: Parsed,
        ask: Ask,
        client: Client,
        received_ms: float,
        key: str,
        digest: str,
    ) -> web.StreamResponse:
        """A request with an idempotency key: its run is nobody's connection's, and its repeats follow it."""
        once = self._keeper.once
        name = once.name(client.tenant, key)

        async def work(kept: Kept) -> bool:
            exchange = await self._serve(request, parsed, ask, client, received_ms, kept)
            return exchange.completed

        kept = once.find(name, digest)
        repeated = kept is not None
        if kept is None:
            self._open_to_newcomers(ask, received_ms)
            try:
                kept = await once.begin(name, digest, ask.request_id, work)
            except ApiError as error:
                if error.status == 503:
                    self._keeper.refused(ask, error.code, received_ms)
                raise
        stall_s = self._keeper.limits.client_stall_ms / 1000
        return await kept.follow(request, repeated=repeated, stall_s=stall_s)

    async def _serve(
        self,
        request: web.BaseRequest,
        parsed: Parsed,
        ask: Ask,
        client: Client,
        received_ms: float,
        kept: Kept | None = None,
    ) -> Exchange:
        """Raises `ApiError` where the answer is an error."""
        keeper = self._keeper
        tools = _uses_tools(parsed)
        counted = await keeper.tokenization.count(parsed, ask, share=client.entitled.share_prefix)
        ask = msgspec.structs.replace(
            self._classified(ask, parsed, client, counted.input_tokens, tools=tools),
            input_tokens=counted.input_tokens,
            input_tokens_source=counted.source,
            prefix=counted.digest,
            prefix_stride=counted.stride,
        )
        exchange = keeper.open(
            request,
            parsed,
            ask,
            received_ms=received_ms,
            cache_salt=prefix.cache_salt(keeper.secret, ask.tenant, client.entitled.share_prefix),
            kept=kept,
        )
        fault = True
        try:
            while not exchange.answered:
                decision = await exchange.decision()
                if isinstance(decision, Refuse):
                    raise refusal(decision.reason, decision.status, decision.retry_after_s)
                await keeper.relay.run(
                    exchange, decision.attempt, decision.assigned, keeper.engine_of(decision.assigned.instance)
                )
            fault = False
            if exchange.error is not None:
                raise exchange.error
            return exchange
        except (ApiError, ConnectionResetError, asyncio.CancelledError):
            fault = False
            raise
        finally:
            keeper.close(exchange, fault=fault)

    async def _client(self, request: web.BaseRequest) -> Client:
        """Who is asking. Raises `ApiError` 401, the same for every way in which a key can be wrong, or 503."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        try:
            # a malformed header is looked up like any other wrong key, and takes as long
            found = await self._keeper.keys.who(key.strip() if scheme.lower() == "bearer" else "")
        except KeysUnavailable as error:
            self._keeper.log.warning("API key not judged", extra={"error": str(error)})
            raise refusal("unavailable") from None
        entitled = self._keeper.fleet.tenants.get(found.tenant) if found is not None else None
        if found is None or entitled is None:
            raise ApiError(401, "invalid_api_key", "Incorrect API key provided.")
        classes = entitled.classes
        if found.classes is not None:
            classes = tuple(name for name in classes if name in found.classes)
        return Client(tenant=found.tenant, entitled=entitled, classes=classes)

    def _ask(self, parsed: Parsed, client: Client, request_id: str, received_ms: float) -> Ask:
        """The request's facts; its tokens are counted later. Raises `ApiError` 400, 403, 404."""
        keeper = self._keeper
        fleet = keeper.fleet
        resolved = fleet.resolve(parsed.model_asked)
        permitted = client.entitled.models
        if resolved is None or ("*" not in permitted and resolved[0] not in permitted):
            raise _unknown_model(parsed.model_asked)
        name = self._class_of(parsed.service_class, client)
        return Ask(
            request_id=request_id,
            gateway=keeper.name,
            gateway_incarnation=keeper.incarnation,
            entry=keeper.site,
            entry_zone=fleet.sites[keeper.site].zone,
            tenant=client.tenant,
            service_class=name,
            task=parsed.task,
            model_asked=parsed.model_asked,
            model=resolved[0],
            version=resolved[1],
            adapter=resolved[2],
            stream=parsed.stream,
            input_tokens=0,
            output_budget_tokens=parsed.output_budget_tokens,
            request_bytes=parsed.body_bytes,
            received_unix_ms=int(received_ms),
            **self._promised(client.tenant, name, parsed.deadline_ms),
        )

    def _promised(self, tenant: str, name: str, deadline_ms: float | None) -> dict[str, Any]:
        """The objectives of a request; its own deadline may only tighten them."""
        promised = self._keeper.fleet.objectives(tenant, name)
        e2e_ms, patience_ms = promised.e2e_ms, promised.patience_ms
        if deadline_ms is not None:
            e2e_ms = deadline_ms if e2e_ms is None else min(e2e_ms, deadline_ms)
            patience_ms = min(patience_ms, deadline_ms)
        return {
            "ttft_ms": promised.ttft_ms,
            "tpot_ms": promised.tpot_ms,
            "e2e_ms": e2e_ms,
            "patience_ms": patience_ms,
        }

    def _classified(self, ask: Ask, parsed: Parsed, client: Client, input_tokens: int, *, tools: bool) -> Ask:
        """The request in the class of its task, now that its length is known; a declared class stays."""
        found = classification.classify(
            self._keeper.fleet,
            client.tenant,
            client.classes,
            declared_class=parsed.service_class,
            declared_task=parsed.task,
            input_tokens=input_tokens,
            output_budget_tokens=parsed.output_budget_tokens,
            stream=parsed.stream,
            tools=tools,
            deadline_ms=parsed.deadline_ms,
        )
        if found.service_class == ask.service_class:
            return msgspec.structs.replace(ask, task=found.task)
        promised = self._promised(client.tenant, found.service_class, parsed.deadline_ms)
        return msgspec.structs.replace(ask, service_class=found.service_class, task=found.task, **promised)

    def _class_of(self, declared: str, client: Client) -> str:
        fleet = self._keeper.fleet
        if declared:
            if declared not in fleet.classes:
                known = ", ".join(client.classes)
                raise bad_request("unknown_class", f"There is no such class; yours are: {known}.", "metadata.class")
            if declared not in client.classes:
                raise ApiError(403, "not_permitted", "Your key may not use this class.", param="metadata.class")
            return declared
        for name in (client.entitled.default_class, fleet.info.default_class, *client.classes):
            if name in client.classes:
                return name
        raise ApiError(403, "not_permitted", "Your key may not use any class.")


def _uses_tools(parsed: Parsed) -> bool:
    """Whether an agent asks: tools are offered, or their results are among the messages."""
    if parsed.template_values.get("tools"):
        return True
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in parsed.messages)


async def _read_body(request: web.BaseRequest, limit: int) -> bytearray:
    """The body, judged while it comes. Raises `ApiError` 413, 415, 408, 400."""
    if request.content_type != "application/json":
        raise ApiError(415, "unsupported_media_type", "The body must be application/json.")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    content = request.content
    body = bytearray()
    if content.is_eof() and content.exception() is None:
        # most bodies are here with their headers: no timer for them
        body += content.read_nowait(-1)
        if len(body) > limit:
            raise _too_large(limit)
        return body
    try:
        async with asyncio.timeout(_BODY_S):
            while data := await content.readany():
                body += data
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(408, "body_timeout", "The body did not arrive in time.") from None
    except web.RequestPayloadError:
        raise bad_request("invalid_body", "The body could not be read.") from None
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"The body is larger than {limit} bytes.")


def _unknown_model(asked: str) -> ApiError:
    shown = asked[:128]
    return ApiError(
        404, "model_not_found", f"The model `{shown}` does not exist or you do not have access to it.", param="model"
    )


def _model_names(fleet: Fleet, client: Client) -> list[str]:
    """`NAME`, `NAME@VERSION` for each version, and its adapters, of what the client may use."""
    names: list[str] = []
    for name, model in sorted(fleet.models.items()):
        if "*" in client.entitled.models or name in client.entitled.models:
            names += [name, *(f"{name}@{version}" for version in model.versions), *model.adapters]
    return names


def _model_object(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tokenfleet"}


def _json(value: object, request_id: str) -> web.Response:
    headers = {**SERVER, "Content-Type": "application/json", "X-Request-Id": request_id}
    return web.Response(body=msgspec.json.encode(value), headers=headers)
