"""The official `openai` client, unchanged: stream, usage, errors, 429 with Retry-After, cancel."""

import asyncio
import time
from collections.abc import AsyncIterator

import openai
import pytest
from tests.e2e.running import Running, eventually

pytestmark = pytest.mark.timeout(200)
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
async def client(fleet: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=fleet.api, api_key=fleet.keys["studio"], max_retries=0, timeout=60) as made:
        yield made


async def test_answers_streams_and_usage(client: openai.AsyncOpenAI) -> None:
    """What an application does all day."""
    models = [model.id async for model in client.models.list()]
    assert {"chat-8b", "chat-8b@1", "chat-8b@2", "doc-32b"} <= set(models)
    assert (await client.models.retrieve("chat-8b@2")).id == "chat-8b@2"

    whole = await client.chat.completions.create(model="chat-8b", messages=HELLO, max_tokens=7)  # type: ignore[arg-type]
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 7
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 7

    stream = await client.chat.completions.create(
        model="chat-8b", messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True},  # type: ignore[arg-type]
        metadata={"class": "interactive", "task": "greeting"},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7

    bare = await client.chat.completions.create(model="chat-8b", messages=HELLO, max_tokens=3, stream=True)  # type: ignore[arg-type]
    # usage was not asked for: the chunk that the gateway needs for itself does not come through
    assert all(c.choices and c.usage is None for c in [chunk async for chunk in bare])

    completion = await client.completions.create(model="chat-8b", prompt="Once upon a time", max_tokens=5)
    assert completion.choices[0].text
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5
    streamed = await client.completions.create(model="chat-8b", prompt="Once", max_tokens=5, stream=True)
    assert "".join([c.choices[0].text async for c in streamed if c.choices])


async def test_errors_are_the_clients_own_types(fleet: Running, client: openai.AsyncOpenAI) -> None:
    """Each mistake raises what the client's documentation says, with code, param and request id."""

    async def wrong(kind: type[openai.APIStatusError], code: str, **changes: object) -> openai.APIStatusError:
        call = {"model": "chat-8b", "messages": HELLO, "max_tokens": 3, **changes}
        with pytest.raises(kind) as raised:
            await client.chat.completions.create(**call)  # type: ignore[call-overload]
        assert raised.value.code == code, raised.value
        assert raised.value.request_id is not None
        assert raised.value.request_id.startswith("req-")
        return raised.value

    assert (await wrong(openai.NotFoundError, "model_not_found", model="gpt-5")).param == "model"
    await wrong(openai.BadRequestError, "empty_array", messages=[])
    await wrong(openai.BadRequestError, "unknown_class", metadata={"class": "vip"})
    await wrong(openai.BadRequestError, "context_length_exceeded", messages=[{"role": "user", "content": "x" * 20_000}])
    async with openai.AsyncOpenAI(base_url=fleet.api, api_key="tf_nobody", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    async with openai.AsyncOpenAI(base_url=fleet.api, api_key=fleet.keys["bank"], max_retries=0) as bank:
        with pytest.raises(openai.PermissionDeniedError) as raised:
            await bank.chat.completions.create(
                model="chat-8b",
                messages=HELLO,
                max_tokens=3,
                metadata={"class": "batch"},  # type: ignore[arg-type]
            )
        assert raised.value.code == "not_permitted"


async def test_a_failing_engine_raises_in_the_middle_of_a_stream(fleet: Running, client: openai.AsyncOpenAI) -> None:
    """The client's own iterator raises: an application cannot take the piece for the whole."""
    everywhere = fleet.instances("chat-8b", "1")
    got = ""
    async with fleet.faulty(everywhere, "reset", n=5):
        stream = await client.chat.completions.create(model="chat-8b", messages=HELLO, max_tokens=30, stream=True)  # type: ignore[arg-type]

        async def read() -> None:
            nonlocal got
            async for chunk in stream:
                got += chunk.choices[0].delta.content or ""

        with pytest.raises(openai.APIError) as raised:
            await read()
    assert len(got) == 5
    assert raised.value.code == "upstream_disconnected"


async def test_limits_are_429_with_retry_after(fleet: Running) -> None:
    """A trial account may have sixteen requests open: the next hears 429 at once, and when to come back (G11)."""
    async with openai.AsyncOpenAI(base_url=fleet.api, api_key=fleet.keys["trial"], max_retries=0, timeout=60) as client:

        async def ask() -> int:
            answer = await client.chat.completions.create(model="chat-8b", messages=HELLO, max_tokens=60)  # type: ignore[arg-type]
            assert answer.usage is not None
            return answer.usage.completion_tokens

        asked = [asyncio.create_task(ask()) for _ in range(22)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in done if isinstance(one, openai.RateLimitError)]
        assert len(refused) == 6, done
        for one in refused:
            assert one.code == "tenant_concurrency"
            assert int(one.response.headers["retry-after"]) >= 1
            assert one.body["type"] == "rate_limit_error"  # type: ignore[index]
        assert sum(isinstance(one, int) for one in done) == 16
        # nothing of it stays reserved
        assert await fleet.total("slomax", "tokenfleet_reserved_tokens", tenant="trial") == 0
        assert await ask() > 0
    rows = await fleet.rows(str(one.request_id) for one in refused)

    async def written() -> bool:
        nonlocal rows
        rows = await fleet.rows(str(one.request_id) for one in refused)
        return all(len(found) == 1 for found in rows.values())

    await eventually(written, within_s=10, what="rows of the refusals")
    assert {found[0]["reason"] for found in rows.values()} == {"tenant_concurrency"}


async def test_the_clients_own_retries_respect_retry_after(fleet: Running) -> None:
    """With retries on (its default) a refused request succeeds a little later, without an error storm."""
    async with openai.AsyncOpenAI(base_url=fleet.api, api_key=fleet.keys["trial"], max_retries=4, timeout=60) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model="chat-8b", messages=HELLO, max_tokens=40)  # type: ignore[arg-type]
                for _ in range(20)
            )
        )
    assert len(answers) == 20


async def test_closing_a_stream_frees_the_engine(fleet: Running, client: openai.AsyncOpenAI) -> None:
    """`stream.close()` is all that an application does when its user stops reading."""
    stream = await client.chat.completions.create(model="chat-8b", messages=HELLO, max_tokens=3000, stream=True)  # type: ignore[arg-type]
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    began_s = time.time()
    await stream.close()

    async def idle() -> bool:
        return not any([(await fleet.emulator(one))["open_requests"] for one in fleet.ready["emulators"]])

    await eventually(idle, within_s=2.0, what="engine freed")
    request_id = stream.response.headers["x-request-id"]
    row = await fleet.final(request_id)
    assert row["outcome"] == "cancelled"
    assert row["finished_at"].timestamp() < began_s + 10
