"""The digest chain: what two prompts share must be the same number everywhere, and nobody else's business."""

import time
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet import prefix
from tokenfleet_schemas import codec
from tokenfleet_schemas.placement import PlacementRequested
from tokenfleet_schemas.request import Ask

KEY = prefix.tenant_key("s3cret", "acme")


def shared(one: bytes, other: bytes) -> int:
    """Tokens that two chains have in common."""
    pairs = zip(prefix.unpack(prefix.pack(one)[0]), prefix.unpack(prefix.pack(other)[0]), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count * prefix.CHUNK_TOKENS


@given(st.lists(st.integers(0, 2**32 - 1), max_size=400), st.integers(0, 5))
def test_a_chain_grown_in_pieces_is_the_chain_grown_at_once(tokens: list[int], cut: int) -> None:
    """An agent that re-chunked blocks as they came got other digests than the gateway: predicted hits were always 0."""
    at = min(cut * prefix.CHUNK_TOKENS, len(tokens) // prefix.CHUNK_TOKENS * prefix.CHUNK_TOKENS)
    whole = prefix.digests(tokens, KEY)
    first = prefix.extend(prefix.ROOT, tokens[:at], KEY)
    rest = prefix.extend(first[-8:] if first else prefix.ROOT, tokens[at:], KEY)
    assert first + rest == whole
    assert len(whole) == len(tokens) // 64 * 8


def test_bytes_lists_and_arrays_of_the_same_ids_agree() -> None:
    """A byte tokenizer's fast path must not be another tokenizer."""
    data = bytes(range(256)) * 3
    expected = prefix.digests(list(data), KEY)
    assert len(expected) == 12 * 8
    assert prefix.digests(data, KEY) == expected
    assert prefix.digests(bytearray(data), KEY) == expected
    assert prefix.digests(memoryview(data), KEY) == expected
    assert prefix.digests(array("I", list(data)), KEY) == expected
    assert prefix.digests(array("Q", list(data)), KEY) == expected


def test_the_digests_are_the_contract() -> None:
    """Gateways and agents of two releases must agree, so the values themselves are fixed here."""
    assert prefix.digests(bytes(64), b"k").hex() == "8b1c772659b539ef"


def test_prompts_share_exactly_their_common_chunks() -> None:
    """One differing token ends the match at its chunk and stays ended: each digest covers its parent."""
    common = list(range(640))
    one = prefix.digests([*common, *([1] * 640)], KEY)
    other = prefix.digests([*common, *([2] * 64), *([1] * 576)], KEY)
    assert shared(one, other) == 640
    changed = prefix.digests([9, *common[1:]], KEY)
    assert shared(one, changed) == 0


def test_tenants_do_not_match_unless_both_share() -> None:
    """Keys without the salt let one tenant probe what another had asked."""
    prompt = b"x" * 4096
    assert shared(prefix.digests(prompt, KEY), prefix.digests(prompt, prefix.tenant_key("s3cret", "other"))) == 0
    common = prefix.tenant_key("s3cret", "acme", share=True)
    assert common == prefix.tenant_key("s3cret", "other", share=True)
    assert common != KEY
    assert prefix.tenant_key("s3cret", "acme", adapter="l") != KEY
    assert prefix.tenant_key("another", "acme") != KEY
    assert prefix.cache_salt("s3cret", "acme") != prefix.cache_salt("s3cret", "other")
    assert prefix.cache_salt("s3cret", "acme", share=True) == prefix.cache_salt("s3cret", "other", share=True)
    assert prefix.cache_salt("s3cret", "acme").encode() not in KEY


def test_no_secret_is_an_error_not_a_guessable_salt() -> None:
    """An empty default secret once made every fleet's salts the same."""
    with pytest.raises(prefix.PrefixError, match="no secret"):
        prefix.tenant_key("", "acme")
    with pytest.raises(prefix.PrefixError, match="no secret"):
        prefix.cache_salt("", "acme")
    with pytest.raises(prefix.PrefixError, match="no tenant"):
        prefix.tenant_key("s3cret", "")


@pytest.mark.parametrize("tokens", [[-1] * 64, [2**32] * 64, ["a"] * 64, [1.5] * 64])
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    """A silently truncated id would match another prompt."""
    with pytest.raises(prefix.PrefixError):
        prefix.digests(tokens, KEY)


@pytest.mark.parametrize("packed", ["!!", "AAA", "QUJD", "é"])
def test_a_broken_chain_is_a_typed_error(packed: str) -> None:
    """A foreign publisher's garbage must be nameable, not an exception from base64."""
    with pytest.raises(prefix.PrefixError):
        prefix.unpack(packed)


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_a_packed_chain_keeps_comparable_positions(count: int, limit: int) -> None:
    """Sampling must keep the digests that stand for `n * stride * 64` tokens, or long prompts never match."""
    chain = b"".join(n.to_bytes(8, "big") for n in range(1, count + 1))
    packed, stride = prefix.pack(chain, limit)
    found = [int.from_bytes(d, "big") for d in prefix.unpack(packed)]
    assert len(found) <= limit
    assert stride & (stride - 1) == 0
    assert found == list(range(stride, count + 1, stride))
    if stride > 1:
        assert count // (stride // 2) > limit, "the stride is the smallest that fits"


def test_a_million_tokens_fit_a_message_and_a_moment() -> None:
    """A prompt of a million tokens made a message that the bus refused; the digest alone was 167 kB."""
    began = time.perf_counter()
    chain = prefix.digests(b"x" * 1_000_000, KEY)
    packed, stride = prefix.pack(chain)
    took_s = time.perf_counter() - began
    assert stride == 8
    ask = Ask(
        request_id="r" * 36,
        gateway="gateway-site-a-0",
        gateway_incarnation="i" * 36,
        entry="site-a",
        entry_zone="zone-a",
        tenant="tenant",
        service_class="document",
        model_asked="some/model",
        model="some/model",
        version="2026-01-01",
        input_tokens=1_000_000,
        prefix=packed,
        prefix_stride=stride,
        received_unix_ms=1_800_000_000_000,
        patience_ms=60_000,
    )
    assert len(codec.encode(PlacementRequested(id="x" * 60, site="site-b", ask=ask))) <= 24_000
    assert msgspec.json.decode(codec.encode(PlacementRequested(id="x", ask=ask)))["ask"]["prefix_stride"] == 8
    assert took_s < 1.0
