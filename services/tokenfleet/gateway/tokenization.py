"""How many tokens a prompt has, and its prefix digest.

Decides by which means a prompt is counted: the model's chat template and tokenizer as the fleet file names them, the
engine's own `/tokenize` where it names none, bytes per token as learned from the engines' usage as the last resort (no
digest then). Text and token ids never leave this module: what travels is a number and a keyed digest.

Refuses to know clients and instances: how an engine is asked is given to it. Long prompts are counted in a thread.
"""

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tokenfleet import chatml, prefix
from tokenfleet.fleet import Fleet
from tokenfleet.gateway.openai import GatewayError, Parsed, bad_request
from tokenfleet_schemas.request import Ask

#: ByT5's ids: a byte plus three special tokens (Xue et al. 2022, section 3). UTF-8 has no byte above 0xf4, so an id
#: fits in a byte again.
_BYT5 = bytes((byte + 3) & 0xFF for byte in range(256))
#: prompts longer than this are counted in a thread, bytes of body
_INLINE_BYTES = {"bytes": 65_536, "file": 4_096}
#: tokens that are digested at once: they are made wide for it. A whole number of chunks
_DIGEST_TOKENS = 1024 * prefix.CHUNK_TOKENS
#: bytes of body per token until an engine's usage says better
_BYTES_PER_TOKEN = 4.0
#: weight of one more observation
_LEARNING = 0.05

Source = Literal["tokenizer", "engine", "estimate"]
#: asks an engine for a prompt's token ids; None: nobody answered
AskEngine = Callable[[Ask, dict[str, Any]], Awaitable[list[int] | None]]


class TokenizationError(GatewayError):
    """A model's template or tokenizer file cannot be used."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a prompt."""

    input_tokens: int
    source: Source
    #: packed digests, and how many chunks one of them covers (`tokenfleet.prefix`)
    digest: str = ""
    stride: int = 1


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    """How one model's prompts are made and counted."""

    kind: Literal["bytes", "file", "engine"]
    #: None: ChatML
    template: jinja2.Template | None = None
    tokenizer: Tokenizer | None = None
    special: dict[str, str] = {}


class Tokenization:
    """Counts prompts for every model of a fleet. Raises `TokenizationError` where a file of it cannot be used."""

    def __init__(self, fleet: Fleet, secret: str, *, directory: Path, ask_engine: AskEngine) -> None:
        self._secret = secret
        self._directory = directory
        self._ask_engine = ask_engine
        self._bytes_per_token: dict[str, float] = {}
        self._keys: dict[tuple[str, bool, str], bytes] = {}
        self._models: dict[str, _Model] = {}
        self._fleet = fleet
        self.reconfigure(fleet)

    def reconfigure(self, fleet: Fleet) -> None:
        """Another fleet holds; nothing changes where this raises."""
        models: dict[str, _Model] = {}
        for name, declared in fleet.models.items():
            known = self._fleet.models.get(name)
            same = known is not None and (known.tokenizer, known.chat_template) == (
                declared.tokenizer,
                declared.chat_template,
            )
            if same and name in self._models:
                models[name] = self._models[name]
            else:
                models[name] = _load(self._directory, declared.tokenizer, declared.chat_template)
        self._models, self._fleet = models, fleet

    def learn(self, model: str, body_bytes: int, input_tokens: int) -> None:
        """An engine counted a prompt whose body had so many bytes."""
        if input_tokens > 0 and body_bytes > 0:
            seen = body_bytes / input_tokens
            known = self._bytes_per_token.get(model)
            self._bytes_per_token[model] = seen if known is None else known + _LEARNING * (seen - known)

    async def count(self, parsed: Parsed, ask: Ask, *, share: bool) -> Counted:
        """Tokens and digest of a request for `ask.model` by `ask.tenant`.

        Raises `ApiError` (400) where the model's template refuses the messages, or the prompt is longer than the
        model's context; an estimate is not held against a client, the engine knows better. Takes the words out of
        `parsed`: once counted, nobody needs them.
        """
        model = self._models[ask.model]
        limit = self._fleet.models[ask.model].max_model_len
        if model.kind == "bytes":
            # megabytes of prompt are refused before they are copied, rendered and hashed
            _within(limit, _least_bytes(parsed), parsed)
        counted = await self._count(model, parsed, ask, self._key(ask.tenant, share, ask.adapter), limit)
        parsed.messages, parsed.prompt, parsed.template_values = [], "", {}
        if counted.source != "estimate":
            _within(limit, counted.input_tokens, parsed)
        return counted

    async def _count(self, model: _Model, parsed: Parsed, ask: Ask, key: bytes, limit: int) -> Counted:
        if model.kind == "engine":
            tokens = await self._by_engine(parsed, ask)
            if tokens is None:
                return Counted(input_tokens=self._estimate(parsed, ask.model), source="estimate")
            return await asyncio.to_thread(_told, tokens, len(tokens), key, "engine", limit)
        if parsed.body_bytes <= _INLINE_BYTES[model.kind]:
            return _count(model, parsed, key, limit)
        return await asyncio.to_thread(_count, model, parsed, key, limit)

    def _key(self, tenant: str, share: bool, adapter: str) -> bytes:
        found = self._keys.get((tenant, share, adapter))
        if found is None:
            found = self._keys[tenant, share, adapter] = prefix.tenant_key(self._secret, tenant, share, adapter)
        return found

    def _estimate(self, parsed: Parsed, model: str) -> int:
        return max(1, round(parsed.body_bytes / self._bytes_per_token.get(model, _BYTES_PER_TOKEN)))

    async def _by_engine(self, parsed: Parsed, ask: Ask) -> list[int] | None:
        if parsed.endpoint == "chat":
            return await self._ask_engine(ask, {"messages": parsed.messages, "tools": parsed.template_values["tools"]})
        tokens: list[int] = []
        for prompt in _prompts(parsed.prompt):
            found = await self._ask_engine(ask, {"prompt": prompt}) if isinstance(prompt, str) else prompt
            if found is None:
                return None
            tokens += found
        return tokens


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or several, text or token ids, as a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else prompt


def _within(limit: int, tokens: int, parsed: Parsed) -> None:
    if tokens > limit:
        raise bad_request(
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens, but the prompt has at least {tokens}.",
            "messages" if parsed.endpoint == "chat" else "prompt",
        )


def _least_bytes(parsed: Parsed) -> int:
    """A lower bound of the prompt's bytes, without making it."""
    if parsed.endpoint == "chat":
        contents = (message.get("content") for message in parsed.messages)
        return sum(len(content) for content in contents if isinstance(content, str))
    return sum(map(len, _prompts(parsed.prompt)))


def _count(model: _Model, parsed: Parsed, key: bytes, limit: int) -> Counted:
    if parsed.endpoint == "chat":
        text = _render(model, parsed)
        parsed.messages = []  # a long prompt is in memory often enough without them
        if model.tokenizer is None:
            tokens: bytes | list[int] = text.encode("utf-8", "replace").translate(_BYT5)
        else:
            # the template has written the special tokens already
            tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
        return _told(tokens, len(tokens), key, "tokenizer", limit)
    first: bytes | list[int] = b""
    total = 0
    for at, prompt in enumerate(_prompts(parsed.prompt)):
        if not isinstance(prompt, str):
            tokens = prompt
        elif model.tokenizer is None:
            tokens = prompt.encode("utf-8", "replace").translate(_BYT5)
        else:
            tokens = model.tokenizer.encode(prompt).ids
        total += len(tokens)
        first = tokens if at == 0 else first
    return _told(first, total, key, "tokenizer", limit)


def _told(tokens: bytes | list[int], total: int, key: bytes, source: Source, limit: int) -> Counted:
    if total > limit:
        return Counted(input_tokens=total, source=source)  # will be refused: nobody needs its digest
    try:
        chain, parent = bytearray(), prefix.ROOT
        for at in range(0, len(tokens), _DIGEST_TOKENS):
            more = prefix.extend(parent, tokens[at : at + _DIGEST_TOKENS], key)
            parent = more[-prefix.DIGEST_BYTES :] or parent
            chain += more
        packed, stride = prefix.pack(bytes(chain))
    except prefix.PrefixError:
        raise bad_request("invalid_value", "'prompt' has impossible token ids.", "prompt") from None
    return Counted(input_tokens=total, source=source, digest=packed, stride=stride)


def _render(model: _Model, parsed: Parsed) -> str:
    if model.template is None:
        return chatml.render(parsed.messages)
    try:
        return model.template.render(
            messages=parsed.messages, add_generation_prompt=True, **model.special, **parsed.template_values
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        # `raise_exception` in a template is how models refuse an order of roles: its words are the template's own
        said = str(error) if isinstance(error, _Refused) else "the messages do not fit the model's chat template"
        raise bad_request("invalid_messages", f"Invalid 'messages': {said}", "messages") from None


class _Refused(jinja2.TemplateError):
    """A template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face's templates expect it (transformers, `chat_template_utils`)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = lambda value, **_options: msgspec.json.encode(value).decode()
    return environment


def _load(directory: Path, tokenizer: str, template: str) -> _Model:
    found: jinja2.Template | None = None
    special: dict[str, str] = {}
    if template != "chatml":
        path = directory / template
        try:
            found = _environment().from_string(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            raise TokenizationError(f"chat template {path}: {error}") from None
    if tokenizer == "bytes":
        return _Model(kind="bytes", template=found)
    if tokenizer == "engine":
        return _Model(kind="engine", template=found)
    path = directory / tokenizer
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything
        raise TokenizationError(f"tokenizer {path}: {error}") from None
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        special = _special_tokens(config)
    return _Model(kind="file", template=found, tokenizer=loaded, special=special)


def _special_tokens(path: Path) -> dict[str, str]:
    """`bos_token` and `eos_token` as templates use them: a string, or an object with `content`."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise TokenizationError(f"{path}: {error}") from None
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special
