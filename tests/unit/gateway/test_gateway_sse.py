"""Streams as engines really send them, cut anywhere."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from tokenfleet.gateway.assembly import Assembly
from tokenfleet.gateway.sse import DONE, Scanner

CAPTURES = Path(os.environ.get("TOKENFLEET_SHARED", Path(__file__).parents[4] / "shared")) / "engines" / "captures"


def chunk(content: str | None = None, finish: str | None = None, **delta: object) -> bytes:
    if content is not None:
        delta["content"] = content
    data = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


ROLE = chunk("", role="assistant")
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
STREAM = ROLE + chunk("a") + chunk("b") + chunk("c", "stop") + USAGE + DONE


def run(stream: bytes, *cuts: int, **options: bool) -> tuple[bytes, Scanner]:
    scanner = Scanner(**options)  # type: ignore[arg-type]
    out, at = b"", 0
    for cut in (*cuts, len(stream)):
        out += scanner.feed(stream[at:cut])
        at = cut
    return out + scanner.end(), scanner


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_wherever_the_stream_is_cut_the_client_gets_the_same(cut: int) -> None:
    """G08: the end marker was split over two reads and the completion hook never ran."""
    out, scanner = run(STREAM, cut)
    assert out == STREAM.removesuffix(DONE)
    assert (scanner.done, scanner.complete, scanner.tokens, scanner.output_tokens) == (True, True, 3, 3)
    assert (scanner.finish_reason, scanner.model, scanner.fault) == ("stop", "m", "")


def test_byte_by_byte_is_the_same_too() -> None:
    """The worst of networks."""
    out, scanner = run(STREAM, *range(1, len(STREAM)))
    assert out == STREAM.removesuffix(DONE)
    assert scanner.complete


@pytest.mark.parametrize("ending", [b"\r\n", b"\r"])
def test_other_line_ends_are_understood(ending: bytes) -> None:
    """Some servers end lines with CRLF; cut between the two it must not look like an empty line."""
    stream = STREAM.replace(b"\n", ending)
    for cut in range(len(stream) + 1):
        out, scanner = run(stream, cut)
        assert out == STREAM.removesuffix(DONE), cut
        assert scanner.complete


def test_a_usage_chunk_that_the_client_did_not_ask_for_is_kept_back() -> None:
    """The gateway always asks for usage; a client that did not must not see a chunk without choices."""
    out, scanner = run(STREAM, include_usage=False)
    assert out == STREAM.removesuffix(USAGE + DONE)
    assert scanner.usage is not None
    assert scanner.usage.prompt_tokens == 7


def test_a_stream_closed_without_its_end_marker_after_the_finish_is_complete() -> None:
    """G08's other half: [DONE] never came, but every answer has its finish reason."""
    _, scanner = run(STREAM.removesuffix(DONE))
    assert scanner.complete
    assert not scanner.done


@pytest.mark.parametrize("stream", [ROLE + chunk("a"), ROLE, b"", ROLE + chunk("a") + DONE])
def test_a_stream_without_a_finish_is_never_complete(stream: bytes) -> None:
    """G01: a reset was turned into a clean end of answer."""
    assert not run(stream)[1].complete


def test_nothing_goes_out_before_the_first_token() -> None:
    """Until then the attempt can be repeated elsewhere: role chunk and comments are kept back."""
    scanner = Scanner()
    assert scanner.feed(ROLE + b": keep-alive\n\n") == b""
    assert not scanner.first_token
    assert scanner.feed(chunk("a")) == ROLE + chunk("a")
    assert scanner.first_token
    assert scanner.feed(b": keep-alive\n\n") == b": keep-alive\n\n"


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_reasoning_and_tool_calls_are_first_tokens(delta: dict[str, object]) -> None:
    """G13: a request whose thinking began after 1,175 ms was logged with 183,581 ms."""
    scanner = Scanner()
    scanner.feed(ROLE)
    scanner.feed(chunk(**delta))
    assert scanner.first_token


def test_an_empty_answer_has_no_first_token_and_is_complete() -> None:
    """Zero tokens: no TTFT sample, but an answer all the same."""
    out, scanner = run(ROLE + chunk(finish="stop") + DONE)
    assert (scanner.first_token, scanner.tokens, scanner.complete) == (False, 0, True)
    assert out == ROLE + chunk(finish="stop")


ERROR = b'data: {"error": {"message": "The engine is busy.", "type": "x", "param": null, "code": 503}}\n\n' + DONE


def test_an_error_as_first_event_is_a_fault_and_not_an_answer() -> None:
    """vLLM refuses streams with 200 and an error event; the end marker behind it is no success."""
    out, scanner = run(ERROR)
    assert (out, scanner.fault, scanner.complete, scanner.first_token) == (b"", "upstream_error", False, False)


def test_an_error_in_the_middle_keeps_what_came_before() -> None:
    """The tokens are the client's; the engine's words and its end marker are not."""
    out, scanner = run(ROLE + chunk("a") + ERROR)
    assert out == ROLE + chunk("a")
    assert (scanner.fault, scanner.tokens, scanner.complete) == ("upstream_error", 1, False)


def test_flat_errors_and_aborts_are_faults() -> None:
    """SGLang's errors have no `error`; vLLM ends an aborted request with 200 and finish_reason "abort"."""
    assert run(b'data: {"object":"error","message":"no"}\n\n')[1].fault == "upstream_error"
    assert run(ROLE + chunk("a") + chunk("", "abort") + DONE)[1].fault == "upstream_error"


def test_garbage_and_endless_events_are_faults() -> None:
    """What cannot be understood must not be passed on as an answer, nor kept in memory for ever."""
    assert run(b"data: {nonsense\n\n")[1].fault == "upstream_protocol"
    scanner = Scanner(event_bytes=100)
    for _ in range(20):
        scanner.feed(b"x" * 10)
    assert scanner.fault == "upstream_protocol"


def test_text_that_looks_like_a_marker_is_text() -> None:
    """A user asks for the word [DONE], or for JSON about errors."""
    words = chunk('say "[DONE]"') + chunk('{"error": 1, "usage": 2}') + chunk('"finish_reason":null data: x')
    out, scanner = run(ROLE + chunk("a") + words + chunk("", "stop") + DONE, len(ROLE + chunk("a")))
    assert out == ROLE + chunk("a") + words + chunk("", "stop")
    assert (scanner.tokens, scanner.complete) == (4, True)


def test_several_answers_are_complete_when_all_are() -> None:
    """n = 2: the first finish is not the end."""
    scanner = Scanner(choices=2)
    scanner.feed(ROLE + chunk("a") + chunk("b", "stop"))
    assert not scanner.complete
    scanner.feed(chunk("c", "length"))
    assert scanner.complete


@pytest.mark.parametrize(
    ("name", "tokens", "counted"),
    [
        ("chat-stream-usage", 6, 6),
        ("chat-stream-contusage", 4, 4),
        ("chat-stream-nousage", 4, 4),
        ("completions-stream", 3, 3),
        ("sglang/chat-stream-usage", None, None),
        ("llamacpp/chat-stream-usage", None, None),
    ],
)
def test_real_engines_streams(name: str, tokens: int | None, counted: int | None) -> None:
    """Captures of vLLM, SGLang and llama.cpp: complete, first token seen, bytes untouched."""
    path = CAPTURES / f"{name}.txt"
    if not path.is_file():
        pytest.skip(f"no capture {path}")
    raw = path.read_bytes()
    raw = raw[raw.index(b"data:") :]
    stream = raw[: raw.index(b"data: [DONE]")] + DONE
    for cuts in ((), range(0, len(stream), 7)):
        out, scanner = run(stream, *cuts)
        assert scanner.complete, scanner.fault
        assert scanner.first_token
        assert out.replace(b"\r\n", b"\n") == stream.removesuffix(DONE).replace(b"\r\n", b"\n")
        if tokens is not None:
            assert (scanner.output_tokens, scanner.tokens) == (tokens, counted)


def test_a_whole_answer_is_put_together_from_a_stream() -> None:
    """Clients without stream get one JSON object: text, reasoning, the odd fields, usage and finish reason."""
    assembly = Assembly("chat")
    scanner = Scanner()
    stream = ROLE + chunk(reasoning_content="th") + chunk(reasoning_content="ink") + chunk("a") + chunk("b", "stop")
    for at in range(0, len(stream + USAGE + DONE), 11):
        out = scanner.feed((stream + USAGE + DONE)[at : at + 11])
        if out:
            assembly.take(out)
    answer = json.loads(assembly.body())
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 3
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "ab", "refusal": None, "reasoning_content": "think"}


def test_a_whole_completion_is_put_together_too() -> None:
    """/v1/completions: `text` instead of messages."""
    assembly = Assembly("completions")
    for text, finish in (("a", "null"), ("b", '"length"')):
        assembly.take(
            b'data: {"id":"x","choices":[{"index":0,"text":"%s","finish_reason":%s}]}\n\n'
            % (text.encode(), finish.encode())
        )
    answer = json.loads(assembly.body())
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]


def counted(content: str, tokens: int, finish: str | None = None, **more: object) -> bytes:
    """An event as vLLM counts along in it (`chat-stream-contusage.txt` of its captures)."""
    plain = chunk(content, finish, **more).removesuffix(b"}\n\n")
    return (
        plain
        + b',"usage":{"prompt_tokens":7,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}}\n\n'
        % (7 + tokens, tokens)
    )


COUNTED = counted("", 0, role="assistant") + counted("ab", 2) + counted("c\\", 5) + counted('d,"usage":{"x":1}', 9)


@pytest.mark.parametrize("cuts", [(), (300,), (460, 640), tuple(range(1, len(COUNTED)))])
def test_a_broken_stream_is_counted_by_the_engine(cuts: tuple[int, ...]) -> None:
    """L01: four tokens in one event were one in the ledger when the client left; what nobody asked for is cut."""
    out, scanner = run(COUNTED, *cuts, include_usage=False, continuous_usage=False)
    assert out == chunk("", role="assistant") + chunk("ab") + chunk("c\\") + chunk('d,"usage":{"x":1}')
    assert (scanner.tokens, scanner.output_tokens) == (3, 9)
    assert scanner.usage is not None
    assert scanner.usage.prompt_tokens == 7
    out, scanner = run(COUNTED, *cuts)
    assert out == COUNTED, "who asked for it gets it"
    whole = COUNTED + counted("e", 10, "stop") + USAGE + DONE
    out, scanner = run(whole, *cuts, include_usage=True, continuous_usage=False)
    assert out.endswith(chunk("e", "stop") + USAGE)
    assert (scanner.complete, scanner.output_tokens) == (True, 3)


@pytest.mark.skipif(not CAPTURES.is_dir(), reason=f"no captures in {CAPTURES}")
def test_a_real_engines_running_count_is_taken_out() -> None:
    """The shapes of vLLM 0.32, not of our imagination."""
    stream = (CAPTURES / "chat-stream-contusage.txt").read_bytes().partition(b"\r\n\r\n")[2]
    stream = stream or (CAPTURES / "chat-stream-contusage.txt").read_bytes().partition(b"\n\n")[2]
    out, scanner = run(stream, include_usage=False, continuous_usage=False)
    assert scanner.complete
    assert b"usage" not in out
    events = [msgspec.json.decode(one[6:]) for one in out.split(b"\n\n") if one]
    assert len(events) == stream.count(b'"finish_reason"')
