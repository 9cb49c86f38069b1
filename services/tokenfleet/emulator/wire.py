"""What travels over an emulated engine's HTTP API: requests in, vLLM 0.32's shapes out.

Decides what a body asks for, whether it is refused and with which words, and the bytes of every answer. Refuses to know
sockets and the engine: text and counts come from its caller. Shapes are those a real vLLM 0.32.0 sent, byte order of
keys included.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal

import msgspec

from tokenfleet import chatml
from tokenfleet.emulator.settings import EmulatorSettings

#: ByT5's ids: a byte plus three special tokens (Xue et al. 2022, "ByT5", section 3)
BYTE_OFFSET = 3
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DONE = "data: [DONE]\n\n"

Kind = Literal["chat", "completion"]


class ApiError(Exception):
    """A request the engine refuses: HTTP status and the body's `error` object."""

    def __init__(self, status: int, message: str, type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": type, "param": param, "code": status}

    def body(self) -> bytes:
        """As an answer."""
        return msgspec.json.encode({"error": self.error})

    def events(self) -> str:
        """As the end of a stream: real engines write this one with blanks, then [DONE]."""
        return f"data: {json.dumps({'error': self.error})}\n\n{DONE}"


def busy(status: int = 503) -> ApiError:
    """The refusal of a full queue."""
    return ApiError(status, BUSY, "Service Unavailable")


def dead() -> ApiError:
    """What open requests hear when the engine stops under them."""
    return ApiError(500, DEAD, "InternalServerError")


def _bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "BadRequestError", param)


def _invalid(kind: str, where: str, message: str, more: str = "") -> ApiError:
    """A schema error in the words of the validation layer before the engine."""
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{where}', 'msg': '{message}'{more}}}"
    return ApiError(400, text, "Bad Request", where)


class Part(msgspec.Struct):
    """One part of a message's content; only text counts."""

    type: str
    text: str = ""


class Message(msgspec.Struct):
    """One chat message; unknown fields (tool calls, names) are accepted and not rendered."""

    role: str
    content: str | list[Part] | None = None


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Private(msgspec.Struct):
    """`tokenfleet_emulator`: what a real engine ignores as an unknown field."""

    #: length of the answer as the model would have it; `max_tokens` stays only a limit
    output_tokens: int | None = None


class Common(msgspec.Struct):
    """Fields of both kinds of request; all others are accepted and ignored, as vLLM does."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    tokenfleet_emulator: Private | None = None


class ChatBody(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None


class CompletionBody(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str]


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class Call(msgspec.Struct, kw_only=True):
    """A request that will run: what is prefilled, how much comes out, how it is sent."""

    kind: Kind
    prompt: bytes
    #: tokens it generates, and why it ends there
    output_tokens: int
    finish_reason: Literal["stop", "length"]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    salt: bytes
    priority: int
    #: LoRA adapter that computes it; empty: the model alone
    adapter: str = ""


def decode_json(content_type: str, body: bytes, shape: type[Any]) -> Any:
    """A body of the given shape. Raises `ApiError` in the engine's words."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, "Bad Request")
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        text = str(error)
        if text.startswith("Object missing required field `") and " - at" not in text:
            field = text.split("`")[1]
            raise _invalid("missing", f"body.{field}", "Field required", ", 'input': '<dict>'") from None
        raise _invalid("value_error", "body", text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _malformed(body) from None


def _malformed(body: bytes) -> ApiError:
    """The message of Python's own JSON reader, which the real server uses."""
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        more = f", 'input': '<dict of 0 items>', 'ctx': {{'error': {error.msg!r}}}"
        return _invalid("json_invalid", f"body.{error.pos}", "JSON decode error", more)
    except (UnicodeDecodeError, RecursionError):
        pass
    return ApiError(400, "There was an error parsing the body", "Bad Request")


def check_model(asked: str | None, served: str, adapters: tuple[str, ...] = ()) -> None:
    """Raise the engine's 404 for what it serves neither as model nor as adapter; none asked means its model."""
    if asked is not None and asked != served and asked not in adapters:
        message = f"The model `{asked}` does not exist. Valid aliases: {served}."
        raise ApiError(404, message, "NotFoundError", "model")


def render(messages: list[Message]) -> bytes:
    """The prompt of a conversation. Raises `ApiError` for an empty one."""
    if not messages:
        raise _bad("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return _utf8(chatml.render(msgspec.to_builtins(messages)))


def _utf8(text: str) -> bytes:
    # JSON may spell a lone surrogate; no tokenizer takes one.
    return text.encode("utf-8", "replace")


def _prompt(prompt: str | list[int | str]) -> bytes:
    if isinstance(prompt, str):
        text = _utf8(prompt)
    elif len(prompt) == 1 and isinstance(prompt[0], str):
        text = _utf8(prompt[0])
    elif all(isinstance(token, int) for token in prompt):
        try:
            text = bytes(int(token) - BYTE_OFFSET for token in prompt)
        except ValueError:
            raise _bad("Token id is out of vocabulary") from None
    else:
        raise _bad("This engine takes one prompt per request", "prompt")
    if not text:
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty.")
    return text


def parse_call(
    kind: Kind,
    content_type: str,
    body: bytes,
    *,
    model: str,
    max_model_len: int,
    settings: EmulatorSettings,
    adapters: tuple[str, ...] = (),
) -> Call:
    """What a generation request asks for. Raises `ApiError`: bad JSON or shape, unknown model, impossible lengths."""
    asked: ChatBody | CompletionBody = decode_json(content_type, body, ChatBody if kind == "chat" else CompletionBody)
    check_model(asked.model, model, adapters)
    if isinstance(asked, ChatBody):
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    else:
        # OpenAI's default for this endpoint
        limit = 16 if asked.max_tokens is None else asked.max_tokens
    if limit is not None and limit < 1:
        raise _bad(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    if limit is not None and limit > max_model_len:
        raise _bad(
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={limit})",
            "max_tokens",
        )
    if asked.n not in (None, 1):
        raise _bad("This engine generates one choice per request", "n")
    if asked.stream_options is not None and not asked.stream:
        raise _bad("Stream options can only be defined when `stream=True`.", "stream_options")
    prompt = render(asked.messages) if isinstance(asked, ChatBody) else _prompt(asked.prompt)
    room = max_model_len - len(prompt)
    if room < 1:
        least = max_model_len + 1
        raise _bad(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{least} input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            f"of the input prompt. (parameter=input_tokens, value={least})",
            "input_tokens",
        )
    # A limit beyond the context is clamped without a word.
    limit = room if limit is None else min(limit, room)
    if asked.ignore_eos:
        natural = limit + 1
    else:
        forced = asked.tokenfleet_emulator.output_tokens if asked.tokenfleet_emulator else None
        natural = forced if forced is not None else natural_length(prompt, settings)
        natural = max(natural, asked.min_tokens or 0, 1)
    options = asked.stream_options or StreamOptions()
    return Call(
        kind=kind,
        prompt=prompt,
        output_tokens=min(natural, limit),
        finish_reason="stop" if natural <= limit else "length",
        stream=bool(asked.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        salt=_utf8(asked.cache_salt or ""),
        priority=asked.priority or 0,
        adapter=asked.model if asked.model is not None and asked.model != model else "",
    )


# -- pseudo text ------------------------------------------------------------------------------------------------

_WORDS = (  # noqa: SIM905  a list of 45 lines is not clearer
    "the of to and in is that for it as with on by this from at an be or are which model token cache "
    "batch step queue fleet site load time work small large first next between under over after before "
    "through while"
).split()


def _corpus(length: int) -> str:
    """Words in an order that does not repeat visibly; one fixed text for all processes."""
    parts: list[str] = []
    size, seed = 0, 1
    while size < length:
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        word = _WORDS[(seed >> 16) % len(_WORDS)]
        parts.append(word)
        size += len(word) + 1
    return " ".join(parts)[:length]


_CORPUS = _corpus(16_384)


def _digest(prompt: bytes, person: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(prompt, digest_size=8, person=person).digest(), "big")


def pseudo_text(prompt: bytes, tokens: int) -> str:
    """The answer to a prompt, one ASCII character a token, the same for the same prompt; needs no escapes."""
    # From a word's beginning; the text is far longer than any word.
    start = _CORPUS.index(" ", _digest(prompt, b"tf-text") % (len(_CORPUS) - 64)) + 1
    text = _CORPUS[start : start + tokens]
    while len(text) < tokens:
        text += _CORPUS[: tokens - len(text)]
    return text


def natural_length(prompt: bytes, settings: EmulatorSettings) -> int:
    """Length of the answer if nothing forces one: lognormal, by the prompt's hash, capped."""
    uniform = (_digest(prompt, b"tf-length") + 0.5) / 2.0**64
    length = settings.output_tokens_median * math.exp(settings.output_tokens_sigma * NormalDist().inv_cdf(uniform))
    return max(1, min(round(length), settings.output_tokens_max))


# -- answers ----------------------------------------------------------------------------------------------------


class Writer:
    """The bytes of one request's answer, streamed or not; keeps no count of what was sent but the role."""

    def __init__(
        self, call: Call, *, id: str, model: str, created: int, text: str, settings: EmulatorSettings, block_tokens: int
    ) -> None:
        self._call = call
        self._text = text
        self._details = settings.prompt_tokens_details
        self._fingerprint = f"vllm-{settings.engine_version}-tokenfleet"
        self._block_tokens = block_tokens
        self.cached_tokens = 0
        chat = call.kind == "chat"
        self.id = f"chatcmpl-{id}" if chat else f"cmpl-{id}"
        object = ("chat.completion.chunk" if call.stream else "chat.completion") if chat else "text_completion"
        # `model` and `id` come from outside; everything else is ours and needs no escaping.
        self._head = (
            f'{{"id":{_quoted(self.id)},"object":"{object}","created":{created},"model":{_quoted(model)},"choices":['
        )
        if chat:
            self._before = f'data: {self._head}{{"index":0,"delta":{{"content":"'
            self._after = '"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        else:
            self._before = f'data: {self._head}{{"index":0,"text":"'
            self._after = (
                '","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
            )
        self._role_due = chat

    def usage(self, tokens: int, *, details: bool) -> str:
        """The `usage` object after so many tokens."""
        prompt = len(self._call.prompt)
        text = f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + tokens},"completion_tokens":{tokens}'
        if details:
            whole = prompt // self._block_tokens * self._block_tokens
            created = max(0, whole - self.cached_tokens)
            text += (
                f',"prompt_tokens_details":{{"cached_tokens":{self.cached_tokens},"created_cache_tokens":{created},'
                f'"multimodal_tokens":null}}'
            )
        return text + "}"

    def events(self, start: int, end: int, *, last: bool = False) -> str:
        """Events for the tokens `start` to `end` (exclusive); the role comes before the first of them."""
        events = ""
        continuous = self._call.continuous_usage
        if self._role_due:
            self._role_due = False
            usage = f',"usage":{self._continuous(0)}' if continuous else ""
            events = (
                f'data: {self._head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,'
                f'"finish_reason":null}}]{usage},"prompt_token_ids":null,"prompt_text":null}}\n\n'
            )
        if end <= start:
            return events
        after = self._after
        if last:
            reason = f'"finish_reason":"{self._call.finish_reason}"'
            if self._call.kind == "chat":
                reason += ',"stop_reason":null'
            after = after.replace('"finish_reason":null', reason)
        if continuous:
            after += f',"usage":{self._continuous(end)}'
        if last and not self._call.include_usage:
            after += f',"system_fingerprint":"{self._fingerprint}"'
        return f"{events}{self._before}{self._text[start:end]}{after}}}\n\n"

    def _continuous(self, tokens: int) -> str:
        return self.usage(tokens, details=False)[:-1] + ',"completion_tokens_details":null}'

    def closing(self) -> str:
        """What follows the last token, up to but without [DONE]."""
        if not self._call.include_usage:
            return ""
        usage = self.usage(self._call.output_tokens, details=self._details)
        return f'data: {self._head}],"usage":{usage},"system_fingerprint":"{self._fingerprint}"}}\n\n'

    def body(self) -> bytes:
        """The whole answer of a request that is not streamed."""
        call = self._call
        text = self._text[: call.output_tokens]
        usage = self.usage(call.output_tokens, details=self._details)
        if not self._details:
            usage = usage[:-1] + ',"prompt_tokens_details":null}'
        usage = usage[:-1] + ',"completion_tokens_details":null}'
        if call.kind == "chat":
            choice = (
                f'"message":{{"role":"assistant","content":"{text}","refusal":null,"annotations":null,"audio":null,'
                f'"function_call":null,"reasoning":null}},"logprobs":null,"finish_reason":"{call.finish_reason}",'
                f'"stop_reason":null,"token_ids":null,"routed_experts":null'
            )
            more = ',"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null'
        else:
            choice = (
                f'"text":"{text}","logprobs":null,"finish_reason":"{call.finish_reason}","stop_reason":null,'
                f'"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null'
            )
            more = ""
        return (
            f'{self._head}{{"index":0,{choice}}}],"service_tier":null,"system_fingerprint":"{self._fingerprint}",'
            f'"usage":{usage}{more},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}'
        ).encode()


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def models_page(model: str, version: str, max_model_len: int, created: int, adapters: tuple[str, ...] = ()) -> bytes:
    """GET /v1/models: the one model, its exact version in `root`, and its adapters, whose `parent` it is."""
    permission: Mapping[str, Any] = {
        "id": f"modelperm-{_digest(model.encode(), b'tf-perm'):016x}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": f"{model}@{version}",
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    more = [{**card, "id": name, "root": name, "parent": model} for name in adapters]
    return msgspec.json.encode({"object": "list", "data": [card, *more]})


def tokenize(
    content_type: str, body: bytes, *, model: str, max_model_len: int, adapters: tuple[str, ...] = ()
) -> bytes:
    """POST /tokenize. Raises `ApiError`."""
    asked: TokenizeBody = decode_json(content_type, body, TokenizeBody)
    check_model(asked.model, model, adapters)
    if asked.messages is not None:
        text = render(asked.messages)
    elif asked.prompt is not None:
        text = _utf8(asked.prompt)
    else:
        raise _invalid("missing", "body.prompt", "Field required", ", 'input': '<dict>'")
    tokens = [byte + BYTE_OFFSET for byte in text]
    return msgspec.json.encode(
        {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": None}
    )
