"""The emulator's words against those a real vLLM 0.32.0 sent, kept as captures beside the repository."""

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenfleet.emulator import wire
from tokenfleet.emulator.settings import EmulatorSettings

CAPTURES = Path(os.environ.get("TOKENFLEET_SHARED", "../shared")) / "engines" / "captures"
SETTINGS = EmulatorSettings()
JSON = "application/json"


def captured(name: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of a captured answer."""
    path = CAPTURES / f"{name}.txt"
    if not path.exists():
        pytest.skip(f"no captures of a real engine at {CAPTURES}")
    head, _, body = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    first, *rest = head.splitlines()
    headers = dict(line.split(": ", 1) for line in rest)
    return int(first.split()[1]), headers, body


def shape(value: Any) -> Any:
    """Keys in order and types; what differs between two answers of the same kind is left out."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return type(value).__name__


def events(text: str) -> list[Any]:
    """The data of each server-sent event."""
    found = re.findall(r"data: (.*)\n\n", text + "\n\n")
    return [json.loads(item) if item != "[DONE]" else item for item in found]


def call(body: dict[str, Any], kind: wire.Kind = "chat", settings: EmulatorSettings = SETTINGS) -> wire.Call:
    """Parse a body as an engine that serves `tiny` with a context of 4096."""
    return wire.parse_call(kind, JSON, json.dumps(body).encode(), model="tiny", max_model_len=4096, settings=settings)


def answer(asked: wire.Call, *, details: bool = False) -> wire.Writer:
    """The writer of an answer, with the flags of the engine that was captured."""
    text = wire.pseudo_text(asked.prompt, asked.output_tokens)
    settings = msgspec.structs.replace(SETTINGS, prompt_tokens_details=details)
    return wire.Writer(asked, id="cap-1", model="tiny", created=1, text=text, settings=settings, block_tokens=32)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "max_tokens": 6}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("err-404-model", {**CHAT, "model": "nope"}),
        ("err-overlong-prompt", {**CHAT, "messages": [{"role": "user", "content": "x" * 5000}]}),
        ("err-overlong-stream", {**CHAT, "messages": [{"role": "user", "content": "x" * 4096}], "stream": True}),
        ("err-overlong-maxtokens", {**CHAT, "max_tokens": 5000}),
        ("err-badparam", {**CHAT, "messages": []}),
    ],
)
def test_refusals_are_the_real_engines_byte_for_byte(name: str, body: dict[str, Any]) -> None:
    """Clients and gateways match on these words; a paraphrase would hide a bug until a real engine answers."""
    status, _, expected = captured(name)
    with pytest.raises(wire.ApiError) as refused:
        call(body)
    assert refused.value.status == status
    assert refused.value.body().decode() == expected


def test_a_missing_field_and_broken_json_are_named_where_they_are() -> None:
    """The body that was captured: the reader stopped at character 15."""
    _, _, expected = captured("err-badjson")
    with pytest.raises(wire.ApiError) as refused:
        wire.parse_call("chat", JSON, b'{"model":"tiny"', model="tiny", max_model_len=4096, settings=SETTINGS)
    assert refused.value.body().decode() == expected
    with pytest.raises(wire.ApiError) as refused:
        call({"model": "tiny"})
    _, _, expected = captured("err-missing-messages")
    assert refused.value.error["param"] == json.loads(expected)["error"]["param"] == "body.messages"
    with pytest.raises(wire.ApiError) as refused:
        wire.parse_call("chat", "text/plain", b"{}", model="tiny", max_model_len=4096, settings=SETTINGS)
    assert refused.value.body().decode() == captured("err-content-type")[2]


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe{", b"[" * 100_000, b"", b'{"messages": 7}', b'{"messages":[{"role":"user","content":"\xff"}]}'],
)
def test_whatever_the_body_it_is_a_400(body: bytes) -> None:
    """A fuzzer's bytes must not become a 500 or a traceback."""
    with pytest.raises(wire.ApiError) as refused:
        wire.parse_call("chat", JSON, body, model="tiny", max_model_len=4096, settings=SETTINGS)
    assert refused.value.status == 400


@pytest.mark.parametrize("name", ["chat-stream-usage", "chat-stream-contusage", "chat-stream-nousage"])
def test_a_chat_stream_has_the_real_shape_event_by_event(name: str) -> None:
    """The role chunk, token chunks, the last one, usage with or without, [DONE]: keys in the same order."""
    _, _, body = captured(name)
    real = events(body)
    tokens = sum(1 for e in real if e != "[DONE]" and e["choices"] and "role" not in e["choices"][0]["delta"])
    options = {"include_usage": "no" not in name, "continuous_usage_stats": "cont" in name}
    asked = call({**CHAT, "max_tokens": tokens, "stream": True, "stream_options": options})
    writer = answer(asked)
    text = "".join(writer.events(i, i + 1, last=i == tokens - 1) for i in range(tokens))
    ours = events(text + writer.closing() + wire.DONE)
    assert [shape(event) for event in ours] == [shape(event) for event in real]
    said = "".join(e["choices"][0]["delta"]["content"] for e in ours if e != "[DONE]" and e["choices"])
    assert len(said) == tokens


def test_a_completion_stream_has_the_real_shape() -> None:
    """The older endpoint: no role, `text` instead of a delta."""
    _, _, body = captured("completions-stream")
    asked = call({"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}, "completion")
    writer = answer(asked)
    text = "".join(writer.events(i, i + 1, last=i == 2) for i in range(3))
    assert [shape(e) for e in events(text + writer.closing() + wire.DONE)] == [shape(e) for e in events(body)]


def test_a_whole_answer_has_the_real_shape() -> None:
    """Not streamed; once without and once with the cached-token details."""
    _, _, body = captured("chat-nonstream")
    assert shape(json.loads(answer(call(CHAT)).body())) == shape(json.loads(body))
    _, _, body = captured("chat-8101-warm2")
    writer = answer(call(CHAT), details=True)
    writer.cached_tokens = 32
    ours = json.loads(writer.body())
    assert shape(ours["usage"]) == shape(json.loads(body)["usage"])
    assert ours["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 32,
        "created_cache_tokens": 0,
        "multimodal_tokens": None,
    }


def test_an_adapter_is_served_by_its_name_and_listed_under_its_model() -> None:
    """P17: asked for an adapter that it has not loaded, an engine must say so and not answer as its model."""
    body = json.dumps({**CHAT, "model": "legal"}).encode()
    loaded = {"model": "tiny", "max_model_len": 4096, "settings": SETTINGS}
    assert wire.parse_call("chat", JSON, body, adapters=("legal",), **loaded).adapter == "legal"
    assert call(CHAT).adapter == ""
    with pytest.raises(wire.ApiError) as refused:
        wire.parse_call("chat", JSON, body, **loaded)
    assert refused.value.status == 404
    base, adapter = json.loads(wire.models_page("tiny", "7", 4096, 5, ("legal",)))["data"]
    assert (base["parent"], adapter["id"], adapter["parent"]) == (None, "legal", "tiny")


def test_models_and_tokenize_pages() -> None:
    """`root` carries the exact version: how a site agent tells two versions of one model apart."""
    _, _, body = captured("get-v1_models")
    page = json.loads(wire.models_page("tiny", "2026-11", 4096, 5))
    assert shape(page) == shape(json.loads(body))
    assert page["data"][0]["root"] == "tiny@2026-11"
    tokens = json.loads(wire.tokenize(JSON, b'{"prompt":"a\xc3\xbc"}', model="tiny", max_model_len=4096))
    assert tokens == {"count": 3, "max_model_len": 4096, "tokens": [100, 198, 191], "token_strs": None}
    chat = json.dumps({"model": "tiny", "messages": CHAT["messages"]}).encode()
    assert json.loads(wire.tokenize(JSON, chat, model="tiny", max_model_len=4096))["count"] == len(call(CHAT).prompt)
    with pytest.raises(wire.ApiError, match="Field required"):
        wire.tokenize(JSON, b"{}", model="tiny", max_model_len=4096)


def test_a_stream_error_is_written_as_the_engine_writes_it() -> None:
    """With blanks after the colons, unlike every other line; then [DONE]."""
    path = CAPTURES / "queue-limit-503.txt"
    if not path.exists():
        pytest.skip(f"no captures of a real engine at {CAPTURES}")
    assert wire.busy().events() in path.read_text()


def test_lengths_end_for_the_right_reason() -> None:
    """`stop` when the model is done, `length` when it was cut; a forced natural length keeps the limit a limit."""
    free = {key: value for key, value in CHAT.items() if key not in ("ignore_eos", "max_tokens")}
    table: list[tuple[dict[str, Any], int, str]] = [
        (CHAT, 6, "length"),
        ({**free, "tokenfleet_emulator": {"output_tokens": 9}}, 9, "stop"),
        ({**free, "tokenfleet_emulator": {"output_tokens": 9}, "max_tokens": 9}, 9, "stop"),
        ({**free, "tokenfleet_emulator": {"output_tokens": 9}, "max_completion_tokens": 4}, 4, "length"),
        ({**free, "tokenfleet_emulator": {"output_tokens": 9}, "min_tokens": 20}, 20, "stop"),
        # over the context: clamped without a word, as the real one does
        ({**CHAT, "max_tokens": 4096}, 4096 - 55, "length"),
    ]
    for body, tokens, reason in table:
        asked = call(body)
        assert (asked.output_tokens, asked.finish_reason) == (tokens, reason), body
    natural = call(free)
    assert call(free) == natural
    assert natural.finish_reason == "stop"


def test_natural_lengths_are_lognormal_and_capped() -> None:
    """Median and spread as the settings say, over many prompts, without a random number."""
    lengths = sorted(wire.natural_length(b"%d" % i, SETTINGS) for i in range(4000))
    assert 110 <= lengths[2000] <= 130
    # one standard deviation of the logarithm
    assert 1.9 <= lengths[3365] / lengths[2000] <= 2.6
    assert lengths[-1] <= SETTINGS.output_tokens_max


def test_pseudo_text_is_its_prompts_and_needs_no_escapes() -> None:
    """The next turn of a chat repeats it; it must be the same bytes in the JSON and in the prompt."""
    text = wire.pseudo_text(b"prompt", 40_000)
    assert len(text) == 40_000
    assert re.fullmatch("[a-z ]+", text)
    assert wire.pseudo_text(b"prompt", 10) == text[:10]
    assert wire.pseudo_text(b"other", 40) != text[:40]


def test_prompts_of_the_older_endpoint() -> None:
    """Text, a list of one, or token ids; a batch is refused."""
    for prompt in ("ab", ["ab"], [100, 101]):
        assert call({"model": "tiny", "prompt": prompt, "max_tokens": 1}, "completion").prompt == b"ab"
    for prompt in ([], "", [1], ["a", "b"], [100, "a"]):
        with pytest.raises(wire.ApiError) as refused:
            call({"model": "tiny", "prompt": prompt, "max_tokens": 1}, "completion")
        assert refused.value.status == 400
