"""What clients meet: keys, entitlements, errors in OpenAI's shape, refusals, the official client, a bus gone."""

import asyncio
import json
import logging
import socket
from typing import Any

import openai
import pytest
from tests.integration.gateway_bench import (
    BATCH_KEY,
    FLEET,
    KEY,
    LOCAL_KEY,
    SECRET,
    Bench,
    Connection,
    answering,
    ask,
    bench,
    hanging,
    sse,
)

from tokenfleet import prefix
from tokenfleet.gateway.settings import Limits
from tokenfleet.local.nats import NatsServer
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.request import RequestReceived

CANARY = "canary-4711"


async def error_of(response: Any) -> tuple[int, str, Any]:
    """Status, code and param of an error in OpenAI's shape."""
    page = await response.json()
    assert set(page) == {"error"}
    assert set(page["error"]) == {"message", "type", "param", "code"}
    assert page["error"]["message"]
    return response.status, page["error"]["code"], page["error"]["param"]


def chat(**changes: Any) -> bytes:
    return json.dumps(ask(**changes)).encode()


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b'{"model": "m"', 400, "invalid_json", None),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', 400, "invalid_utf8", None),
        (b"[]", 400, "invalid_type", None),
        (b"", 400, "invalid_json", None),
        (chat(model="nope"), 404, "model_not_found", "model"),
        (chat(model="m@9"), 404, "model_not_found", "model"),
        (b'{"model": "m"}', 400, "missing_required_parameter", "messages"),
        (chat(messages=[]), 400, "empty_array", "messages"),
        (chat(messages=[{"content": "x"}]), 400, "invalid_type", "messages[0].role"),
        (chat(messages=[{"role": "user", "content": 5}]), 400, "invalid_type", "messages[0].content"),
        (chat(max_tokens="many"), 400, "invalid_type", "max_tokens"),
        (chat(n=0), 400, "invalid_value", "n"),
        (chat(stream="yes"), 400, "invalid_type", "stream"),
        (chat(stream=False, stream_options={}), 400, "invalid_value", "stream_options"),
        (chat(messages=[{"role": "user", "content": "x" * 3000}]), 400, "context_length_exceeded", "messages"),
        (chat(metadata={"class": "platinum"}), 400, "unknown_class", "metadata.class"),
        (chat(metadata={"class": "secret"}), 403, "not_permitted", "metadata.class"),
        (chat(metadata={"deadline_ms": -1}), 400, "invalid_value", "metadata.deadline_ms"),
        (chat(metadata={"task": "a b"}), 400, "invalid_value", "metadata.task"),
        (chat(messages=[{"role": "user", "content": "x" * 1_000_001}]), 413, "body_too_large", None),
    ],
)
async def test_a_wrong_request_is_an_openai_error_and_no_effect_on_others(
    nats_url: str, caplog: pytest.LogCaptureFixture, body: bytes, status: int, code: str, param: str | None
) -> None:
    """The right status, one log line, one metric, no engine, no row, and the next request is served."""
    caplog.set_level(logging.INFO, "tokenfleet.gateway")
    async with bench(nats_url) as b:
        engine = await b.engine(answering(sse("ok")))
        async with b.post(body) as r:
            assert await error_of(r) == (status, code, param)
            assert "Retry-After" not in r.headers
        lines = [record for record in caplog.records if record.message == "request answered with an error"]
        assert [(line.status, line.code) for line in lines] == [(status, code)]  # type: ignore[attr-defined]
        errors = {k: v for k, v in b.metrics().items() if k.startswith("tokenfleet_gateway_errors_total")}
        assert errors == {f'tokenfleet_gateway_errors_total{{"code": "{code}", "status": "{status}"}}': 1.0}
        assert engine.seen == []
        async with b.post() as r:
            assert b"[DONE]" in await r.read()
        assert len(await b.pilot.finished()) == 1


async def test_a_body_without_end_is_refused_while_it_comes(nats_url: str) -> None:
    """Chunked, so that nothing declares its size: not more than the limit is read before the 413."""

    async def endless() -> Any:
        for _ in range(2_000):
            yield b" " * 10_000

    async with bench(nats_url) as b:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        async with b.client.post(b.base + "/v1/chat/completions", data=endless(), headers=headers) as r:
            assert (await error_of(r))[:2] == (413, "body_too_large")


async def test_wrong_keys_are_all_answered_alike(nats_url: str) -> None:
    """X03: unknown, malformed, missing and foreign: one body, no product, table or hash in it."""
    async with bench(nats_url) as b:
        pages = set()
        for key in (KEY + "x", "", "tf_", "sk-" + CANARY, "x" * 5000):
            async with b.post(key=key) as r:
                assert (await error_of(r))[:2] == (401, "invalid_api_key")
                pages.add(await r.read())
        async with b.client.get(b.base + "/v1/models", headers={"Authorization": "Basic abc"}) as r:
            assert r.status == 401
            pages.add(await r.read())
        (page,) = pages
        assert not any(word in page.lower() for word in (b"hash", b"postgres", b"tokenfleet", b"table"))


async def test_routes_methods_and_media_types(nats_url: str) -> None:
    """404, 405 with Allow, 415; health without a key; no /metrics for clients."""
    async with bench(nats_url) as b:
        async with b.client.get(b.base + "/nowhere") as r:
            assert (await error_of(r))[:2] == (404, "unknown_route")
        async with b.client.get(b.base + "/metrics") as r:
            assert r.status == 404
        async with b.client.get(b.base + "/v1/chat/completions") as r:
            assert (await error_of(r))[:2] == (405, "method_not_allowed")
            assert r.headers["Allow"] == "POST"
        async with b.post(b"x", headers={"Content-Type": "text/plain"}) as r:
            assert (await error_of(r))[:2] == (415, "unsupported_media_type")
        for path in ("/healthz", "/readyz"):
            async with b.client.get(b.base + path) as r:
                assert r.status == 200, await r.text()


async def test_models_are_those_that_the_key_may_use(nats_url: str) -> None:
    """With and without version; another tenant's model is neither listed nor found."""
    async with bench(nats_url) as b:
        for key, wanted in ((KEY, ["m", "m@1", "m@2", "other", "other@1"]), (LOCAL_KEY, ["m", "m@1", "m@2"])):
            async with b.client.get(b.base + "/v1/models", headers={"Authorization": f"Bearer {key}"}) as r:
                assert [model["id"] for model in (await r.json())["data"]] == wanted
        async with b.client.get(b.base + "/v1/models/other", headers={"Authorization": f"Bearer {LOCAL_KEY}"}) as r:
            assert (await error_of(r))[:2] == (404, "model_not_found")


async def test_a_gateway_outside_the_tenants_zones_reads_nothing(nats_url: str) -> None:
    """403 before the body: the words of a tenant bound to another zone are not even read here."""
    async with bench(nats_url) as b:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(b.base.rpartition(":")[2]))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer " + LOCAL_KEY.encode() + b"\r\nContent-Length: 1000\r\n\r\n"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)  # answered though no byte of the body was sent
        assert b" 403 " in head
        writer.close()
        await writer.wait_closed()
        async with b.post(key=LOCAL_KEY) as r:
            assert (await error_of(r))[:2] == (403, "residency")


async def test_identity_and_urgency_are_never_believed(nats_url: str) -> None:
    """X01, A10: headers and fields of a client change nothing; class and deadline only within its rights."""
    lies = {
        "X-Tenant": "local",
        "X-Priority": "0",
        "X-Residency": "us",
        "X-Tokenfleet-Class": "secret",
        "X_Tenant": "z",
    }
    async with bench(nats_url) as b:
        engine = await b.engine(answering(sse("ok")))
        wishes = {"class": "batch", "task": "agent", "deadline_ms": "2500"}
        async with b.post(headers=lies, metadata=wishes, user=CANARY) as r:
            await r.read()
        (received,) = b.pilot.events(RequestReceived)
        told = received.ask
        assert (told.tenant, told.service_class, told.task) == ("acme", "batch", "agent")
        assert (told.e2e_ms, told.patience_ms) == (2500, 2500)
        assert told.entry_zone == "eu"
        headers = engine.seen[0].headers
        assert headers["x-tokenfleet-class"] == "batch"
        assert not [name for name in headers if "tenant" in name or "priority" in name or "residency" in name]
        assert "metadata" not in engine.seen[0].body
        assert engine.seen[0].body["priority"] == 2
        async with b.post(key=BATCH_KEY, metadata={"class": "chat"}) as r:
            assert (await error_of(r))[:2] == (403, "not_permitted")
        async with b.post(key=BATCH_KEY) as r:
            await r.read()
        assert b.pilot.events(RequestReceived)[-1].ask.service_class == "batch"


async def test_a_deadline_never_loosens_a_class(nats_url: str) -> None:
    """A request's own deadline may only tighten."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        async with b.post(metadata={"class": "batch", "deadline_ms": 10**9}) as r:
            await r.read()
        told = b.pilot.events(RequestReceived)[0].ask
        assert (told.e2e_ms, told.patience_ms) == (300_000, 10_000)


async def test_what_travels_is_sizes_and_digests(nats_url: str) -> None:
    """Never text: the digest equals the one of the tokens under the tenant's key, as agents would compute it."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        text = CANARY * 30
        async with b.post(messages=[{"role": "user", "content": text}], max_tokens=7, n=2) as r:
            await r.read()
        told = b.pilot.events(RequestReceived)[0].ask
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n".encode()
        assert told.input_tokens == len(prompt)
        assert told.input_tokens_source == "tokenizer"
        assert told.output_budget_tokens == 14
        chain = prefix.digests([byte + 3 for byte in prompt], prefix.tenant_key(SECRET, "acme"))
        assert (told.prefix, told.prefix_stride) == prefix.pack(chain)
        assert CANARY not in str(b.pilot.said)


@pytest.mark.parametrize(
    ("reason", "status", "retry_s"), [("tenant_rate", 429, 7.0), ("patience", 503, 0.2), ("residency", 403, None)]
)
async def test_a_refusal_keeps_its_status_and_says_when_to_come_back(
    nats_url: str, reason: str, status: int, retry_s: float | None
) -> None:
    """G11: bare 429s became an error storm; Retry-After is a whole number of at least 1, and none on a 403."""
    async with bench(nats_url) as b:
        b.pilot.answer = lambda received: b.pilot.refuse(received.ask, reason, status, retry_s)
        async with b.post() as r:
            assert (await error_of(r))[:2] == (status, reason)
            wanted = None if retry_s is None else str(max(1, round(retry_s)))
            assert r.headers.get("Retry-After") == wanted
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.reason, one.status, one.attempt) == ("refused", reason, status, 0)


async def test_a_full_gateway_refuses_at_once(nats_url: str) -> None:
    """G16: beyond its limit it answers 429 instead of falling over; what is open is not hurt."""
    async with bench(nats_url, limits=Limits(max_open=1, watch_s=0.05, stop_grace_s=1)) as b:
        engine = await b.engine(hanging)
        first = asyncio.create_task(b.post().__aenter__())
        await asyncio.wait_for(engine.arrived.wait(), 5)
        async with b.post() as r:
            assert (await error_of(r))[:2] == (429, "gateway_full")
            assert int(r.headers["Retry-After"]) >= 1
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.reason, one.attempt) == ("refused", "gateway_full", 0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await b.pilot.finished(2)


async def test_postgres_down_known_keys_go_on_and_others_are_not_judged(nats_url: str) -> None:
    """An outage of the database is not an outage of the service, and never a 401."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        async with b.post() as r:
            assert r.status == 200
        b.key_up = False
        async with b.post() as r:
            assert r.status == 200
        async with b.post(key=BATCH_KEY) as r:
            assert (await error_of(r))[:2] == (503, "unavailable")
            assert r.headers["Retry-After"] == "1"


async def test_the_bus_gone_open_streams_go_on_and_newcomers_get_503(nats_server: NatsServer) -> None:
    """NATS killed under load: the answer in progress completes, its outcome waits and is delivered afterwards."""
    go = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.head()
        events = sse("1", "2", usage=2)
        await connection.send(events[0] + events[1])
        await go.wait()
        await connection.send(b"".join(events[2:]))
        await connection.end()

    async with bench(nats_server.url) as b:
        await b.engine(script)
        async with b.post() as r:
            await r.content.readany()
            nats_server.kill()
            while b.keeper.service.bus.connected:
                await asyncio.sleep(0.01)
            async with b.post() as refused:
                assert (await error_of(refused))[:2] == (503, "unavailable")
            async with b.client.get(b.base + "/readyz") as ready:
                assert ready.status == 503
            go.set()
            assert b"[DONE]" in await r.read()
        assert b.keeper.service.bus.outbox.pending == 2
        nats_server.start()
        rows = {row.outcome: row for row in await b.pilot.finished(2)}
        assert rows["completed"].output_tokens == 2
        assert rows["refused"].reason == "unavailable"


async def test_what_was_waiting_when_the_bus_went_is_served_when_it_is_back(nats_server: NatsServer) -> None:
    """The plain `request.received` was lost with the connection: it is said again, with the next revision."""
    async with bench(nats_server.url) as b:
        await b.engine(answering(sse("ok")))
        b.pilot.answer = lambda received: None
        task = asyncio.create_task(b.post().__aenter__())
        await b.pilot.until(lambda: bool(b.pilot.said))
        nats_server.kill()
        while b.keeper.service.bus.connected:
            await asyncio.sleep(0.01)
        b.pilot.answer = None
        nats_server.start()
        r = await asyncio.wait_for(task, 10)
        assert b"[DONE]" in await r.read()
        r.release()
        assert b.pilot.events(RequestReceived)[-1].revision >= 1
        await b.pilot.finished()


async def test_metrics_do_not_grow_with_what_clients_invent(nats_url: str) -> None:
    """O02: 224,671 series from raw paths. Paths, models, ids and agents leave no trace in labels."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        async with b.post() as r:
            await r.read()
        for kind in range(2):  # the second round adds nothing
            before = len(b.metrics())
            for number in range(20):
                async with b.client.get(f"{b.base}/{kind}-{number}", headers={"User-Agent": str(number)}) as r:
                    await r.read()
                async with b.post(model=f"{kind}-{number}") as r:
                    await r.read()
                async with b.post(key=f"tf_{kind}-{number}") as r:
                    await r.read()
        assert len(b.metrics()) == before


async def test_nothing_secret_is_logged_or_counted(nats_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """X03: canary prompt, valid and invalid keys, an engine error that echoes the prompt: none in logs or metrics."""
    caplog.set_level(logging.DEBUG)

    async def echoing(connection: Connection) -> None:
        await connection.page("500 Internal Server Error", {"error": {"message": str(connection.body)}})

    async with bench(nats_url) as b:
        for _ in range(3):
            await b.engine(echoing)
        async with b.post(messages=[{"role": "user", "content": CANARY}]) as r:
            body = await r.text()
            assert r.status == 502
        async with b.post(key="tf_" + CANARY) as r:
            body += await r.text()
        rows = await b.pilot.finished(3)
        seen = caplog.text + str([r.__dict__ for r in caplog.records]) + str(b.metrics()) + body + str(rows)
        assert CANARY not in seen
        assert KEY not in seen
        assert "127.0.0.1" not in body


# --- the official client ------------------------------------------------------------------------------------------


def client_of(b: Bench, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=b.base + "/v1", api_key=key, max_retries=0)


async def test_the_openai_client_streams_and_gets_usage(nats_url: str) -> None:
    """Unchanged client code: deltas, finish reason, usage, models."""
    async with bench(nats_url) as b, client_of(b) as client:
        await b.engine(answering(sse("Hel", "lo", usage=2)))
        stream = await client.chat.completions.create(
            model="m@1",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            metadata={"class": "chat"},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage is not None
        assert whole._request_id == b.pilot.events(RequestReceived)[-1].ask.request_id
        assert [model.id async for model in client.models.list()][:2] == ["m", "m@1"]
        await b.pilot.finished(2)


async def test_the_openai_client_completes_text(nats_url: str) -> None:
    """/v1/completions, streamed and whole."""
    event = b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"yes","finish_reason":"stop"}]}\n\n'  # noqa: E501
    async with bench(nats_url) as b, client_of(b) as client:
        engine = await b.engine(answering([event, b"data: [DONE]\n\n"]))
        whole = await client.completions.create(model="m", prompt="say yes", max_tokens=3)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("yes", "stop")
        stream = await client.completions.create(model="m", prompt="say yes", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["yes"]
        assert engine.seen[0].body["max_tokens"] == 3
        assert b.pilot.events(RequestReceived)[0].ask.input_tokens == len("say yes")
        await b.pilot.finished(2)


async def test_the_openai_client_knows_our_errors(nats_url: str) -> None:
    """Each status becomes the client's own exception, with our code, and Retry-After where it belongs."""
    async with bench(nats_url) as b, client_of(b) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="m", messages=[])
        assert bad.value.param == "messages"
        async with client_of(b, "tf_wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        b.pilot.answer = lambda received: b.pilot.refuse(received.ask, "queue_full", 429, 4.0)
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert full.value.code == "queue_full"
        assert full.value.response.headers["Retry-After"] == "4"


async def test_the_openai_client_retries_a_429_by_itself(nats_url: str) -> None:
    """Its default retry honours Retry-After and gets through; two requests in the ledger, each with its own id."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        b.pilot.answer = lambda received: (
            b.pilot.refuse(received.ask, "saturated", 429, 1.0)
            if len(b.pilot.events(RequestReceived)) == 1
            else b.pilot.assign(received.ask, 1)
        )
        async with openai.AsyncOpenAI(base_url=b.base + "/v1", api_key=KEY, max_retries=1) as client:
            whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "ok"
        assert [row.outcome for row in await b.pilot.finished(2)] == ["refused", "completed"]


async def test_the_openai_client_sees_a_cut_answer_as_an_error(nats_url: str) -> None:
    """G01 as the client's code meets it: tokens, then an exception; never a clean end."""

    async def cut(connection: Connection) -> None:
        await connection.head()
        await connection.send(b"".join(sse("a", "b")[:3]))
        connection.reset()

    async with bench(nats_url) as b, client_of(b) as client:
        await b.engine(cut)
        seen: list[str | None] = []
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="cut off"):
            await _collect(stream, seen)
        assert "".join(filter(None, seen)) == "ab"
        await b.pilot.finished()


async def _collect(stream: Any, seen: list[str | None]) -> None:
    async for chunk in stream:
        seen.append(chunk.choices[0].delta.content)  # noqa: PERF401  # what came before an exception is kept


async def test_the_openai_client_cancels(nats_url: str) -> None:
    """Closing the stream early stops the engine; so does a time-out of the client on a call without stream (L10)."""
    async with bench(nats_url) as b, client_of(b) as client:

        async def slow(connection: Connection) -> None:
            await connection.head()
            await connection.send(b"".join(sse("a")[:2]))
            await connection.closed.wait()

        engine = await b.engine(slow)
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async for _chunk in stream:
            break
        await stream.close()
        await asyncio.wait_for(engine.seen[0].closed.wait(), 2)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
        await asyncio.wait_for(engine.seen[1].closed.wait(), 2)
        assert [row.outcome for row in await b.pilot.finished(2)] == ["cancelled", "cancelled"]


async def test_a_large_body_waits_for_its_go_ahead(nats_url: str) -> None:
    """curl sends `Expect: 100-continue` with large bodies and waits for the word."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        body = chat()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(b.base.rpartition(":")[2]))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nConnection: close\r\n"
            b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b"[DONE]" in await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
        await b.pilot.finished()


async def test_a_prompt_is_counted_by_the_engine_where_no_tokenizer_is_named(nats_url: str) -> None:
    """`tokenizer = "engine"`: /tokenize of a ready instance; without one, an estimate and no digest."""
    fleet = FLEET.replace('tokenizer = "bytes"\n[models.other]', 'tokenizer = "engine"\n[models.other]')
    paths: list[Any] = []

    async def script(connection: Connection) -> None:
        paths.append(connection.body)
        if "stream" in connection.body:
            await answering(sse("ok", usage=1))(connection)
        else:
            await connection.page("200 OK", {"count": 70, "max_model_len": 2000, "tokens": list(range(70))})

    async with bench(nats_url, fleet=fleet) as b:
        engine = await b.engine(script)
        async with b.post() as r:
            await r.read()
        told = b.pilot.events(RequestReceived)[0].ask
        assert (told.input_tokens_source, told.prefix) == ("estimate", "")
        assert told.input_tokens == round(told.request_bytes / 4)
        b.pilot.bus.publish(b.pilot.report("b-0", engine))
        while not b.keeper.core.capacity.instances("b"):
            await asyncio.sleep(0.01)
        async with b.post() as r:
            await r.read()
        told = b.pilot.events(RequestReceived)[1].ask
        assert (told.input_tokens, told.input_tokens_source) == (70, "engine")
        assert told.prefix == prefix.pack(prefix.digests(range(70), prefix.tenant_key(SECRET, "acme")))[0]
        assert paths[1]["messages"] == [{"role": "user", "content": "hello"}]
        await b.pilot.finished(2)


async def test_many_at_once(nats_url: str) -> None:
    """Two hundred concurrent streams: each its own answer, one row each, nothing left."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("a", "b", "c", usage=3), pause_s=0.01))
        bodies = await asyncio.gather(*(_read(b) for _ in range(200)))
        assert all(body.count(b"[DONE]") == 1 for body in bodies)
        rows = await b.pilot.finished(200)
        assert {row.outcome for row in rows} == {"completed"}
        assert len({row.request_id for row in rows}) == 200
        assert all(isinstance(row, OutcomeFinished) for row in rows)


async def _read(b: Bench) -> bytes:
    async with b.post() as r:
        return await r.read()


async def test_http_that_is_none_does_not_disturb(nats_url: str) -> None:
    """Garbage on the port: closed or answered 400, and the next client is served."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        with socket.create_connection(("127.0.0.1", int(b.base.rpartition(":")[2]))) as raw:
            raw.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"[DONE]" in await _read(b)
        await b.pilot.finished()
