"""What an engine gets of a body, and what a client gets of an engine's error."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.gateway.openai import STRIPPED, ApiError, engine_body, parse, rejection

CAPTURES = Path(os.environ.get("TOKENFLEET_SHARED", Path(__file__).parents[4] / "shared")) / "engines" / "captures"


def sent(body: dict[str, Any], *, stream: bool = True, salt: str = "salt", priority: int | None = None) -> Any:
    parsed = parse(json.dumps(body).encode(), "chat")
    raw = engine_body(parsed, model="real", stream=stream, cache_salt=salt, priority=priority)
    pairs = json.loads(raw, object_pairs_hook=lambda pairs: pairs)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), "a field said twice may be read either way"
    return json.loads(raw)


MESSAGES = [{"role": "user", "content": 'é \u2028 \\ "quoted"'}]


def test_unknown_fields_reach_the_engine_as_they_came() -> None:
    """New sampling parameters must work without a new gateway."""
    body = {"model": "m@1", "messages": MESSAGES, "top_k": 3, "x_new": {"a": [1, 2.5e3, None]}, "stream": True}
    assert sent(body, salt="") == {
        "messages": MESSAGES,
        "top_k": 3,
        "x_new": {"a": [1, 2500.0, None]},
        "model": "real",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("name", sorted(STRIPPED))
def test_what_a_client_has_no_say_in_is_dropped(name: str) -> None:
    """X01, A06: priority, salts and routing are ours."""
    body = {"model": "m", "messages": MESSAGES, name: "theirs"}
    found = sent(body, priority=1)
    assert found.get(name) in ({"priority": 1, "cache_salt": "salt"}.get(name), None)
    assert "theirs" not in found.values()


def test_a_field_said_twice_is_said_once() -> None:
    """Two values for one name: what was checked is what is sent."""
    raw = (
        b'{"model": "m", "messages": [], "messages": [{"role": "user", "content": "x"}], "n": 0, "n": 1, "priority": 1}'
    )
    parsed = parse(raw, "chat")
    found = json.loads(engine_body(parsed, model="m", stream=False, cache_salt="", priority=None))
    assert found == {"messages": [{"role": "user", "content": "x"}], "n": 1, "model": "m", "stream": False}


def test_an_engine_that_can_count_along_is_asked_to() -> None:
    """L01: a cut stream's events were counted, and an engine under load puts several tokens into one."""
    parsed = parse(json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode(), "chat")
    asked = {"model": "m", "cache_salt": "", "priority": None}
    options = [
        json.loads(engine_body(one, stream=True, engine=engine, **asked))["stream_options"]  # type: ignore[arg-type]
        for one, engine in (
            (parsed, "vllm"),
            (parsed, "sglang"),
            # of several answers each would be counted alone
            (parse(json.dumps({"model": "m", "messages": MESSAGES, "n": 2, "stream": True}).encode(), "chat"), "vllm"),
        )
    ]
    assert options == [
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": True},
        {"include_usage": True},
    ]


def test_the_clients_stream_options_are_kept() -> None:
    """Continuous usage stays, usage is always asked for."""
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {"model": "m", "messages": MESSAGES, "stream": True, "stream_options": options}
    assert sent(body)["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_our_metadata_is_taken_out_and_theirs_left() -> None:
    """OpenAI's `metadata` is a feature of its own."""
    body = {"model": "m", "messages": MESSAGES, "metadata": {"class": "chat", "task": "t", "deadline_ms": 5, "a": "b"}}
    assert sent(body)["metadata"] == {"a": "b"}
    assert "metadata" not in sent({**body, "metadata": {"class": "chat"}})


@pytest.mark.parametrize(
    ("more", "assembled"),
    [
        ({}, True),
        ({"temperature": 0, "seed": 1, "logprobs": None}, True),
        ({"tools": [{}]}, False),
        ({"n": 2}, False),
        ({"logprobs": True}, False),
        ({"something_new": 1}, False),
    ],
)
def test_only_what_streams_alike_is_put_together_from_a_stream(more: dict[str, Any], assembled: bool) -> None:
    """Anything that is not known to be alike is the engine's own whole answer."""
    assert parse(json.dumps({"model": "m", "messages": MESSAGES, **more}).encode(), "chat").assembled is assembled


def test_deep_nesting_is_a_400() -> None:
    """A body of brackets must not end the process."""

    def body(depth: int) -> bytes:
        start = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "x": '
        return start + b"[" * depth + b"]" * depth + b"}"

    assert parse(body(100), "chat").body_bytes == len(body(100))
    with pytest.raises(ApiError) as deep:
        parse(body(100_000), "chat")
    assert (deep.value.status, deep.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("name", "code", "param"),
    [
        ("err-overlong-prompt", "context_length_exceeded", "input_tokens"),
        ("err-overlong-maxtokens", "rejected_by_engine", "max_tokens"),
        ("err-badparam", "rejected_by_engine", None),
        ("sglang/err-missing", "rejected_by_engine", None),
        ("sglang/err-overlong", None, None),
        ("llamacpp/err-overlong", None, None),
    ],
)
def test_real_engines_rejections(name: str, code: str | None, param: str | None) -> None:
    """vLLM, SGLang (flat, with a trace of its host) and llama.cpp."""
    path = CAPTURES / f"{name}.txt"
    if not path.is_file():
        pytest.skip(f"no capture {path}")
    body = path.read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")[2].strip()
    error = rejection(400, body)
    assert error.status == 400
    assert error.message
    assert "File" not in error.message
    if code is not None:
        assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"\xff", b"[]", b'{"error": null}', b'{"error": "x"}', b'{"error": {"message": 5}}']
)
def test_an_error_page_that_is_none_is_still_an_error(body: bytes) -> None:
    """Whatever an engine sends."""
    error = rejection(400, body)
    assert json.loads(error.body())["error"]["message"]
