"""`tokenfleet replay` as a user types it, against a scripted OpenAI-compatible server."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tokenfleet.cli.__main__ import main
from tokenfleet.replay import records


class Answering:
    """Answers every request with its forced length; every fifth is refused."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self.answer)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/v1"))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers["Authorization"])
        if len(self.bodies) % 5 == 0:
            error = {"error": {"message": "full", "type": "overloaded", "code": "saturated"}}
            return web.json_response(error, status=429, headers={"Retry-After": "1"})
        count = body.get("tokenfleet_emulator", {}).get("output_tokens", 3)
        chunk = {"choices": [{"delta": {"content": "x"}}]}
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": count}}
        text = (b"data: " + json.dumps(chunk).encode() + b"\n\n") * count
        text += b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
        headers = {"Content-Type": "text/event-stream", "x-tokenfleet-site": "b"}
        return web.Response(body=text, headers=headers)


@pytest.fixture
async def answering() -> AsyncIterator[Answering]:
    fake = Answering()
    await fake.server.start_server()
    yield fake
    await fake.server.close()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    lines = [{"format": "llm-trace-slice/1", "name": "small", "block_size": 512}]
    lines += [{"t": n * 0.05, "in": 200 + 700 * (n % 8), "out": 4, "tenant": "x"} for n in range(20)]  # type: ignore[dict-item]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def command(*words: str) -> int:
    """The exit code; the command runs in a thread, because the server lives in this loop."""

    def run() -> int:
        try:
            return main(["replay", *words])
        except SystemExit as error:  # argparse
            return int(error.code or 0)

    return await asyncio.to_thread(run)


async def test_a_trace_is_replayed_and_reported(
    answering: Answering, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an evaluator does: a trace, a URL, a key; figures on stdout, records and a page in files."""
    kept, page = tmp_path / "r.jsonl", tmp_path / "r.html"
    code = await command(
        str(trace), "--url", answering.url, "--key", "k", "--speed", "2", "--json", "--drain", "5",
        "--records", str(kept), "--html", str(page),
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    report = json.loads(shown.out)
    overall = report["overall"]
    assert overall["offered"] == 20
    assert overall["offered"] == sum(overall[k] for k in ("completed", "refused", "cancelled", "failed", "unfinished"))
    assert (overall["completed"], overall["refused"]) == (16, 4)
    assert overall["compliance"] == 0.8
    assert set(report["classes"]) == {"chat", "document"}
    assert report["tenants"]["x"]["offered"] == 20
    assert report["sites"]["b"]["completed"] == 16
    assert report["duration_s"] == pytest.approx(0.475, abs=0.6)
    assert [r.index for r in records.decode(kept.read_bytes())] == list(range(20))
    assert page.read_text().startswith("<!doctype html>")
    assert "lag p50" in shown.err
    assert answering.keys == {"Bearer k"}


async def test_the_builtin_workload_needs_no_file(
    answering: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key per tenant; the same seed offers the same requests, and a prompt seed changes only what they say."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({t: f"key-{t}" for t in ("studio", "bank", "devtools", "research", "trial")}))
    seen = []
    for prompts in ("1", "2"):
        answering.bodies.clear()
        code = await command(
            "builtin", "--url", answering.url, "--keys", str(keys), "--duration", "3", "--rate", "20",
            "--prompt-seed", prompts, "--drain", "5",
        )  # fmt: skip
        shown = capsys.readouterr()
        assert code == 0, shown.err
        assert "compliance" in shown.out
        seen.append([(b["model"], b["max_tokens"], b["messages"][0]["content"]) for b in answering.bodies])
    assert len(answering.keys) >= 4
    one, other = (sorted((model, budget, len(text)) for model, budget, text in run) for run in seen)
    assert one == other
    assert not {c for *_, c in seen[0]} & {c for *_, c in seen[1]}


async def test_wrong_input_is_said_and_is_exit_code_two(
    answering: Answering, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script must tell a typo (2) from a failed run (1)."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text(trace.read_text() + '\n{"t": 9}')
    bad_keys = tmp_path / "bad.json"
    bad_keys.write_text("[]")
    url = ("--url", answering.url)
    for words, says in [
        ((str(broken), *url, "--key", "k"), "broken.jsonl:22"),
        ((str(tmp_path / "absent"), *url, "--key", "k"), "No such file"),
        ((str(trace), *url), "no key for tenant x"),
        ((str(trace), *url, "--keys", str(bad_keys)), "one JSON object"),
        ((str(trace), *url, "--key", "k", "--class", "chta"), "chta"),
        ((str(trace), *url, "--key", "k", "--class-rule", "chat<=5"), "without a bound"),
        ((str(trace), *url, "--key", "k", "--model-map", "x"), "TRACE=FLEET"),
        ((str(trace), *url, "--key", "k", "--limit", "0"), "--limit"),
        ((str(trace), *url, "--key", "k", "--duration", "5"), "builtin"),
        ((str(trace), *url, "--key", "k", "--speed", "0"), "speed"),
        (("builtin", *url, "--key", "k", "--rate", "0"), "rate"),
        ((str(trace), *url, "--key", "k", "--fleet", str(tmp_path / "none.toml")), "none.toml"),
        ((str(trace),), "--url"),
    ]:
        assert await command(*words) == 2, words
        assert says in capsys.readouterr().err, words
    assert answering.bodies == []


async def test_a_target_that_is_not_there_is_exit_code_one(
    trace: Path, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input was right and the work failed; the figures are printed all the same."""
    code = await command(
        str(trace), "--url", f"http://127.0.0.1:{unused_tcp_port}", "--key", "k", "--json", "--drain", "3"
    )
    shown = capsys.readouterr()
    assert code == 1
    assert "nothing answers" in shown.err
    assert json.loads(shown.out)["overall"]["failed"] == 20
