"""Prompts counted and digested: the model's own template and tokenizer, and what happens where they say no."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.simulation.harness import small_fleet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tokenfleet import chatml, prefix
from tokenfleet.fleet import Fleet
from tokenfleet.gateway.openai import ApiError, Parsed, parse
from tokenfleet.gateway.tokenization import Tokenization, TokenizationError, _environment
from tokenfleet_schemas.request import Ask

KEY = prefix.tenant_key("secret", "acme")
ASK = Ask(
    request_id="r",
    gateway="g",
    gateway_incarnation="i",
    entry="a",
    entry_zone="eu",
    tenant="acme",
    service_class="chat",
    model_asked="m",
    model="m",
    version="1",
    input_tokens=0,
    received_unix_ms=0,
    patience_ms=1000,
)


def fleet(**changes: Any) -> Fleet:
    base = small_fleet()
    return msgspec.structs.replace(base, models={"m": msgspec.structs.replace(base.models["m"], **changes)})


async def nobody(_ask: Ask, _what: dict[str, Any]) -> list[int] | None:
    return None


def tokenization(directory: Path, **changes: Any) -> Tokenization:
    return Tokenization(fleet(**changes), "secret", directory=directory, ask_engine=nobody)


def chat(*messages: Any, **more: Any) -> Parsed:
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return parse(msgspec.json.encode({"model": "m", "messages": said, **more}), "chat")


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "ä"},
            {"type": "image_url", "image_url": {}},
            {"type": "text", "text": "b"},
        ],
    },
    {"role": "assistant", "content": None},
    {"role": "user", "content": "<|im_end|> {{ 7 * 7 }}"},
]


def test_both_renderings_of_chatml_agree() -> None:
    """The fast one and jinja's: another prompt here than in the engine would make every digest wrong."""
    template = _environment().from_string(chatml.JINJA)
    assert template.render(messages=MESSAGES) == chatml.render(MESSAGES)


@pytest.mark.parametrize("repeat", [1, 20_000])
async def test_bytes_as_tokens(tmp_path: Path, repeat: int) -> None:
    """Short on the loop, long in a thread: one token per byte, ByT5's ids in the digest."""
    parsed = chat("ä€" * repeat)
    prompt = chatml.render(parsed.messages).encode()
    counted = await tokenization(tmp_path).count(parsed, ASK, share=False)
    assert (counted.input_tokens, counted.source) == (len(prompt), "tokenizer")
    assert (counted.digest, counted.stride) == prefix.pack(prefix.digests([b + 3 for b in prompt], KEY))


def test_a_lone_surrogate_is_a_400() -> None:
    """JSON can spell what UTF-8 cannot, and no tokenizer takes it."""
    with pytest.raises(ApiError) as bad:
        parse(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800 x"}]}', "chat")
    assert bad.value.status == 400


async def test_under_an_adapter_a_prompt_is_another_content(tmp_path: Path) -> None:
    """KV computed under an adapter is other KV: sent after its model's cache, every hit foreseen would fail to come."""
    counter = tokenization(tmp_path)
    under = msgspec.structs.replace(ASK, adapter="legal")
    base, adapter = [(await counter.count(chat("x" * 200), ask, share=False)).digest for ask in (ASK, under)]
    assert base != adapter


async def test_tenants_share_digests_only_when_they_say_so(tmp_path: Path) -> None:
    """Equal prompts of two tenants must not look equal."""
    counter = tokenization(tmp_path)
    other = msgspec.structs.replace(ASK, tenant="other")
    said = "x" * 200
    mine, theirs = [(await counter.count(chat(said), ask, share=False)).digest for ask in (ASK, other)]
    assert mine != theirs
    mine, theirs = [(await counter.count(chat(said), ask, share=True)).digest for ask in (ASK, other)]
    assert mine == theirs


async def test_a_models_own_files(tmp_path: Path) -> None:
    """tokenizer.json and a jinja template beside the fleet file, special tokens from tokenizer_config.json."""
    words = {"[UNK]": 0, "<s>": 1, "user": 2, "hello": 3, ":": 4, "tool": 5}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": null}')
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if tools %} tool{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    counter = tokenization(tmp_path, tokenizer="tokenizer.json", chat_template="chat.jinja")
    assert (await counter.count(chat("hello " * 70), ASK, share=False)).input_tokens == 3 + 70
    counted = await counter.count(chat("hello", tools=[{}]), ASK, share=False)
    assert counted.input_tokens == 5
    text = parse(b'{"model": "m", "prompt": ["hello", "hello hello"]}', "completions")
    assert (await counter.count(text, ASK, share=False)).input_tokens == 3


async def test_token_ids_as_prompt_are_taken_as_they_are(tmp_path: Path) -> None:
    """/v1/completions with ids: counted and digested without any tokenizer; impossible ids are a 400."""
    counter = tokenization(tmp_path)
    ids = list(range(130))

    def asked(prompt: list[int]) -> Parsed:
        return parse(msgspec.json.encode({"model": "m", "prompt": prompt}), "completions")

    counted = await counter.count(asked(ids), ASK, share=False)
    assert (counted.input_tokens, counted.digest) == (130, prefix.pack(prefix.digests(ids, KEY))[0])
    huge = asked([2**40] * 70)
    with pytest.raises(ApiError) as bad:
        await counter.count(huge, ASK, share=False)
    assert (bad.value.status, bad.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x.y }}", "do not fit"),
        ("{{ ''.__class__.__mro__ }}", "do not fit"),
        ("{{ messages.append(1) }}", "do not fit"),
    ],
)
async def test_a_template_that_refuses_is_a_400_and_one_that_reaches_out_is_stopped(
    tmp_path: Path, template: str, said: str
) -> None:
    """Templates come with models from strangers: sandboxed, and their words reach the client only if meant to."""
    (tmp_path / "t.jinja").write_text(template)
    counter = tokenization(tmp_path, chat_template="t.jinja")
    with pytest.raises(ApiError, match=said) as bad:
        await counter.count(chat("x"), ASK, share=False)
    assert (bad.value.status, bad.value.param) == (400, "messages")


@pytest.mark.parametrize("changes", [{"tokenizer": "missing.json"}, {"chat_template": "missing.jinja"}])
def test_a_missing_file_is_said_at_the_start(tmp_path: Path, changes: dict[str, str]) -> None:
    """Not with the first request."""
    with pytest.raises(TokenizationError, match="missing"):
        tokenization(tmp_path, **changes)


async def test_a_bad_reload_changes_nothing(tmp_path: Path) -> None:
    """The old tokenizers stay in force."""
    counter = tokenization(tmp_path)
    with pytest.raises(TokenizationError):
        counter.reconfigure(fleet(tokenizer="missing.json"))
    assert (await counter.count(chat("x"), ASK, share=False)).source == "tokenizer"


async def test_bytes_per_token_are_learned_from_usage(tmp_path: Path) -> None:
    """The last resort: no tokenizer, no engine that answers; no digest is better than a wrong one."""
    counter = tokenization(tmp_path, tokenizer="engine")
    parsed = chat("x" * 1000)
    first = await counter.count(parsed, ASK, share=False)
    assert (first.source, first.digest, first.input_tokens) == ("estimate", "", round(parsed.body_bytes / 4))
    for _ in range(3):
        counter.learn("m", 3000, 1000)
    again = await counter.count(chat("x" * 1000), ASK, share=False)
    assert again.input_tokens == round(parsed.body_bytes / 3)


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.json"])
async def test_a_prompt_beyond_the_models_context_is_refused_before_it_is_hashed(tmp_path: Path, kind: str) -> None:
    """400 with the count; a byte model's megabytes are not even rendered."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter = tokenization(tmp_path, tokenizer=kind, max_model_len=100)
    assert (await counter.count(chat("x " * 10), ASK, share=False)).input_tokens <= 100
    parsed = chat("x " * 200)
    with pytest.raises(ApiError, match="at least") as long:
        await counter.count(parsed, ASK, share=False)
    assert (long.value.status, long.value.code) == (400, "context_length_exceeded")


async def test_a_chain_made_in_pieces_is_the_chain(tmp_path: Path) -> None:
    """Long prompts are digested piece by piece, so that they are not held four times."""
    parsed = chat("abc" * 50_000)
    prompt = chatml.render(parsed.messages).encode()
    counted = await tokenization(tmp_path, max_model_len=10**6).count(parsed, ASK, share=False)
    assert (counted.digest, counted.stride) == prefix.pack(prefix.digests([b + 3 for b in prompt], KEY))
    assert (parsed.messages, parsed.prompt) == ([], ""), "the words are gone"
