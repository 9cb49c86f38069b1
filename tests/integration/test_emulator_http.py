"""The emulator over real sockets: what a client sees, faults included, and that nothing is left behind."""

import asyncio
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from tokenfleet import chatml
from tokenfleet import fleet as fleets
from tokenfleet.emulator import Emulator, run
from tokenfleet.emulator.service import EmulatorError
from tokenfleet.emulator.settings import EmulatorSettings

FLEET = """
[fleet]
name = "test"
default_class = "chat"
[classes.chat]
ttft_ms = 1000
[models.m]
versions = ["1", "2"]
default_version = "1"
max_model_len = 8192
[sites.b]
zone = "eu"
[sites.b.instances.b1]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
[sites.b.instances.b2]
model = "m"
version = "2"
url = "http://localhost:0"
profile = "70b-h100x4"
max_sequences = 1
kv_tokens = 4096
[sites.c]
zone = "us"
[sites.c.instances.real]
model = "m"
version = "1"
url = "http://gpu.example:8000"
[sites.c.instances.c1]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
"""


class Client:
    """A client of one emulated instance and of its admin port."""

    def __init__(self, session: aiohttp.ClientSession, url: str, admin: str) -> None:
        self.session = session
        self.url = url
        self.admin = admin

    def chat(self, text: str = "hello", **more: Any) -> Any:
        """POST a chat request; to be used as a context manager."""
        headers = more.pop("headers", None)
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    async def fault(self, kind: str, **more: Any) -> None:
        """Command a fault."""
        async with self.session.post(f"{self.admin}/faults", json={"kind": kind, **more}) as response:
            assert response.status == 200, await response.text()

    async def state(self) -> Any:
        """The oracle."""
        async with self.session.get(f"{self.admin}/state") as response:
            return await response.json()

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (s.rpartition(" ") for s in lines if s[0] != "#")}

    async def until(self, condition: Callable[[Any], bool], timeout_s: float = 2.0) -> Any:
        """The first state that fulfils a condition."""
        end = time.monotonic() + timeout_s
        while True:
            state = await self.state()
            if condition(state):
                return state
            assert time.monotonic() < end, state
            await asyncio.sleep(0.005)


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """The site's two instances at five times the speed; afterwards every counter must be at zero."""
    fleet = fleets.parse(FLEET.encode())
    emulator = Emulator(fleet, site="b", settings=EmulatorSettings(time_scale=5.0))
    yield emulator
    for instance in emulator.instances.values():
        assert instance.open_requests == 0
        stats = instance.engine.stats()
        assert stats.running == stats.waiting == stats.arriving == stats.blocks_used == 0
        instance.engine.check()
    await emulator.stop()


@pytest.fixture
async def clients(emulator: Emulator) -> AsyncIterator[dict[str, Client]]:
    """A client per instance, over one session."""
    addresses = await emulator.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield {name: Client(session, at["url"], at["admin"]) for name, at in addresses.items()}


@pytest.fixture
def client(clients: dict[str, Client]) -> Client:
    """The fast instance's."""
    return clients["b1"]


def parse(raw: bytes) -> list[Any]:
    """Events of a stream."""
    return [json.loads(e[6:]) if e != b"data: [DONE]" else "DONE" for e in raw.split(b"\n\n") if e]


def said(events: list[Any]) -> int:
    """Tokens of a stream: characters, and one that falls behind puts several of them into one event."""
    return sum(len(event["choices"][0]["delta"].get("content") or "") for event in events)


async def test_a_stream_as_the_official_client_reads_it(client: Client) -> None:
    """Role first, one token a chunk, usage at the end when asked, the forced length and the request's own id."""
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="unused", max_retries=0) as api:
        stream = await api.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Tell me"}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=100,
            extra_body={"tokenfleet_emulator": {"output_tokens": 20}},
            extra_headers={"X-Request-Id": "r-1", "X-TokenFleet-Attempt": "1"},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert {chunk.id for chunk in chunks} == {"chatcmpl-r-1"}
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert len(text) == 20
        assert chunks[-2].choices[0].finish_reason == "stop"
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == 20
        whole = await api.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Tell me"}],
            max_tokens=10,
            extra_body={"ignore_eos": True},
        )
        assert whole.choices[0].message.content == text[:10]
        assert whole.choices[0].finish_reason == "length"
        legacy = await api.completions.create(model="m", prompt="abc", max_tokens=3, extra_body={"ignore_eos": True})
        assert len(legacy.choices[0].text) == 3
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await api.chat.completions.create(model="n", messages=[{"role": "user", "content": "x"}])
        models = [model async for model in api.models.list()]
        assert [(model.id, model.model_extra and model.model_extra["root"]) for model in models] == [("m", "m@1")]
    state = await client.state()
    assert state["generated_tokens"] == 33
    assert state["tokens_by_request"]["r-1"] == 20
    async with client.session.get(f"{client.admin}/requests") as response:
        received = (await response.json())["requests"]
    assert received[0]["headers"] == {"x-request-id": "r-1", "x-tokenfleet-attempt": "1"}
    assert received[0]["authorization"] is True


async def test_the_next_turn_of_a_chat_hits_prompt_and_answer(client: Client) -> None:
    """Prefix reuse over a conversation is what placement by cache lives on; another salt shares nothing."""
    turn: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    messages = [{"role": "user", "content": "a long question " * 20}]
    async with client.chat(messages=messages, **turn) as response:
        first = await response.json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
    async with client.chat(messages=messages, **turn) as response:
        second = await response.json()
    shared = len(chatml.render(messages[:1])) + 59
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == shared // 16 * 16
    async with client.chat(messages=messages, cache_salt="other tenant", **turn) as response:
        salted = await response.json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    metrics = await client.metrics()
    assert metrics['vllm:prefix_cache_hits_total{engine="0",model_name="m"}'] == shared // 16 * 16


async def test_pages_and_routes(clients: dict[str, Client]) -> None:
    """Health, version, load, models with limits, and the two errors of the routing layer."""
    client = clients["b2"]
    get = client.session.get
    async with get(f"{client.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with get(f"{client.url}/version") as response:
        assert await response.json() == {"version": "0.32.0"}
    async with get(f"{client.url}/load") as response:
        assert await response.json() == {"server_load": 0}
    async with get(f"{client.url}/v1/models") as response:
        card = (await response.json())["data"][0]
    # the context is no longer than the KV memory the fleet declares
    assert (card["root"], card["max_model_len"]) == ("m@2", 4096)
    async with get(f"{client.url}/v1/chat/completions") as response:
        assert (response.status, await response.text()) == (405, '{"detail":"Method Not Allowed"}')
        assert response.headers["Allow"] == "POST"
    async with get(f"{client.url}/none") as response:
        assert (response.status, await response.text()) == (404, '{"detail":"Not Found"}')
    async with client.session.post(f"{client.url}/tokenize", json={"prompt": "abc"}) as response:
        assert (await response.json())["count"] == 3
    async with client.session.post(f"{client.url}/v1/chat/completions", data=b"{") as response:
        assert response.status == 400
    async with client.session.post(f"{client.admin}/faults", json={"kind": "explode"}) as response:
        assert response.status == 400
    # no limit on bodies: a long prompt is refused by its tokens
    body = io.BytesIO(json.dumps({"messages": [{"role": "user", "content": "x" * 5_000_000}]}).encode())
    headers = {"Content-Type": "application/json"}
    async with client.session.post(f"{client.url}/v1/chat/completions", data=body, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "input_tokens"


async def test_an_http_1_0_client_gets_its_stream_unframed(client: Client) -> None:
    """Old health checkers and proxies: no chunks, the end of the connection ends the body."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":3,"ignore_eos":true}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    *events, last = parse(text)
    assert (last, said(events)) == ("DONE", 3)
    writer.close()
    await writer.wait_closed()


async def test_headers_come_before_the_queue_and_waiting_is_visible(clients: dict[str, Client]) -> None:
    """One sequence at a time: the second stream has status 200 long before its first token, as from the real server."""
    client = clients["b2"]
    async with client.chat(stream=True, max_tokens=300, ignore_eos=True) as first:
        await first.content.readany()
        async with client.chat("other", stream=True, max_tokens=2, ignore_eos=True) as second:
            assert second.status == 200
            await client.until(lambda s: s["engine"]["running"] == 1 and s["engine"]["waiting"] == 1)
            metrics = await client.metrics()
            assert metrics['vllm:num_requests_waiting{engine="0",model_name="m"}'] == 1
            assert metrics['vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"}'] == 1
            assert metrics['vllm:kv_cache_usage_perc{engine="0",model_name="m"}'] > 0
            first.close()
            assert parse(await second.read())[-1] == "DONE"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine_within_100_ms(client: Client, stream: bool) -> None:
    """Work for nobody is what overload is made of."""
    task = asyncio.create_task(_consume(client, stream=stream, max_tokens=4000, ignore_eos=True))
    await client.until(lambda s: s["generated_tokens"] > 0)
    task.cancel()
    left = time.monotonic()
    state = await client.until(lambda s: s["engine"]["running"] == 0 and s["open_requests"] == 0)
    assert time.monotonic() - left < 0.1
    assert 0 < state["generated_tokens"] < 4000
    assert state["engine"]["cancelled_total"] == 1
    metrics = await client.metrics()
    # never counted as an abort, as in the real one
    assert metrics['vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}'] == 0


async def _consume(client: Client, **body: Any) -> bytes:
    async with client.chat(**body) as response:
        return await response.read()


async def test_refuse_counts_and_ends(client: Client) -> None:
    """One refusal like a full queue's, then service again."""
    await client.fault("refuse", count=1)
    async with client.chat(max_tokens=1) as response:
        assert response.status == 503
        assert (await response.json())["error"]["type"] == "Service Unavailable"
    async with client.chat(max_tokens=1) as response:
        assert response.status == 200
        await response.read()
    metrics = await client.metrics()
    assert metrics['vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}'] == 1


async def test_hang_never_answers_but_health_does(client: Client) -> None:
    """The worst kind of sick engine: green, and silent."""
    await client.fault("hang")
    hung = asyncio.create_task(_consume(client, max_tokens=1))
    await client.until(lambda s: s["received_requests"] == 1)
    async with client.session.get(f"{client.url}/health") as response:
        assert response.status == 200
    done, _ = await asyncio.wait([hung], timeout=0.1)
    assert not done
    hung.cancel()
    await client.fault("none")
    await _consume(client, max_tokens=1)


@pytest.mark.parametrize("tokens", [0, 1, 7])
async def test_reset_breaks_the_stream_after_n_tokens(client: Client, tokens: int) -> None:
    """After the role chunk only (may be retried) and after tokens (must not be); the engine's work is freed."""
    await client.fault("reset", n=tokens)
    received = bytearray()

    async def read() -> None:
        async with client.chat(stream=True, max_tokens=50, ignore_eos=True) as response:
            try:
                while piece := await response.content.readany():
                    received.extend(piece)
            finally:
                # aiohttp raises before it hands over what came in the same breath as the reset
                received.extend(response.content._read_nowait(-1))

    with pytest.raises(aiohttp.ClientError):
        await read()
    events = parse(bytes(received))
    assert said(events) == tokens
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    await client.until(lambda s: s["open_requests"] == 0)
    await client.fault("reset", n=2)
    with pytest.raises(aiohttp.ClientError):
        await _consume(client, max_tokens=50, ignore_eos=True)
    await client.until(lambda s: s["open_requests"] == 0)


async def test_error_first_is_a_200_with_an_error_event(client: Client) -> None:
    """How a real engine refuses a stream from a full queue: status 200, then the error, then [DONE]."""
    await client.fault("error_first", count=2)
    async with client.chat(stream=True) as response:
        assert response.status == 200
        events = parse(await response.read())
    assert [e if e == "DONE" else e["error"]["code"] for e in events] == [503, "DONE"]
    async with client.chat() as response:
        assert response.status == 503


async def test_split_and_missing_done(client: Client) -> None:
    """[DONE] cut in the middle of its bytes; no [DONE]; and a body that just ends."""
    await client.fault("split_done", n=9, pause_ms=30, count=1)
    pieces = []
    async with client.chat(stream=True, max_tokens=2, ignore_eos=True) as response:
        while piece := await response.content.readany():
            pieces.append(piece)
    assert pieces[-2].endswith(b"data: [DO")
    assert pieces[-1] == b"NE]\n\n"
    await client.fault("no_done", count=1)
    events = parse(await _consume(client, stream=True, max_tokens=2, ignore_eos=True))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    await client.fault("no_done", truncate=True, count=1)
    with pytest.raises(aiohttp.ClientPayloadError):
        await _consume(client, stream=True, max_tokens=2, ignore_eos=True)
    assert parse(await _consume(client, stream=True, max_tokens=2, ignore_eos=True))[-1] == "DONE"


async def test_slow_and_stall(client: Client) -> None:
    """Four times slower steps; then no token at all while everything looks busy; then on as if nothing had been."""
    clock = time.monotonic
    start = clock()
    await _consume(client, max_tokens=100, ignore_eos=True)
    normal = clock() - start
    await client.fault("slow", factor=4)
    start = clock()
    await _consume(client, max_tokens=100, ignore_eos=True)
    assert clock() - start > 2.5 * normal
    await client.fault("none")
    await client.fault("stall")
    stuck = asyncio.create_task(_consume(client, max_tokens=100, ignore_eos=True))
    state = await client.until(lambda s: s["engine"]["running"] == 1)
    done, _ = await asyncio.wait([stuck], timeout=0.1)
    assert not done
    assert (await client.state())["generated_tokens"] == state["generated_tokens"] == 200
    await client.fault("none")
    await stuck
    assert (await client.state())["generated_tokens"] == 300


async def test_frozen_metrics_thaw(client: Client) -> None:
    """A scraper that believes an old page sends everybody to the busiest engine."""
    name = 'vllm:generation_tokens_total{engine="0",model_name="m"}'
    await client.fault("freeze_metrics")
    await _consume(client, max_tokens=5, ignore_eos=True)
    assert (await client.metrics())[name] == 0
    await client.fault("none")
    assert (await client.metrics())[name] == 5


async def test_restart_in_place_forgets_everything_but_the_oracle(client: Client) -> None:
    """Same address, empty cache, counters at zero: whoever still believes in the old cache is wrong from now on."""
    before = await client.metrics()
    body: dict[str, Any] = {"text": "x" * 400, "max_tokens": 2000, "ignore_eos": True}
    open_stream = asyncio.create_task(_consume(client, stream=True, **body))
    hung = asyncio.create_task(_consume(client, **body))
    await client.until(lambda s: s["engine"]["running"] == 2 and s["generated_tokens"] > 10)
    await client.fault("restart", down_ms=150)
    for broken in (open_stream, hung):
        with pytest.raises(aiohttp.ClientError):
            await broken
    with pytest.raises(aiohttp.ClientConnectorError):
        await _consume(client, max_tokens=1)
    end = time.monotonic() + 2
    while True:
        try:
            after = await client.metrics()
            break
        except aiohttp.ClientConnectorError:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
    assert after['vllm:generation_tokens_total{engine="0",model_name="m"}'] == 0
    assert after["process_start_time_seconds"] > before["process_start_time_seconds"]
    state = await client.state()
    assert (state["incarnation"], state["engine"]["blocks_cached"]) == (2, 0)
    assert state["generated_tokens"] > 10
    async with client.chat("x" * 400, max_tokens=1) as response:
        assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_slow_reader_is_waited_for_and_gets_every_token(client: Client) -> None:
    """The stream of a client that does not read fills its socket, not our memory; later nothing is missing."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=raw, limit=2048)
    # a request id of this length makes every token's event large
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 900, "ignore_eos": True}
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"X-Request-Id: {'r' * 8000}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await client.until(lambda s: s["engine"]["finished_total"] == 1, timeout_s=10)
    waits = (await client.state())["open_requests"] == 1
    received = bytearray()
    while piece := await reader.read(65536):
        received += piece
    text = bytes(received)
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    parts = [part.split(b'"}')[0] for part in text.split(b'"delta":{"content":"')[1:]]
    assert sum(map(len, parts)) == 900
    # what piled up while the reader slept came as fewer, larger chunks; on a busy machine the sockets hold so few
    assert len(parts) < 900
    assert waits or len(text) < 3_000_000
    writer.close()
    await writer.wait_closed()
    await client.until(lambda s: s["open_requests"] == 0)


async def test_only_declared_emulated_instances_are_served() -> None:
    """Real engines of the same fleet are left alone; a site without emulated ones is a mistake worth saying."""
    fleet = fleets.parse(FLEET.encode())
    assert list(Emulator(fleet).instances) == ["b1", "b2", "c1"]
    assert list(Emulator(fleet, site="c").instances) == ["c1"]
    with pytest.raises(EmulatorError, match="no site"):
        Emulator(fleet, site="x")
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    other = fleets.parse(FLEET.replace("127.0.0.1:0", f"127.0.0.1:{port}").encode())
    with pytest.raises(EmulatorError, match=f"b1: cannot listen at http://127.0.0.1:{port}"):
        await run(other, site="b")
    taken.close()


async def test_run_serves_until_cancelled_and_leaves_no_task() -> None:
    """The entry point of the `tokenfleet run emulator` verb."""
    before = asyncio.all_tasks()
    told: asyncio.Future[dict[str, dict[str, str]]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run(fleets.parse(FLEET.encode()), time_scale=3.0, announce=told.set_result))
    addresses = await told
    assert set(addresses) == {"b1", "b2", "c1"}
    async with aiohttp.ClientSession() as session:
        client = Client(session, addresses["c1"]["url"], addresses["c1"]["admin"])
        stream = asyncio.create_task(_consume(client, stream=True, max_tokens=4000, ignore_eos=True))
        await client.until(lambda s: s["generated_tokens"] > 0)
        serving.cancel()
        # as the real one on SIGTERM: an error event and [DONE], then the connection closes
        events = parse(await stream)
        assert events[-1] == "DONE"
        assert events[-2]["error"]["code"] == 500
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert asyncio.all_tasks() - before == set()


async def test_the_process_ends_in_order_on_sigterm(tmp_path: Any) -> None:
    """What a supervisor does to it: addresses on stdout, exit code 0 after SIGTERM."""
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tokenfleet.emulator",
        str(path),
        "--site",
        "b",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    addresses = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
    assert set(addresses) == {"b1", "b2"}
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 5) == 0
