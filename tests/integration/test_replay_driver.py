"""The open-loop driver against a scripted OpenAI-compatible server on real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tokenfleet import chatml
from tokenfleet.replay import driver
from tokenfleet.replay.driver import Target
from tokenfleet.replay.plan import Planned
from tokenfleet.replay.records import Record
from tokenfleet.replay.traces import Row


class FakeEngine:
    """Answers by the request's `task`; remembers what it got and which clients left it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.left = 0
        self.release = asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self.answer)
        # A handler is cancelled when its client leaves, as a gateway's would be.
        self.server = TestServer(app, handler_cancellation=True)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        task = body["metadata"].get("task", "")
        if task in {"429", "403", "503", "500", "400"}:
            error = {"message": "no", "type": "overloaded", "code": f"code_{task}"}
            headers = {"Retry-After": "7", "x-tokenfleet-request-id": "r-refused"}
            return web.json_response({"error": error}, status=int(task), headers=headers)
        if task == "html":
            return web.Response(text="<h1>Bad Gateway</h1>", status=502)
        if task == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        headers = {
            "Content-Type": "text/event-stream",
            "x-tokenfleet-request-id": f"r-{len(self.bodies)}",
            "x-tokenfleet-attempts": "2",
            "x-tokenfleet-site": "c",
        }
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await self.stream(response, task, body)
        except asyncio.CancelledError:
            self.left += 1
            raise
        return response

    async def stream(self, response: web.StreamResponse, task: str, body: dict[str, Any]) -> None:
        async def send(chunk: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        async def delta(content: dict[str, Any], finish: str | None = None) -> None:
            await send({"choices": [{"index": 0, "delta": content, "finish_reason": finish}]})

        await delta({"role": "assistant", "content": ""})
        await response.write(b": keep-alive\n\n")
        await asyncio.sleep(0.05)
        if task == "hang":
            await self.release.wait()
        count = body["tokenfleet_emulator"]["output_tokens"]
        if task == "reason":
            await delta({"reasoning_content": "hm"})
            await asyncio.sleep(0.2)
        if task == "tool":
            count -= 1
            await delta({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]})
        for _ in range(count):
            await delta({"content": "x"})
        if task == "midstream":
            await send({"error": {"message": "gone", "type": "engine", "code": "upstream_disconnected"}})
            return
        if task == "cut":
            return
        await delta({}, "stop")
        usage = {"prompt_tokens": 99, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 64}}
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    await fake.server.start_server()
    yield fake
    fake.release.set()
    await fake.server.close()


def target(engine: FakeEngine, **fields: object) -> Target:
    base: dict[str, object] = {
        "url": str(engine.server.make_url("/v1")), "keys": {"t": "key-t"}, "drain_s": 5.0, "timeout_s": 5.0,
    }  # fmt: skip
    return Target(**(base | fields))  # type: ignore[arg-type]  # a test's defaults, overridden by name


def planned(index: int = 0, at_s: float = 0.0, task: str = "", **fields: object) -> Planned:
    base: dict[str, object] = {
        "index": index, "at_s": at_s, "tenant": "t", "model": "m", "cls": "chat", "task": task, "deadline_ms": 900.0,
        "max_tokens": 16, "row": Row(t_s=at_s, input_tokens=300, output_tokens=6),
    }  # fmt: skip
    return Planned(**(base | fields))  # type: ignore[arg-type]  # a test's defaults, overridden by name


async def one(engine: FakeEngine, task: str, **fields: object) -> Record:
    part = await driver.drive([planned(task=task)], target(engine, **fields))
    return part.records[0]


async def test_a_request_says_what_it_is_and_its_answer_is_read_whole(engine: FakeEngine) -> None:
    """Class, deadline and length travel as documented; first token is the first content, not the role chunk."""
    record = await one(engine, "")
    sent = engine.bodies[0]
    assert engine.keys == ["Bearer key-t"]
    assert sent["metadata"] == {"class": "chat", "deadline_ms": "900"}
    assert sent["max_tokens"] == 16
    assert sent["tokenfleet_emulator"] == {"output_tokens": 6}
    assert sent["stream_options"] == {"include_usage": True}
    assert len(chatml.render(sent["messages"]).encode()) == 300
    assert record.outcome == "completed"
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (6, 99, 64)
    assert (record.request_id, record.attempts, record.site) == ("r-1", 2, "c")
    assert record.ttft_ms is not None
    assert record.ttft_ms >= 45
    assert record.first_token_ms is not None
    assert record.last_token_ms is not None
    assert record.ended_ms is not None
    assert record.sent_ms <= record.first_token_ms <= record.last_token_ms <= record.ended_ms


async def test_reasoning_and_tool_tokens_are_first_tokens(engine: FakeEngine) -> None:
    """An answer that thinks first, or only calls a tool, has a first token: it is not a slow or an empty one."""
    thinking = await one(engine, "reason")
    assert thinking.ttft_ms is not None
    assert thinking.ttft_ms < 200
    tool = await one(engine, "tool")
    assert tool.first_token_ms is not None
    assert tool.outcome == "completed"


@pytest.mark.parametrize(
    ("task", "outcome", "code", "status"),
    [
        ("429", "refused", "code_429", 429),
        ("403", "refused", "code_403", 403),
        ("503", "refused", "code_503", 503),
        ("500", "failed", "code_500", 500),
        ("400", "failed", "code_400", 400),
        ("html", "failed", "http_error", 502),
        ("drop", "failed", "connection", None),
        ("midstream", "failed", "upstream_disconnected", 200),
        ("cut", "failed", "cut_stream", 200),
    ],
)
async def test_every_ending_has_its_name(
    engine: FakeEngine, task: str, outcome: str, code: str, status: int | None
) -> None:
    """A cut answer is not a complete one, a refusal is not a failure, and a web server's own page is no refusal."""
    record = await one(engine, task)
    assert (record.outcome, record.error_code, record.status) == (outcome, code, status)
    assert record.ended_ms is not None
    assert len(engine.bodies) == 1  # nothing is retried
    if task == "429":
        assert record.retry_after_s == 7
        assert record.request_id == "r-refused"
    if task in {"midstream", "cut"}:
        assert record.output_tokens == 6


async def test_a_client_that_loses_patience_is_cancelled_and_leaves(engine: FakeEngine) -> None:
    """At the driver's time-out the connection is closed, so that the fleet can stop the engine's work."""
    record = await one(engine, "hang", timeout_s=0.3)
    assert (record.outcome, record.error_code) == ("cancelled", "client_timeout")
    assert record.ended_ms == pytest.approx(record.sent_ms + 300, abs=150)
    async with asyncio.timeout(2):
        while not engine.left:
            await asyncio.sleep(0.01)


async def test_what_is_open_after_the_drain_is_unfinished(engine: FakeEngine) -> None:
    """A run ends; requests that did not are counted, not dropped."""
    part = await driver.drive([planned(0), planned(1, task="hang")], target(engine, drain_s=0.4, timeout_s=60))
    assert [record.outcome for record in part.records] == ["completed", "unfinished"]


async def test_the_loop_is_open(engine: FakeEngine) -> None:
    """A server that answers nothing does not slow the arrivals down: every request leaves at its planned time."""
    plan = [planned(n, at_s=n * 0.01, task="hang") for n in range(40)]
    part = await driver.drive(plan, target(engine, drain_s=0.2, timeout_s=60))
    assert len(part.records) == 40
    assert {record.outcome for record in part.records} == {"unfinished"}
    assert [record.planned_ms for record in part.records] == [n * 10 for n in range(40)]
    assert sorted(record.lag_ms for record in part.records)[20] < 50
    assert min(record.lag_ms for record in part.records) >= 0


async def test_an_unreachable_target_fails_every_request_and_not_the_driver(
    unused_tcp_port: int,
) -> None:
    """The fleet is down: that is a result (failed), with nobody's stack trace."""
    goal = Target(url=f"http://127.0.0.1:{unused_tcp_port}", key="k", drain_s=3)
    part = await driver.drive([planned(0), planned(1)], goal)
    assert {(r.outcome, r.error_code) for r in part.records} == {("failed", "connection")}


async def test_several_processes_share_one_clock_and_lose_nothing(engine: FakeEngine) -> None:
    """Where one Python process would lag the plan is dealt out; the records come back as one run's."""
    plan = [planned(n, at_s=n * 0.02) for n in range(30)]
    seen: list[driver.Progress] = []
    run = await asyncio.to_thread(driver.run, plan, target(engine), processes=2, on_progress=seen.append)
    assert run.processes == 2
    assert [record.index for record in run.records] == list(range(30))
    assert {record.outcome for record in run.records} == {"completed"}
    assert len({body["messages"][0]["content"] for body in engine.bodies}) == 30
    assert (seen[-1].sent, seen[-1].total) == (30, 30)
    assert run.cpu_s > 0


def test_the_number_of_processes_follows_the_rate() -> None:
    """Few requests need one process; a thousand a second need as many as there are cores for."""
    slow = [planned(n, at_s=n * 0.1) for n in range(600)]
    fast = [planned(n, at_s=n * 0.001) for n in range(10_000)]
    assert driver.processes_for(slow, cores=4) == 1
    assert driver.processes_for(fast, cores=4) == 4
    assert driver.processes_for([], cores=4) == 1
