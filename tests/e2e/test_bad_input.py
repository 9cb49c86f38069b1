"""What a client gets wrong: a typed error with the right status, one line, one count, and nobody else notices."""

import asyncio
import io
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.e2e.running import Answer, Load, Running, eventually

pytestmark = pytest.mark.timeout(300)
CHAT = "/chat/completions"
GOOD: dict[str, Any] = {"model": "chat-8b", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}


def encoded(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


# name → (method, path, body, headers beside the key, status, code)
Bad = tuple[str, str, Callable[[], bytes], dict[str, str], int, str]
BAD: dict[str, Bad] = {
    "malformed JSON": ("POST", CHAT, lambda: b'{"model": "chat-8b", "messages": [', JSON, 400, "invalid_json"),
    "not an object": ("POST", CHAT, lambda: b"[1, 2]", JSON, 400, "invalid_type"),
    "empty body": ("POST", CHAT, lambda: b"", JSON, 400, "invalid_json"),
    "deeply nested": (
        "POST", CHAT, lambda: b'{"model":"chat-8b","messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}", JSON,
        400, "invalid_",
    ),
    "invalid UTF-8": ("POST", CHAT, lambda: encoded().replace(b"hi", b"h\xff\xfe"), JSON, 400, "invalid_utf8"),
    "lone surrogate": (
        "POST", CHAT, lambda: encoded().replace(b"hi", b"\\ud800"), JSON, 400, "invalid_json",
    ),
    "no messages": ("POST", CHAT, lambda: encoded(messages=[]), JSON, 400, "empty_array"),
    "no model": ("POST", CHAT, lambda: json.dumps({"messages": GOOD["messages"]}).encode(), JSON, 400, "missing_"),
    "unknown model": ("POST", CHAT, lambda: encoded(model="gpt-5"), JSON, 404, "model_not_found"),
    "unknown version": ("POST", CHAT, lambda: encoded(model="chat-8b@3"), JSON, 404, "model_not_found"),
    "unknown class": ("POST", CHAT, lambda: encoded(metadata={"class": "vip"}), JSON, 400, "unknown_class"),
    "over-long prompt": (
        "POST", CHAT, lambda: encoded(messages=[{"role": "user", "content": "x" * 20_000}]), JSON,
        400, "context_length_exceeded",
    ),
    "longer than any answer": ("POST", CHAT, lambda: encoded(max_tokens=20_000), JSON, 400, "rejected_by_engine"),
    "longer than any cache": ("POST", CHAT, lambda: encoded(max_tokens=900_000_000), JSON, 400, "rejected_by_engine"),
    "negative max_tokens": ("POST", CHAT, lambda: encoded(max_tokens=-1), JSON, 400, "invalid_value"),
    "33 MiB": ("POST", CHAT, lambda: encoded(user="u" * (33 * 2**20)), JSON, 413, "body_too_large"),
    "wrong method": ("GET", CHAT, lambda: b"", {}, 405, "method_not_allowed"),
    "wrong route": ("POST", "/embeddings", encoded, JSON, 404, "unknown_route"),
    "wrong content type": ("POST", CHAT, encoded, {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    "no content type": (
        "POST", CHAT, encoded, {"Content-Type": "application/octet-stream"}, 415, "unsupported_media_type",
    ),
    "wrong key": ("POST", CHAT, encoded, {**JSON, "Authorization": "Bearer tf_wrong"}, 401, "invalid_api_key"),
    "no key": ("POST", CHAT, encoded, {**JSON, "Authorization": ""}, 401, "invalid_api_key"),
    "key of another scheme": ("POST", CHAT, encoded, {**JSON, "Authorization": "Basic eDp5"}, 401, "invalid_api_key"),
}  # fmt: skip
TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_the_clients_alone(fleet: Running, name: str) -> None:
    """A body that no engine could use cost the whole worker in other gateways (F11), or came back as a bare 500."""
    method, path, body, headers, status, code = BAD[name]
    counted_before = await fleet.total("gateway", "tokenfleet_gateway_errors_total", status=str(status))
    all_before = await fleet.total("gateway", "tokenfleet_gateway_errors_total")
    received_before = await fleet.received()
    payload = body()
    async with Load(fleet, rate_per_s=4.0, tokens=6) as good:
        await good.completions(1)
        async with fleet.session() as session:
            given = {"Authorization": f"Bearer {fleet.keys['studio']}", **headers}
            data = io.BytesIO(payload) if payload else None
            async with session.request(method, fleet.api + path, data=data, headers=given) as answer:
                page = await answer.json()
                assert answer.status == status, page
                assert answer.content_type == "application/json"
                request_id = answer.headers["X-Request-Id"]
                retry_after = answer.headers.get("Retry-After")
        await good.completions(1)
    error = page["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"].startswith(code), error
    assert error["type"] == TYPES.get(status, "invalid_request_error")
    assert error["message"]
    # neither the key nor the prompt comes back
    assert "tf_" not in json.dumps(page)
    assert "xxxxx" not in json.dumps(page)
    assert retry_after is None
    # one line and one count
    lines = [line for line in fleet.service_log("gateway").splitlines() if request_id in line]
    assert len(lines) == 1, lines
    assert await fleet.total("gateway", "tokenfleet_gateway_errors_total") == all_before + 1
    assert await fleet.total("gateway", "tokenfleet_gateway_errors_total", status=str(status)) == counted_before + 1
    # nobody else noticed
    assert [one for one in good.answers if not one.completed] == []
    extra = await fleet.received() - received_before - len(good.answers)
    # what only an engine can judge it judges once
    assert extra == (1 if code == "rejected_by_engine" else 0)


async def test_a_body_that_lies_about_its_length_ends_by_itself(fleet: Running) -> None:
    """A client that promises more bytes than it sends, and leaves: nothing is left of it, no row, no error."""
    where = urlsplit(fleet.api)
    assert where.hostname is not None

    def half() -> None:
        with socket.create_connection((where.hostname, where.port), timeout=10) as raw:
            head = (
                f"POST /v1{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {fleet.keys['studio']}\r\n"
                "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            )
            raw.sendall(head.encode() + b'{"model": "chat-8b"')

    await asyncio.gather(*(asyncio.to_thread(half) for _ in range(5)))
    async with fleet.session() as session:
        assert (await fleet.ask(session)).completed


async def test_garbage_instead_of_http(fleet: Running) -> None:
    """A TLS client on the plain port, and a line of noise: refused, and others are served."""
    where = urlsplit(fleet.api)
    assert where.hostname is not None

    def noise(data: bytes) -> bytes:
        with socket.create_connection((where.hostname, where.port), timeout=10) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            return raw.recv(4096)

    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"BLAH\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n"):
        answered = await asyncio.to_thread(noise, data)
        assert answered == b"" or (answered.startswith(b"HTTP/1.") and b" 400 " in answered.splitlines()[0] + b" ")
    async with fleet.session() as session:
        assert (await fleet.ask(session)).completed


async def test_what_engines_reject_opens_no_breaker(fleet: Running) -> None:
    """Every non-2xx counted as the engine's failure, and a few over-long prompts took the whole fleet out (F11)."""

    async def one(session: aiohttp.ClientSession) -> Answer:
        return await fleet.ask(session, tokens=20_000)

    async with fleet.session() as session:
        for _ in range(5):
            answers = await asyncio.gather(*(one(session) for _ in range(5)))
            assert {(a.status, a.code) for a in answers} == {(400, "rejected_by_engine")}
        assert (await fleet.ask(session)).completed
    for site in "bcd":
        assert await fleet.total(f"tokenpilot-{site}", "tokenfleet_breaker_open") == 0

    async def written() -> bool:
        rows = await fleet.rows(a.request_id for a in answers)
        return all(
            len(found) == 1 and found[0]["outcome"] == "rejected" and found[0]["attempt"] == 1
            for found in rows.values()
        )

    await eventually(written, within_s=10, what="rejected rows")


async def test_names_from_clients_make_no_series(fleet: Running) -> None:
    """224,671 series and a page of 36 MB: raw paths and names as labels (O02)."""

    async def series() -> int:
        return sum(len(samples) for samples in (await fleet.metrics("gateway")).values())

    before = await series()
    async with fleet.session() as session:
        for number in range(40):
            async with session.get(f"{fleet.api}/what/{number}", headers={"User-Agent": f"x{number}"}) as answer:
                assert answer.status == 404
            found = await fleet.ask(session, model=f"model-{number}")
            assert found.code == "model_not_found"
    assert await series() - before < 20
