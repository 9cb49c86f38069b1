"""The OpenAI API as clients speak it: what a body must be, what an engine gets of it, what errors look like.

Decides whether a body is well formed, which of a client's words are believed (none about tenant, priority, cache or
routing) and the exact bytes that an engine receives. The body is not re-encoded: its top-level values are carried over
as they came, so that fields which this version does not know reach the engine unchanged.

Refuses to know HTTP, who the client is and which engine serves it. Source: the OpenAI API reference (chat completions,
completions, error objects) and vLLM 0.32's protocol for the fields beyond it.
"""

import codecs
import re
from typing import Any, Literal

import msgspec

from tokenfleet_schemas.admission import REASONS

#: words of ours in `metadata`; never shown to an engine
OURS = ("class", "task", "deadline_ms")
#: top-level fields that a client has no say in: dropped, and set by the gateway where it uses them
STRIPPED = frozenset(
    {
        "priority",
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "request_id",
        "session_id",
        "data_parallel_rank",
        "routed_dp_rank",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "rid",
        "extra_key",
    }
)
#: fields with which vLLM answers alike whether it streams or not, so that a whole answer can be put together from a
#: stream; with any other (tools, whose streaming parsers differ; prompt_logprobs, best_of, which do not stream at all)
#: the engine's own whole answer is passed on
# fmt: off
ASSEMBLED = frozenset((
    "model", "messages", "prompt", "stream", "stream_options", "metadata", "max_tokens", "max_completion_tokens",
    "min_tokens", "n", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "temperature",
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
    "logit_bias", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "skip_special_tokens",
    "spaces_between_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "response_format", "structured_outputs", "reasoning_effort", "verbosity",
))
# fmt: on
_TASK = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")
_AT = re.compile(r" - at `\$\.?([A-Za-z_]*)")
_MISSING = re.compile(r"missing required field `(\w+)`")

_MESSAGES = {
    "tenant_concurrency": "Too many of your requests are open at once.",
    "tenant_rate": "Your token rate is used up for the moment.",
    "saturated": "The fleet is saturated and this class of work is refused rather than queued.",
    "queue_full": "Too many requests of this class are waiting.",
    "gateway_full": "This gateway has too many open requests.",
    "patience": "No capacity became free in time.",
    "residency_no_capacity": "No capacity became free in time within your permitted zones.",
    "no_capacity": "There is no capacity for this model now.",
    "model_not_ready": "This model version is not ready anywhere now.",
    "unavailable": "The service cannot take requests at this moment.",
    "residency": "Your data may not be processed through this endpoint.",
    "not_permitted": "Your key is not permitted to do this.",
    "upstream_busy": "The engine was too busy to take the request.",
    "upstream_disconnected": "The engine's answer was cut off.",
    "upstream_error": "The engine reported an error.",
    "upstream_protocol": "The engine's answer could not be understood.",
    "upstream_unreachable": "The engine could not be reached.",
    "first_token_timeout": "The engine did not begin its answer in time.",
    "token_timeout": "The engine stopped in the middle of its answer.",
    "instance_gone": "The engine went away.",
    "gateway_stopping": "The gateway is stopping.",
}


class GatewayError(RuntimeError):
    """Base of the gateway's errors."""


class ApiError(GatewayError):
    """An answer that is an error: status, machine-readable code, and a message that holds no client data."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After`, whole seconds and at least 1, on 429, 503 and a 409 that ends by itself; `Allow` on 405."""
        if self.status in (429, 503) or (self.status == 409 and self.retry_after_s):
            return {"Retry-After": str(max(1, round(self.retry_after_s or 1)))}
        return {"Allow": self.allow} if self.allow else {}

    def body(self) -> bytes:
        """The OpenAI error object."""
        return error_body(self.status, self.code, self.message, self.param)


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode({"error": {"message": message, "type": _type_of(status), "param": param, "code": code}})


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 403:
        return "permission_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def refusal(reason: str, status: int = 0, retry_after_s: float | None = None) -> ApiError:
    """A refusal by one of `REASONS`, or a failure of engines, as an error."""
    return ApiError(
        status or REASONS.get(reason, 503),
        reason,
        _MESSAGES.get(reason, "The request was refused."),
        retry_after_s=retry_after_s,
    )


def midstream_event(reason: str) -> bytes:
    """The one SSE event that ends an answer which cannot be completed. No `[DONE]` follows it."""
    return b"data: " + error_body(502, reason, _MESSAGES.get(reason, "The answer cannot be completed.")) + b"\n\n"


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, code, message, param=param)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[Any]


_chat = msgspec.json.Decoder(_ChatBody)
_completion = msgspec.json.Decoder(_CompletionBody)
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode
_utf8 = codecs.getincrementaldecoder("utf-8")
_PIECE_BYTES = 1 << 18

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Parsed(msgspec.Struct, kw_only=True):
    """A well-formed request. The text is dropped once it has been counted; `rest` is what an engine will get.

    `rest` are views of the client's own bytes: a long prompt exists once while its request waits.
    """

    endpoint: Endpoint
    model_asked: str
    stream: bool
    #: the client wants the usage chunk of a stream
    include_usage: bool
    #: answers that the engine will give: `n`, times prompts
    choices: int
    output_budget_tokens: int | None
    #: declared by the client, not yet checked against what its key may
    service_class: str
    task: str
    deadline_ms: float | None
    #: a whole answer may be put together from a stream
    assembled: bool
    messages: list[dict[str, Any]] = []
    prompt: str | list[Any] = ""
    #: what a chat template may look at beside the messages
    template_values: dict[str, Any] = {}
    #: the client's `stream_options`
    stream_options: dict[str, Any] = {}
    #: the top-level fields for the engine, without ours: the inside of a JSON object, in pieces
    rest: list[bytes | memoryview] = []
    body_bytes: int = 0


def parse(body: bytes | bytearray, endpoint: Endpoint) -> Parsed:
    """Read a body; raises `ApiError` (400) naming the field."""
    _check_utf8(body)
    found: _ChatBody | _CompletionBody
    try:
        found = _chat.decode(body) if endpoint == "chat" else _completion.decode(body)
        raw = _raw.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        missing = _MISSING.search(text)
        at = _AT.search(text)
        param = missing.group(1) if missing else (at.group(1) or None) if at else None
        code = "missing_required_parameter" if missing else "invalid_type"
        raise bad_request(code, f"Invalid request: {text}", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request("invalid_json", f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise bad_request("invalid_json", "The request body is nested too deeply.") from None

    choices = _positive(found.n, "n") or 1
    budget = _positive(found.max_tokens, "max_tokens", least=0)
    messages: list[dict[str, Any]] = []
    prompt: str | list[Any] = ""
    template_values: dict[str, Any] = {}
    if isinstance(found, _ChatBody):
        newer = _positive(found.max_completion_tokens, "max_completion_tokens", least=0)
        budget = budget if newer is None else newer
        messages = found.messages
        _check_messages(messages)
        template_values = {"tools": found.tools, **(found.chat_template_kwargs or {})}
    else:
        prompt = found.prompt
        choices *= _check_prompt(prompt)
    if found.stream is not True and found.stream_options is not None:
        raise bad_request("invalid_value", "'stream_options' is only allowed with 'stream'.", "stream_options")
    service_class, task, deadline_ms = _declared(found.metadata)
    return Parsed(
        endpoint=endpoint,
        model_asked=found.model,
        stream=found.stream is True,
        include_usage=found.stream_options is not None and found.stream_options.include_usage is True,
        choices=choices,
        output_budget_tokens=None if budget is None else budget * choices,
        service_class=service_class,
        task=task,
        deadline_ms=deadline_ms,
        assembled=choices == 1 and all(name in ASSEMBLED or bytes(raw[name]) == b"null" for name in raw),
        messages=messages,
        prompt=prompt,
        template_values=template_values,
        stream_options=msgspec.json.decode(raw["stream_options"]) or {} if "stream_options" in raw else {},
        rest=_rest(raw, found.metadata),
        body_bytes=len(body),
    )


def _check_utf8(body: bytes | bytearray) -> None:
    """The JSON decoder does not look into fields that it skips. Piece by piece, so that no copy is made."""
    decoder = _utf8()
    try:
        with memoryview(body) as view:
            for at in range(0, len(view), _PIECE_BYTES):
                decoder.decode(view[at : at + _PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise bad_request("invalid_utf8", "The request body is not valid UTF-8.") from None


def _positive(value: int | None, name: str, *, least: int = 1) -> int | None:
    if value is not None and value < least:
        raise bad_request("invalid_value", f"'{name}' must be at least {least}.", name)
    if value is not None and value > 1_000_000_000:
        raise bad_request("invalid_value", f"'{name}' is too large.", name)
    return value


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise bad_request("empty_array", "'messages' must hold at least one message.", "messages")
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message.get("role"), str):
            raise bad_request("invalid_type", f"'{where}.role' must be a string.", f"{where}.role")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise bad_request("invalid_type", f"'{where}.content' must be a string or a list.", f"{where}.content")
        for part in content:
            good = isinstance(part, dict) and isinstance(part.get("type"), str)
            if not good or (part["type"] == "text" and not isinstance(part.get("text"), str)):
                raise bad_request("invalid_type", f"'{where}.content' has an unusable part.", f"{where}.content")


def _check_prompt(prompt: str | list[Any]) -> int:
    """How many prompts it is."""
    if isinstance(prompt, str):
        return 1
    if not prompt:
        raise bad_request("empty_array", "'prompt' must not be empty.", "prompt")
    if all(type(item) is int and item >= 0 for item in prompt):
        return 1
    lists = all(isinstance(item, list) and item and all(type(n) is int and n >= 0 for n in item) for item in prompt)
    if lists or all(isinstance(item, str) for item in prompt):
        return len(prompt)
    raise bad_request("invalid_type", "'prompt' must be a string, or a list of strings or tokens.", "prompt")


def _declared(metadata: dict[str, Any] | None) -> tuple[str, str, float | None]:
    """Class, task and deadline as declared in `metadata`."""
    if not metadata:
        return "", "", None
    service_class, task = metadata.get("class", ""), metadata.get("task", "")
    if not isinstance(service_class, str):
        raise bad_request("invalid_type", "'metadata.class' must be a string.", "metadata.class")
    if not isinstance(task, str) or (task and not _TASK.match(task)):
        raise bad_request("invalid_value", "'metadata.task' must be a short word.", "metadata.task")
    stated = metadata.get("deadline_ms")
    if stated is None:
        return service_class, task, None
    try:
        deadline_ms = float(stated) if isinstance(stated, str | int | float) else -1.0
    except ValueError:
        deadline_ms = -1.0
    if isinstance(stated, bool) or not 0 < deadline_ms < 1e12:
        raise bad_request(
            "invalid_value", "'metadata.deadline_ms' must be a positive number of milliseconds.", "metadata.deadline_ms"
        )
    return service_class, task, deadline_ms


def _rest(raw: dict[str, msgspec.Raw], metadata: dict[str, Any] | None) -> list[bytes | memoryview]:
    """Every field for the engine but `model`, `stream` and `stream_options`, each followed by a comma."""
    parts: list[bytes | memoryview] = []
    for name, value in raw.items():
        if name in STRIPPED or name in ("model", "stream", "stream_options"):
            continue
        if name == "metadata":
            left = {key: what for key, what in (metadata or {}).items() if key not in OURS}
            if left:
                parts += [b'"metadata":', _encode(left), b","]
            continue
        parts += [_encode(name), b":", memoryview(value), b","]
    return parts


#: engines that count along with every event of a stream (`stream_options.continuous_usage_stats`)
COUNTING = frozenset({"vllm"})


def engine_body(
    parsed: Parsed, *, model: str, stream: bool, cache_salt: str, priority: int | None, engine: str = ""
) -> bytes:
    """What the engine gets: the client's fields, and ours over them.

    An engine under load puts several tokens into one event, so that a stream that breaks off says by its events only
    how much was sent at least; one that can is asked to say how much it is. With several answers it counts each alone.
    """
    ours: dict[str, Any] = {"model": model, "stream": stream}
    if stream:
        ours["stream_options"] = {**parsed.stream_options, "include_usage": True}
        if engine in COUNTING and parsed.choices == 1:
            ours["stream_options"]["continuous_usage_stats"] = True
    if cache_salt:
        ours["cache_salt"] = cache_salt
    if priority is not None:
        ours["priority"] = priority
    return b"".join((b"{", *parsed.rest, memoryview(_encode(ours))[1:]))


class _EngineError(msgspec.Struct):
    message: Any = None
    type: Any = None
    param: Any = None


class _EngineErrorBody(msgspec.Struct):
    error: _EngineError | str | None = None
    #: SGLang's are flat
    message: Any = None
    param: Any = None


def rejection(status: int, body: bytes) -> ApiError:
    """An engine's word that the request itself is wrong, as our error: its message and param are passed on."""
    message: Any = None
    param: Any = None
    try:
        found = msgspec.json.decode(body, type=_EngineErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = _EngineErrorBody()
    if isinstance(found.error, _EngineError):
        message, param = found.error.message, found.error.param
    else:
        message, param = found.error or found.message, found.param
    text = message if isinstance(message, str) and message else "The engine rejected the request."
    # SGLang appends a trace with paths of its host
    text = text.partition("\n\n  File ")[0]
    code = "context_length_exceeded" if "maximum context length" in text else "rejected_by_engine"
    return ApiError(status, code, text[:2000], param=param if isinstance(param, str) else None)
