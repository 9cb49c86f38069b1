"""Reads an engine's event stream as it comes, in pieces cut anywhere, and says what of it the client gets.

Decides where an event ends, when the first token is there, what is counted, and whether the answer is complete, cut or
an error. The client's bytes are the engine's bytes: events pass untouched, but for the usage that the gateway asked for
and the client did not (the last event's, and the running count in each), and the end marker, which the relay writes
itself once the answer is complete.

After the first token an event is decoded only if a few cheap byte searches say that there is something to see. Refuses
to know sockets and clocks. Sources: the HTML standard's server-sent events; OpenAI's streaming format; what vLLM 0.32
and SGLang really send (role chunk with the first token, empty content for half a character, errors as 200 + `data:
{"error"}` + `[DONE]`, `finish_reason` "abort" for an aborted request).
"""

import re
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_NOT_FINISHED = b'"finish_reason":null'
#: a count inside an event. Quotes in an answer's text are escaped, so that this is never part of it
_COUNT = re.compile(rb',\s?"usage":\s?(\{(?:[^{}]|\{[^{}]*\})*\})')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """An engine's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from its prefix cache; None: it does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None

    @property
    def token(self) -> bool:
        """Something of the answer: the role alone, or an empty delta, is nothing yet."""
        return bool(
            self.content
            or self.reasoning
            or self.reasoning_content
            or self.tool_calls
            or self.refusal
            or self.function_call
        )


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    model: str | None = None
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None
    #: SGLang's flat errors
    object: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
_decode_usage = msgspec.json.Decoder(Usage).decode


class Scanner:
    """One attempt's stream. `feed` it what arrives; its attributes say what was seen."""

    def __init__(
        self,
        *,
        choices: int = 1,
        include_usage: bool = True,
        continuous_usage: bool = True,
        event_bytes: int = 8 * 1024 * 1024,
    ) -> None:
        self._choices = choices
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._event_bytes = event_bytes
        self._tail = b""
        #: events before the first token: nothing goes to the client while another instance may still answer
        self._early: list[bytes] = []
        #: nothing is to be taken out of the event looked at last
        self._whole = True
        #: the first content, reasoning or tool token was seen
        self.first_token = False
        #: events that carried a token; an event may carry several, so usage is believed before this
        self.tokens = 0
        self.usage: Usage | None = None
        self.model = ""
        self.finish_reason = ""
        #: answers that came to an end
        self.finished = 0
        #: the end marker was seen
        self.done = False
        #: typed code of what is wrong with the stream; empty: nothing
        self.fault = ""

    @property
    def complete(self) -> bool:
        """Every answer came to its end: the stream may be closed as a success, with or without its end marker."""
        return not self.fault and self.finished > 0 and (self.done or self.finished >= self._choices)

    @property
    def over(self) -> bool:
        """Nothing more is to be read."""
        return self.done or bool(self.fault)

    @property
    def output_tokens(self) -> int:
        """By usage, else counted."""
        return self.tokens if self.usage is None else self.usage.completion_tokens

    def feed(self, data: bytes) -> bytes:
        """Take what arrived; returns what the client gets of it: whole events, nothing before the first token."""
        if self.over:
            return b""
        data = self._tail + data if self._tail else data
        if b"\r" in data:
            data, held = _with_newlines(data)
        else:
            held = b""
        cut = data.rfind(b"\n\n")
        if cut < 0:
            self._tail = data + held
            if len(self._tail) > self._event_bytes:
                self.fault = "upstream_protocol"
            return b""
        block, self._tail = data[: cut + 2], data[cut + 2 :] + held
        if self.first_token and b'"error"' not in block and b"[DONE]" not in block:
            events = block.count(b"\n\n")
            # one `null` per event and no comment between: nothing but tokens
            if block.count(_NOT_FINISHED) == events == block.count(b"data:"):
                counts = block.count(b'"usage"')
                if not counts:
                    self.tokens += events
                    return block
                if counts == events and (plain := self._counted(block, events)) is not None:
                    self.tokens += events
                    return plain
        return self._inspect(block)

    def _counted(self, block: bytes, events: int) -> bytes | None:
        """What the client gets of token events that each carry a running count; None: they want a closer look."""
        found = _COUNT.findall(block)
        if len(found) != events:
            return None
        try:
            self.usage = _decode_usage(found[-1])
        except msgspec.DecodeError:
            return None
        return block if self._continuous_usage else _COUNT.sub(b"", block)

    def end(self) -> bytes:
        """The connection was closed: an event without its last blank line counts if it is whole."""
        if self.over or not self._tail.strip():
            return b""
        tail, self._tail = self._tail, b""
        return self._inspect(tail.rstrip(b"\r\n") + b"\n\n")

    def _inspect(self, block: bytes) -> bytes:
        passed: list[bytes] = []
        for event in block.split(b"\n\n"):
            if not event.strip():
                continue
            data = _data_of(event)
            if data is None:  # a comment: keeps a started stream alive, and is no answer before that
                if self.first_token:
                    passed.append(event)
                continue
            if data == b"[DONE]":
                self.done = True
                break
            if self._event(data):
                passed.append(event if self._whole or self._continuous_usage else _COUNT.sub(b"", event))
            if self.fault:
                break
        if not passed:
            return b""
        out = b"\n\n".join(passed) + b"\n\n"
        if not self.first_token and not self.finished:
            self._early.append(out)
            return b""
        if self._early:
            out = b"".join(self._early) + out
            self._early.clear()
        return out

    def _event(self, data: bytes) -> bool:
        """Look at one event; whether the client gets it."""
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.fault = "upstream_protocol"
            return False
        if chunk.error is not None or chunk.object == "error":
            self.fault = "upstream_error"
            return False
        if chunk.model:
            self.model = chunk.model
        if chunk.usage is not None:
            self.usage = chunk.usage
        self._whole = not chunk.choices or chunk.usage is None
        if not chunk.choices:
            return self._include_usage or chunk.usage is None
        for choice in chunk.choices:
            delta = choice.delta
            if (delta is not None and delta.token) or choice.text:
                self.first_token = True
                self.tokens += 1
            elif choice.finish_reason is None and ((delta is not None and delta.role is None) or choice.text == ""):
                self.tokens += 1  # half a character: generated, not yet shown
            if choice.finish_reason is not None:
                if choice.finish_reason in ("abort", "error"):
                    self.fault = "upstream_error"
                    return False
                self.finished += 1
                self.finish_reason = choice.finish_reason
        return True


def _with_newlines(data: bytes) -> tuple[bytes, bytes]:
    """CRLF and CR as LF; a CR at the very end waits, since an LF may follow. JSON holds neither unescaped."""
    held = b"\r" if data.endswith(b"\r") else b""
    if held:
        data = data[:-1]
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), held


def _data_of(event: bytes) -> bytes | None:
    """The `data` of one event; None if it has none."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
