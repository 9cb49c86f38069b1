"""Block names: equal exactly where the whole prefix, salt included, is equal; and cheap."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.engine_model import block_hashes


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(1, 32))
def test_hashes_agree_exactly_on_the_common_prefix(one: bytes, other: bytes, block: int) -> None:
    """A block after a difference differs too, even with equal content: its KV depends on all before it."""
    chains = block_hashes(one, block), block_hashes(other, block)
    assert len(chains[0]) == len(one) // block
    common = 0
    while common < min(map(len, chains)) and one[: (common + 1) * block] == other[: (common + 1) * block]:
        common += 1
    assert chains[0][:common] == chains[1][:common]
    assert not set(chains[0][common:]) & set(chains[1][common:])


def test_two_salts_share_nothing() -> None:
    """Tenants are told apart by `cache_salt`; a shared block would leak by its timing."""
    text = b"the same system prompt " * 20
    assert not set(block_hashes(text, 16, b"a")) & set(block_hashes(text, 16, b"b"))
    assert block_hashes(text, 16, b"a") == block_hashes(text, 16, b"a")
    with pytest.raises(ValueError, match="positive"):
        block_hashes(text, 0)


def test_a_30k_prompt_is_hashed_in_two_milliseconds() -> None:
    """The emulator hashes on its event loop: slower would show as latency of every other stream."""
    text = bytes(i & 0xFF for i in range(30_000))
    best = min(_timed(text) for _ in range(5))
    assert best < 0.002


def _timed(text: bytes) -> float:
    start = time.perf_counter()
    assert len(block_hashes(text, 16)) == 1875
    return time.perf_counter() - start
