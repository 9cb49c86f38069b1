"""A real gateway between a client and engines that fail in every way that operators have reported."""

import asyncio
import json
import random
import socket
from typing import Any

import aiohttp
import pytest
from tests.integration.gateway_bench import FLEET, Bench, Connection, Engine, answering, ask, bench, event, hanging, sse

from tokenfleet import fleet as fleets
from tokenfleet.gateway.settings import Limits
from tokenfleet.gateway.sse import Scanner
from tokenfleet.gateway.state import Dispatch
from tokenfleet_schemas.outcome import OutcomeStarted
from tokenfleet_schemas.placement import PlacementDeclined


async def read(response: aiohttp.ClientResponse) -> list[Any]:
    """The events of a stream, decoded; `[DONE]` as it is."""
    body = await response.read()
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return [event.decode() if event == b"[DONE]" else json.loads(event) for event in events]


def text_of(events: list[Any]) -> str:
    return "".join(
        e["choices"][0]["delta"].get("content", "") for e in events if isinstance(e, dict) and e.get("choices")
    )


async def test_a_stream_is_passed_on_and_told(nats_url: str) -> None:
    """The uncongested road: bytes untouched, started and finished said, the engine told what is ours to say."""
    async with bench(nats_url) as b:
        engine = await b.engine(answering(sse("Hel", "lo", usage=2)))
        async with b.post(
            priority=9, cache_salt="mine", kv_transfer_params={}, metadata={"class": "chat", "x": "y"}
        ) as r:
            assert r.status == 200
            assert r.headers["Content-Type"].startswith("text/event-stream")
            assert (r.headers["X-Tokenfleet-Site"], r.headers["X-Tokenfleet-Model"]) == ("b", "m@1")
            assert r.headers["X-Tokenfleet-Attempts"] == "1"
            assert "127.0.0.1" not in str(r.headers)
            events = await read(r)
        assert events[-1] == "[DONE]"
        assert text_of(events) == "Hello"
        assert not any(isinstance(e, dict) and "usage" in e for e in events), "usage was not asked for"
        (done,) = await b.pilot.finished()
        assert (done.outcome, done.status, done.output_tokens, done.usage_source) == ("completed", 200, 2, "engine")
        assert (done.input_tokens, done.finish_reason, done.model_served) == (9, "stop", "m")
        assert done.times.ttft_ms is not None
        (started,) = b.pilot.events(OutcomeStarted)
        assert started.booking == done.booking != ""
        (seen,) = engine.seen
        assert seen.body["priority"] == 0
        assert seen.body["cache_salt"] not in ("", "mine")
        assert "kv_transfer_params" not in seen.body
        assert seen.body["metadata"] == {"x": "y"}
        assert seen.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert seen.headers["x-request-id"] == f"{done.request_id}-1"
        assert "authorization" not in seen.headers, "the client's key never reaches an engine"


async def test_usage_is_passed_on_to_who_asked(nats_url: str) -> None:
    """`stream_options.include_usage`."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("a", usage=1)))
        async with b.post(stream_options={"include_usage": True}) as r:
            events = await read(r)
        assert events[-2]["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("split", range(1, len(b"data: [DONE]\n\n")))
async def test_the_end_marker_may_be_split_anywhere(nats_url: str, split: int) -> None:
    """G08: exactly one completion, nothing left booked."""
    events = sse("a", usage=1)
    done = events.pop()

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(b"".join(events) + done[:split])
        await asyncio.sleep(0.005)
        await connection.send(done[split:])
        await connection.end()

    async with bench(nats_url) as b:
        await b.engine(script)
        async with b.post() as r:
            assert (await read(r))[-1] == "[DONE]"
        (one,) = await b.pilot.finished()
        assert one.outcome == "completed"


async def test_a_stream_without_its_end_marker_is_complete_after_the_finish(nats_url: str) -> None:
    """G08: the engine closed after finish_reason without [DONE]."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("a", "b")[:-1]))
        async with b.post() as r:
            assert (await read(r))[-1] == "[DONE]"
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.output_tokens, one.usage_source) == ("completed", 2, "estimated")


async def _cut_after_five(connection: Connection) -> None:
    await connection.head()
    for one in sse(*"12345")[:6]:
        await connection.send(one)
    await asyncio.sleep(0.05)
    connection.reset()


async def test_a_reset_after_tokens_is_one_error_and_no_end(nats_url: str) -> None:
    """G01, G02: five tokens, then RST: the five, one typed error, no [DONE], no second engine."""
    async with bench(nats_url) as b:
        await b.engine(_cut_after_five)
        other = await b.engine(answering(sse("x")))
        async with b.post() as r:
            events = await read(r)
        assert text_of(events) == "12345"
        errors = [e for e in events if "error" in e]
        assert [e["error"]["code"] for e in errors] == ["upstream_disconnected"]
        assert events[-1] is errors[0]
        assert "[DONE]" not in events
        assert not any(e["choices"][0]["finish_reason"] for e in events[:-1])
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.final, one.output_tokens) == ("failed_midstream", True, 5)
        assert other.seen == []


async def _cut_after_role(connection: Connection) -> None:
    await connection.head()
    await connection.send(sse()[0])
    await asyncio.sleep(0.05)
    connection.reset()


async def _error_first(connection: Connection) -> None:
    await connection.head()
    await connection.send(b'data: {"error": {"message": "busy", "type": "x", "code": 503}}\n\ndata: [DONE]\n\n')
    await connection.end()


async def _busy(connection: Connection) -> None:
    await connection.page("503 Service Unavailable", {"error": {"message": "busy", "code": 503}})


async def _reset_at_once(connection: Connection) -> None:
    connection.reset()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_cut_after_role, "upstream_disconnected"),
        (_error_first, "upstream_error"),
        (_busy, "upstream_busy"),
        (_reset_at_once, "upstream_disconnected"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_is_repeated_elsewhere(
    nats_url: str, script: Any, reason: str, stream: bool
) -> None:
    """L09: the client sees one clean answer, and where it is from; the ledger has both attempts at their instances."""
    async with bench(nats_url) as b:
        await b.engine(script)
        await b.engine(answering(sse("ok", usage=1)))
        async with b.post(stream=stream) as r:
            assert r.status == 200
            assert r.headers["X-Tokenfleet-Attempts"] == "2"
            assert (r.headers["X-Tokenfleet-Site"], r.headers["X-Tokenfleet-Model"]) == ("b", "m@1")
            if stream:
                events = await read(r)
                assert text_of(events) == "ok"
                assert [e for e in events if isinstance(e, dict) and "role" in e["choices"][0]["delta"]] == events[:1]
            else:
                assert (await r.json())["choices"][0]["message"]["content"] == "ok"
        first, second = await b.pilot.finished(2)
        assert (first.attempt, first.final, first.outcome, first.reason) == (1, False, "failed", reason)
        assert first.instance == "b-0"
        assert first.excluded == ("b-0",)
        assert (second.attempt, second.final, second.outcome, second.instance) == (2, True, "completed", "b-1")


async def test_three_failures_are_a_typed_error(nats_url: str) -> None:
    """Nothing was streamed, so the status still tells."""
    async with bench(nats_url) as b:
        await b.engine(_busy)
        await b.engine(_busy)
        await b.engine(_error_first)
        async with b.post() as r:
            assert r.status == 502
            assert (await r.json())["error"]["code"] == "upstream_error"
        assert [f.final for f in await b.pilot.finished(3)] == [False, False, True]


async def test_a_refused_connection_is_repeated_elsewhere(nats_url: str) -> None:
    """The engine's process is gone and its port with it."""
    async with bench(nats_url) as b:
        gone = await b.engine(hanging)
        await gone.stop()
        await b.engine(answering(sse("ok")))
        async with b.post() as r:
            assert text_of(await read(r)) == "ok"
        first, _ = await b.pilot.finished(2)
        assert first.reason == "upstream_unreachable"


async def test_the_engines_word_that_the_request_is_wrong_is_passed_on_once(nats_url: str) -> None:
    """A 400 of the engine is the client's, not the instance's fault: no second attempt."""
    async with bench(nats_url) as b:
        page = {
            "error": {"message": "This model's maximum context length is 5.", "type": "x", "param": "p", "code": 400}
        }

        async def script(connection: Connection) -> None:
            await connection.page("400 Bad Request", page)

        engine = await b.engine(script)
        async with b.post() as r:
            assert r.status == 400
            error = (await r.json())["error"]
        assert (error["code"], error["param"], error["type"]) == (
            "context_length_exceeded",
            "p",
            "invalid_request_error",
        )
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.status, one.final) == ("rejected", 400, True)
        assert len(engine.seen) == 1


async def test_a_whole_answer_is_put_together_and_its_first_token_known(nats_url: str) -> None:
    """stream=false: the engine streams, the client gets one object, TTFT is told."""
    async with bench(nats_url) as b:
        engine = await b.engine(answering(sse("Hel", "lo", usage=2)))
        async with b.post(stream=False) as r:
            answer = await r.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"] == "Hello"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["total_tokens"] == 11
        assert engine.seen[0].body["stream"] is True
        (one,) = await b.pilot.finished()
        assert (one.stream, one.output_tokens) == (False, 2)
        assert one.times.ttft_ms is not None


async def test_what_does_not_stream_alike_is_passed_through_whole(nats_url: str) -> None:
    """Tools: the engine's own whole answer, byte for byte; when its first token came nobody knows."""
    page = {
        "model": "m",
        "choices": [{"finish_reason": "tool_calls", "message": {"tool_calls": [1]}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
    async with bench(nats_url) as b:
        raw = json.dumps(page).encode()

        async def script(connection: Connection) -> None:
            await connection.page("200 OK", raw)

        engine = await b.engine(script)
        async with b.post(stream=False, tools=[{"type": "function"}]) as r:
            assert await r.read() == raw
        assert engine.seen[0].body["stream"] is False
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.output_tokens, one.times.ttft_ms, one.finish_reason) == (
            "completed",
            4,
            None,
            "tool_calls",
        )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
async def test_a_client_that_leaves_stops_the_engine(nats_url: str, stream: bool, tools: Any) -> None:
    """G06, L01: the engine's socket is closed at once, the row tells what was delivered."""
    ready = asyncio.Event()

    async def script(connection: Connection) -> None:
        if connection.body["stream"]:
            await connection.head()
            for event in sse("1", "2", "3")[:4]:
                await connection.send(event)
        ready.set()
        await connection.closed.wait()

    async with bench(nats_url) as b:
        engine = await b.engine(script)
        task = asyncio.create_task(_drain(b, stream=stream, **({"tools": tools} if tools else {})))
        await asyncio.wait_for(ready.wait(), 5)
        if engine.seen[0].body["stream"]:
            await b.pilot.until(lambda: bool(b.pilot.events(OutcomeStarted)))
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(engine.seen[0].closed.wait(), 2)
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.final, one.attempt) == ("cancelled", True, 1)
        assert one.output_tokens == (3 if engine.seen[0].body["stream"] else 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("streams", [60, pytest.param(1000, marks=pytest.mark.soak)])
async def test_cancelled_calls_cost_what_the_engine_did(nats_url: str, streams: int) -> None:
    """L01: clients leave at any token, of streams and (a fifth as many) of whole answers, and the engine puts four
    tokens into each event: a row for each, and their sum is the engine's own but for what was in flight."""
    made: dict[str, int] = {}
    dice = random.Random(7)

    async def script(connection: Connection) -> None:
        await connection.head()
        name = connection.headers["x-tokenfleet-request-id"]
        for tokens in range(4, 2004, 4):
            if connection.closed.is_set():
                return
            made[name] = tokens
            await connection.send(event({"content": "four"}, counted=tokens))
            await asyncio.sleep(0.002)

    async def leave_stream(b: Bench) -> None:
        want = dice.randint(1, 200)
        async with b.post(stream=True) as response:
            got = 0
            while got < 4 * want:
                got += (await response.content.readany()).count(b"four") * 4

    async def leave_whole(b: Bench) -> None:
        """Nothing comes before the end: gone at some time after the engine has begun."""
        begun = len(made)
        call = asyncio.create_task(_drain(b, stream=False))
        while len(made) == begun:
            await asyncio.sleep(0.005)
        await asyncio.sleep(dice.random() / 20)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async with bench(nats_url) as b:
        await b.engine(script)
        for _ in range(streams // 20):
            await asyncio.gather(*(leave_stream(b) for _ in range(20)))
            for _ in range(4):
                await leave_whole(b)
        sent = streams // 20 * 24
        outcomes = await b.pilot.finished(sent)
        assert {one.outcome for one in outcomes} == {"cancelled"}
        assert len({one.request_id for one in outcomes}) == sent
        for one in outcomes:
            assert made.get(one.request_id, 0) - 16 <= one.output_tokens <= made.get(one.request_id, 0), one
        # within half a percent of the engine's own count, but for the events in flight as each client left
        total = sum(made.values())
        assert total - sum(one.output_tokens for one in outcomes) <= 0.005 * total + 4 * sent


async def _drain(b: Bench, **more: Any) -> bytes:
    async with b.post(**more) as r:
        return await r.read()


async def test_a_client_that_leaves_while_held_is_never_dispatched(nats_url: str) -> None:
    """G06: queued calls leave the queue, and the engine never sees them."""
    async with bench(nats_url) as b:
        engine = await b.engine(hanging)
        b.pilot.answer = lambda received: b.pilot.hold(received.ask)
        task = asyncio.create_task(_drain(b))
        while not any(o.stage.value == "held" for o in b.keeper.core.requests.values()):
            await asyncio.sleep(0.01)
        (ask_,) = [o.ask for o in b.keeper.core.requests.values()]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.attempt, one.final) == ("cancelled", 0, True)
        b.pilot.bus.publish(b.pilot.assign(ask_, 1))
        await b.pilot.until(lambda: bool(b.pilot.events(PlacementDeclined)))
        assert engine.seen == []


async def test_a_hung_instance_is_given_up_and_hinders_nobody(nats_url: str) -> None:
    """G04, G17: one engine takes everything and answers nothing; its pool is its own."""
    limits = Limits(first_token_min_ms=1500, first_token_max_ms=1500, watch_s=0.05, stop_grace_s=1)
    async with bench(nats_url, limits=limits) as b:
        await b.engine(hanging)
        await b.engine(answering(sse("ok")))
        hung = [asyncio.create_task(_drain(b)) for _ in range(50)]
        await b.pilot.until(lambda: len(b.pilot.said) >= 50)
        b.pilot.answer = lambda received: b.pilot.assign(received.ask, 1, instance="b-1", endpoint_url=b.engines[1].url)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(_drain(b) for _ in range(20)))
        assert asyncio.get_running_loop().time() - began < 1.2
        bodies = await asyncio.wait_for(asyncio.gather(*hung), 10)
        assert all(b"[DONE]" in body for body in bodies)
        rows = await b.pilot.finished(120)
        assert sum(row.outcome == "timed_out" and not row.final for row in rows) == 50


async def test_an_instance_reported_gone_frees_its_waiting_requests(nats_url: str) -> None:
    """G04: within two seconds of the report they are placed elsewhere."""
    async with bench(nats_url) as b:
        gone = await b.engine(hanging)
        await b.engine(answering(sse("ok")))
        task = asyncio.create_task(_drain(b))
        await asyncio.wait_for(gone.arrived.wait(), 5)
        b.pilot.bus.publish(b.pilot.report("b-0", gone, ready=False, reason="unreachable"))
        assert b"[DONE]" in await asyncio.wait_for(task, 2)
        first, _ = await b.pilot.finished(2)
        assert first.reason == "instance_gone"


async def test_an_engine_that_stops_in_the_middle_is_not_waited_for(nats_url: str) -> None:
    """SIGSTOP in the middle of an answer: a typed error instead of silence."""

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(sse("1")[0] + sse("1")[1])
        await connection.closed.wait()

    async with bench(nats_url, limits=Limits(token_gap_ms=300, watch_s=0.05, stop_grace_s=1)) as b:
        await b.engine(script)
        async with b.post() as r:
            events = await read(r)
        assert events[-1]["error"]["code"] == "token_timeout"
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.output_tokens) == ("timed_out", 1)


async def test_a_client_that_does_not_read_is_cut_and_costs_no_memory(nats_url: str) -> None:
    """G09: 200 MB for a client that never reads took a process from 68 MB to 646 MB."""
    wanted = 64 * 1024 * 1024
    event = sse("x" * 16_000)[1]

    async def script(connection: Connection) -> None:
        await connection.head()
        while connection.sent < wanted:
            await connection.send(event)

    async with bench(nats_url, limits=Limits(client_stall_ms=500, watch_s=0.05, stop_grace_s=1)) as b:
        engine = await b.engine(script)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            raw.setblocking(False)
            loop = asyncio.get_running_loop()
            host, port = b.base.removeprefix("http://").split(":")
            await loop.sock_connect(raw, (host, int(port)))
            body = json.dumps(ask()).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {'tf_' + 'k' * 30}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(raw, head.encode() + body)
            (one,) = await b.pilot.finished()
            await asyncio.wait_for(engine.seen[0].closed.wait(), 2)
        assert (one.outcome, one.final) == ("client_stalled", True)
        assert engine.seen[0].sent < 20 * 1024 * 1024, "the engine felt that nobody reads"


async def test_an_idle_connection_that_the_engine_closed_is_no_failure(nats_url: str) -> None:
    """vLLM closes idle connections: a pooled POST may meet the close, and one fresh try settles it."""

    class Closing(Engine):
        """Closes the connection as soon as a second request is written to it."""

    async def script(connection: Connection) -> None:
        first = next(c for c in engine.seen if c.writer is connection.writer)
        if first is not connection:
            connection.reset()
            return
        await answering(sse("ok"))(connection)

    async with bench(nats_url) as b:
        engine = await b.engine(script)
        for _ in range(2):
            async with b.post() as r:
                assert text_of(await read(r)) == "ok"
        assert [row.attempt for row in await b.pilot.finished(2)] == [1, 1]
        assert len(engine.seen) == 3
        assert len({id(c.writer) for c in engine.seen}) == 2


async def test_a_stop_lets_streams_finish_and_ends_the_rest_with_a_word(nats_url: str) -> None:
    """SIGTERM: within the grace a stream ends by itself; after it the client gets a typed error and a row."""
    go = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.head()
        events = sse("1", "2")
        await connection.send(events[0] + events[1])
        if len(b.engines[0].seen) == 1:
            await go.wait()
            await connection.send(b"".join(events[2:]))
            await connection.end()
        else:
            await connection.closed.wait()

    async with bench(nats_url) as b:
        await b.engine(script)
        tasks = []
        for count in (1, 2):
            tasks.append(asyncio.create_task(_drain(b)))
            await b.pilot.until(lambda count=count: len(b.pilot.events(OutcomeStarted)) == count)  # type: ignore[misc]
        b.keeper.service.stopping.set()
        await asyncio.sleep(0.05)
        go.set()
        finished, cut = await asyncio.gather(*tasks)
        assert b"[DONE]" in finished
        assert b"gateway_stopping" in cut
        assert b"[DONE]" not in cut
        outcomes = {row.outcome for row in await b.pilot.finished(2)}
        assert outcomes == {"completed", "failed_midstream"}


async def test_a_client_that_leaves_between_two_attempts_leaves_nothing(nats_url: str) -> None:
    """Attempt 1 failed, attempt 2 is assigned in the very moment in which the client goes: both are closed."""
    async with bench(nats_url) as b:
        await b.engine(_busy)
        await b.engine(hanging)
        task = asyncio.create_task(_drain(b))

        def leave() -> None:
            """Called with the assignment of attempt 2 decided and not yet dispatched."""
            (exchange,) = b.keeper.exchanges.values()
            assert exchange.request.transport is not None
            exchange.request.transport.abort()

        apply = b.keeper.apply

        def watched(effects: Any) -> None:
            found = list(effects)
            apply(found)
            if any(isinstance(e, Dispatch) and e.attempt == 2 for e in found):
                leave()

        b.keeper.apply = watched  # type: ignore[method-assign]
        rows = await b.pilot.finished(2)
        assert [(row.attempt, row.final, row.outcome) for row in rows] == [(1, False, "failed"), (2, True, "cancelled")]
        await asyncio.gather(task, return_exceptions=True)


async def test_a_fault_of_the_gateway_itself_closes_its_books(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the relay must not leave a booking behind, and the half answer must not look whole."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("a", "b"), pause_s=0.05))
        feed, calls = Scanner.feed, iter(range(100))

        def failing(self: Scanner, data: bytes) -> bytes:
            if next(calls) == 2:
                raise RuntimeError("a bug")
            return feed(self, data)

        monkeypatch.setattr(Scanner, "feed", failing)
        with pytest.raises(aiohttp.ClientPayloadError):
            async with b.post() as r:
                await r.read()
        (one,) = await b.pilot.finished()
        assert (one.outcome, one.reason, one.final) == ("failed_midstream", "gateway_error", True)


async def test_a_reloaded_fleet_holds_from_the_next_request(nats_url: str) -> None:
    """SIGHUP: a tenant that is gone is a stranger, a lower limit holds, a broken file changes nothing."""
    async with bench(nats_url) as b:
        await b.engine(answering(sse("ok")))
        assert b"[DONE]" in await _drain(b)
        b.keeper._reload(fleets.parse(FLEET.replace('"bytes"', '"missing.json"').encode()))
        assert b"[DONE]" in await _drain(b)
        b.keeper._reload(fleets.parse(FLEET.replace("max_model_len = 2000", "max_model_len = 5").encode()))
        async with b.post() as r:
            assert (await r.json())["error"]["code"] == "context_length_exceeded"
        b.keeper._reload(fleets.parse(FLEET.replace("[tenants.acme]", "[tenants.renamed]").encode()))
        async with b.post() as r:
            assert r.status == 401
        await b.pilot.finished(2)
