"""One Idempotency-Key, several gateways: one run on the engine and one row, whoever asks again wherever and when."""

import asyncio
import contextlib
import json
import secrets
import socket
from typing import Any

import pytest
from tests.integration.gateway_bench import (
    FLEET,
    KEY,
    LOCAL_KEY,
    Bench,
    Connection,
    Engine,
    Script,
    answering,
    ask,
    bench,
    hanging,
    sse,
)

from tokenfleet.gateway.settings import Limits
from tokenfleet.local.nats import NatsServer
from tokenfleet_schemas.outcome import OutcomeFinished

#: the tests share a server: keys of their own
RUN = secrets.token_hex(8)
FAST = Limits(stop_grace_s=1.0, watch_s=0.05, lease_s=0.1, claim_silent_s=2.0)


@pytest.fixture(autouse=True)
def keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RUN", secrets.token_hex(8))


def once(b: Bench, name: str = "k-1", **more: Any) -> Any:
    """A request with a key."""
    return b.post(headers={"Idempotency-Key": f"{RUN}-{name}"}, **more)


async def code(b: Bench, name: str = "k-1", **more: Any) -> tuple[int, str]:
    async with once(b, name, **more) as r:
        page = await r.json()
        assert ("Retry-After" in r.headers) == (r.status in (429, 503) or page["error"]["code"] != "answer_gone")
        return r.status, page["error"]["code"]


def gated(gate: asyncio.Event, *parts: str) -> Script:
    """Begins to answer, and ends when told to."""

    async def script(connection: Connection) -> None:
        await connection.head()
        events = sse(*parts, usage=len(parts))
        for event in events[:2]:
            await connection.send(event)
        await gate.wait()
        for event in events[2:]:
            await connection.send(event)
        await connection.end()

    return script


async def given_up(b: Bench, engine: Engine, **more: Any) -> None:
    """A client that loses its patience while the engine is at work."""
    call = asyncio.create_task(read(b, **more))
    await asyncio.wait_for(engine.arrived.wait(), 30)
    await asyncio.sleep(0.1)
    call.cancel()
    assert await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()


def text_of(body: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    pieces = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in pieces if one["choices"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_time_out_and_two_retries_run_once_and_are_billed_once(nats_url: str, stream: bool) -> None:
    """L10: the client's time-out does not tell whether its call landed, and its SDK asks twice again, by the balancer's
    choice the other gateway and the first: one engine run, one row, and the answer for who comes back for it."""
    async with bench(nats_url) as a, bench(nats_url) as b:
        gate = asyncio.Event()
        engine = await a.engine(gated(gate, "once", " only"))
        await b.engine(hanging)
        await given_up(a, engine, stream=stream)
        assert await code(b, stream=stream) == (409, "in_progress")
        assert not engine.seen[0].closed.is_set()
        asyncio.get_running_loop().call_later(0.1, gate.set)
        async with once(a, stream=stream) as r:
            assert r.status == 200
            assert r.headers["X-Tokenfleet-Repeated"] == "true"
            body = await r.read()
            assert text_of(body, stream=stream) == "once only"
            assert body.endswith(b"data: [DONE]\n\n") or not stream
        (row,) = await a.pilot.finished()
        assert (row.outcome, row.output_tokens, row.attempt) == ("completed", 2, 1)
        # afterwards as well: the same bytes here, and nothing run there
        async with once(a, stream=stream) as r:
            assert await r.read() == body
            assert r.headers["X-Request-Id"] == row.request_id
        await until_answered(b, stream=stream)
        assert len(engine.seen) == 1
        assert b.engines[0].seen == []
        assert len(a.pilot.events(OutcomeFinished)) == 1
        assert b.pilot.events(OutcomeFinished) == []


async def until_answered(b: Bench, **more: Any) -> None:
    """The other gateway knows that it is over."""
    async with asyncio.timeout(40):
        while (found := await code(b, **more)) != (409, "answered_elsewhere"):
            assert found == (409, "in_progress")
            await asyncio.sleep(0.02)


async def test_repeats_beside_the_first_follow_it(nats_url: str) -> None:
    """L10: ten at once with one key, at both gateways: those of the running one get the answer, the others 409."""
    async with bench(nats_url) as a, bench(nats_url) as b:
        gate = asyncio.Event()
        engines = [await one.engine(gated(gate, "one", " run")) for one in (a, b)]

        async def call(one: Bench) -> tuple[int, str]:
            async with once(one) as r:
                body = await r.read()
                return r.status, text_of(body, stream=True) if r.status == 200 else json.loads(body)["error"]["code"]

        calls = [asyncio.create_task(call(one)) for one in (a, b) for _ in range(5)]
        async with asyncio.timeout(40):
            while sum(done.done() for done in calls) < 5:
                await asyncio.sleep(0.01)
        gate.set()
        found = await asyncio.gather(*calls)
        assert sorted(found) == [(200, "one run")] * 5 + [(409, "in_progress")] * 5
        assert sum(len(engine.seen) for engine in engines) == 1


async def test_a_key_holds_for_one_body_and_one_tenant(nats_url: str) -> None:
    """L10: the same key with another body is a mistake, at any gateway; another tenant's is another key."""
    fleet = FLEET.replace('zones = ["us"]', 'zones = ["*"]')
    async with bench(nats_url, fleet=fleet) as a, bench(nats_url, fleet=fleet) as b:
        engine = await a.engine(answering(sse("mine", usage=1)))
        await b.engine(hanging)
        async with once(a) as r:
            assert text_of(await r.read(), stream=True) == "mine"
        for one in (a, b):
            assert await code_of_other_body(one) == (422, "idempotency_key_reused")
        assert len(engine.seen) == 1
        a.pilot.places = [("b-1", second := await a.engine(answering(sse("yours", usage=1))))]
        async with once(a, key=LOCAL_KEY) as r:
            assert "X-Tokenfleet-Repeated" not in r.headers
            assert text_of(await r.read(), stream=True) == "yours"
        assert (len(engine.seen), len(second.seen)) == (1, 1)
        rows = await a.pilot.finished(2)
        assert [row.tenant for row in rows] == ["acme", "local"]
        assert b.engines[0].seen == []


async def code_of_other_body(b: Bench) -> tuple[int, str]:
    async with once(b, max_tokens=7) as r:
        return r.status, (await r.json())["error"]["code"]


@pytest.mark.parametrize("value", ["", "x" * 256, "näh", "a\tb"])
async def test_a_key_that_is_none_is_refused(nats_url: str, value: str) -> None:
    """Nothing that a client invents is hashed, stored or repeated without a limit."""
    async with bench(nats_url) as a:
        engine = await a.engine(answering(sse("no")))
        async with a.post(headers={"Idempotency-Key": value}) as r:
            assert r.status == 400
            assert (await r.json())["error"]["code"] == "invalid_idempotency_key"
        assert engine.seen == []


async def test_what_failed_gives_its_key_free(nats_url: str) -> None:
    """A retry of what ended without a whole answer is the retry that its client wants, at any gateway."""

    async def wrong(connection: Connection) -> None:
        await connection.page("400 Bad Request", {"error": {"message": "no", "param": "seed"}})

    async with bench(nats_url) as a, bench(nats_url) as b:
        engine = await a.engine(wrong)
        second = await b.engine(answering(sse("well", usage=1)))
        for _ in range(2):
            async with once(a) as r:
                assert r.status == 400
        assert len(engine.seen) == 2
        async with asyncio.timeout(40):
            while True:
                async with once(b) as r:
                    if r.status == 200:
                        assert text_of(await r.read(), stream=True) == "well"
                        break
                    assert (await r.json())["error"]["code"] == "in_progress"  # the word is on its way
        assert len(second.seen) == 1


async def test_a_key_of_a_gateway_that_is_gone_is_taken_over(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway dies with the request open: its key is nobody's after a while, not for ten minutes; and who comes back
    from a pause to a claim that others have ends its run."""
    async with bench(nats_url, limits=FAST) as a, bench(nats_url, limits=FAST) as b:
        engine = await a.engine(hanging)
        await b.engine(answering(sse("taken", " over", usage=2)))
        first = asyncio.create_task(read(a))
        await asyncio.wait_for(engine.arrived.wait(), 40)
        assert await code(b) == (409, "in_progress")
        # it is paused: no word of it
        with monkeypatch.context() as paused:
            paused.setattr(a.keeper.once, "beat", _nothing)
            async with asyncio.timeout(40):
                while True:
                    async with once(b) as r:
                        if r.status == 200:
                            assert text_of(await r.read(), stream=True) == "taken over"
                            break
                    await asyncio.sleep(0.05)
        assert (await asyncio.wait_for(first, 40))[0] == 503
        await asyncio.wait_for(engine.seen[0].closed.wait(), 40)
        (row,) = await a.pilot.finished()
        assert (row.outcome, row.reason) == ("cancelled", "claim_lost")
        assert [one.outcome for one in await b.pilot.finished()] == ["completed"]


async def _nothing() -> None:
    pass


async def read(b: Bench, **more: Any) -> tuple[int, bytes]:
    async with once(b, **more) as r:
        return r.status, await r.read()


async def test_without_the_bus_a_key_is_refused_and_a_run_goes_on(nats_server: NatsServer) -> None:
    """Who holds a key cannot be known: typed and soon over, never run; the answer made meanwhile is kept."""
    async with bench(nats_server.url) as a, bench(nats_server.url) as b:
        gate = asyncio.Event()
        engine = await a.engine(gated(gate, "kept", " on"))
        await b.engine(hanging)
        await given_up(a, engine)
        await asyncio.to_thread(nats_server.kill)
        async with asyncio.timeout(40):
            while a.keeper.service.bus.connected or b.keeper.service.bus.connected:
                await asyncio.sleep(0.02)
        gate.set()
        assert (await read(a))[0] == 200
        for one, name in ((a, "k-2"), (b, "k-1")):
            assert await code(one, name) == (503, "unavailable")
        await asyncio.to_thread(nats_server.start)
        async with asyncio.timeout(40):
            while not (a.keeper.service.bus.connected and b.keeper.service.bus.connected):
                await asyncio.sleep(0.02)
        # not run again, although nothing was heard of its claim for a while
        async with asyncio.timeout(40):
            while (found := await code(b)) != (409, "answered_elsewhere"):
                assert found in ((409, "in_progress"), (503, "unavailable"))
                await asyncio.sleep(0.1)
        assert len(engine.seen) == 1


async def test_answers_beyond_what_may_be_kept_are_gone_and_not_made_again(nats_url: str) -> None:
    """Memory for answers is bounded; a key whose answer was dropped stays used."""
    limits = Limits(stop_grace_s=1.0, watch_s=0.05, kept_bytes=1_000)
    async with bench(nats_url, limits=limits) as a:
        engine = await a.engine(answering(sse("x" * 700, usage=1)))
        for name in ("k-1", "k-2"):
            async with once(a, name) as r:
                await r.read()
        assert 0 < a.keeper.once.kept_bytes <= 1_000 or len(a.keeper.once) == 0
        assert await code(a, "k-1") == (409, "answer_gone")
        assert len(engine.seen) == 2


async def test_who_reads_slowly_holds_up_neither_the_run_nor_others(nats_url: str) -> None:
    """A reader that stalls is cut off after its time; the run it followed is finished and its answer whole."""
    limits = Limits(stop_grace_s=1.0, watch_s=0.05, client_stall_ms=1000.0)
    async with bench(nats_url, limits=limits) as a:
        await a.engine(answering(sse(*("y" * 60_000 for _ in range(200)), usage=200)))
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", a.keeper.api_port))
        body = json.dumps(ask()).encode()
        raw.sendall(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: {RUN}-k-1\r\n"
            f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        (row,) = await a.pilot.finished()
        assert (row.outcome, row.output_tokens) == ("completed", 200)
        status, answer = await read(a)
        assert status == 200
        assert len(text_of(answer, stream=True)) == 200 * 60_000
        # the slow one's connection is broken off after its time: what it has got must not look whole
        await asyncio.sleep(2 * limits.client_stall_ms / 1000)
        raw.settimeout(10)
        assert await asyncio.to_thread(_rest, raw) < len(answer)


def _rest(raw: socket.socket) -> int:
    """Read to the connection's end."""
    size = 0
    with raw, contextlib.suppress(ConnectionError):
        while data := raw.recv(1 << 20):
            size += len(data)
    return size
