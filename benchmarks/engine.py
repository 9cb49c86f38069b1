"""An engine that takes no time: answers like vLLM, at once, with as many tokens as it was told.

Decides nothing. What it costs is nobody's overhead (its process is not counted), but it shares the machine, so it is
one `asyncio.Protocol` without a framework. Every event leaves with a write of its own, as an engine's steps do.
Run as `python -m benchmarks.engine MODEL TOKENS`; prints its port.
"""

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

_KV_TOKENS = 1_000_000


def _event(data: dict[str, object] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    event = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def answer(model: str, tokens: int, prompt_tokens: int) -> list[bytes]:
    """The writes of one streamed chat answer: headers, a role, the tokens, the end."""

    def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event(
            {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
        )

    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Transfer-Encoding: chunked\r\nserver: uvicorn\r\n\r\n"
    )
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    last = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": []}
    return [
        head + chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": " tok"}) for _ in range(tokens)),
        chunk({}, "stop"),
        _event({**last, "usage": usage}),
        _event("[DONE]") + b"0\r\n\r\n",
    ]


class Engine(asyncio.Protocol):
    """One connection."""

    served = 0

    def __init__(self, model: str, tokens: int, started_s: float) -> None:
        self._model, self._tokens, self._started_s = model, tokens, started_s
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._answer(head.split(b" ", 2)[1].decode(), length)

    def _answer(self, path: str, length: int) -> None:
        if path == "/v1/chat/completions":
            Engine.served += 1
            self._write(iter(answer(self._model, self._tokens, max(1, length))))
        elif path == "/v1/models":
            entry = {"id": self._model, "object": "model", "root": self._model, "max_model_len": 16_384}
            self._page("application/json", json.dumps({"object": "list", "data": [entry]}))
        elif path == "/metrics":
            self._page("text/plain; version=0.0.4; charset=utf-8", self._metrics())
        elif path == "/version":
            self._page("application/json", '{"version":"0.32.0"}')
        else:
            self._page("text/plain", "")

    def _write(self, events: "object") -> None:
        event = next(events, None)  # type: ignore[call-overload]
        if event is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(event)
            self._loop.call_soon(self._write, events)

    def _page(self, kind: str, text: str) -> None:
        assert self._transport is not None
        body = text.encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _metrics(self) -> str:
        label = f'engine="0",model_name="{self._model}"'
        done = Engine.served
        cache = f'block_size="16",engine="0",num_gpu_blocks="{_KV_TOKENS // 16}"'
        return (
            f"process_start_time_seconds {self._started_s!r}\n"
            f"vllm:num_requests_running{{{label}}} 0.0\nvllm:num_requests_waiting{{{label}}} 0.0\n"
            f"vllm:kv_cache_usage_perc{{{label}}} 0.0\nvllm:cache_config_info{{{cache}}} 1.0\n"
            f"vllm:prompt_tokens_total{{{label}}} {done * 300}.0\n"
            f"vllm:generation_tokens_total{{{label}}} {done * self._tokens}.0\n"
        )


async def serve(model: str, tokens: int) -> None:
    """Listen on any port of the loopback interface and say which."""
    started_s = time.time()
    server = await asyncio.get_running_loop().create_server(
        lambda: Engine(model, tokens, started_s), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
