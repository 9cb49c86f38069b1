"""Prompts: exactly as long as the trace says, and sharing exactly what its block ids say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet import chatml
from tokenfleet.replay.prompts import PromptMaker
from tokenfleet.replay.traces import Row


def prompt(maker: PromptMaker, index: int, tokens: int, *blocks: int) -> bytes:
    """The rendered prompt: one token a byte, as the emulated models count."""
    row = Row(t_s=0, input_tokens=tokens, output_tokens=1, blocks=blocks)
    return chatml.render(maker.messages(index, row)).encode()


def shared(one: bytes, other: bytes) -> int:
    """How many tokens two prompts have in common from their start."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 6000), with_blocks=st.integers(0, 12), partial=st.booleans())
def test_a_prompt_has_exactly_the_tokens_of_its_row(tokens: int, with_blocks: int, partial: bool) -> None:
    """Input lengths decide the load; a template that adds its own tokens on top would falsify every trace."""
    most = -(-tokens // 512) if partial else tokens // 512
    maker = PromptMaker(1)
    made = prompt(maker, 0, tokens, *range(min(with_blocks, most)))
    assert len(made) == max(tokens, maker.minimum_tokens)
    assert made.isascii()


def test_equal_blocks_share_tokens_and_no_block_more() -> None:
    """Prefix hits of a replay are the trace's, to the 16-token block of an engine."""
    maker = PromptMaker(1)
    one, other = prompt(maker, 0, 2000, 0, 1, 2), prompt(maker, 1, 1800, 0, 1, 9)
    assert 1024 <= shared(one, other) < 1024 + 16
    assert shared(prompt(maker, 0, 2000, 0, 1, 2), prompt(maker, 7, 1700, 0, 1, 2)) >= 1536


def test_rows_without_blocks_share_nothing_but_the_template() -> None:
    """A trace without block ids has no prefix reuse to offer: an accidental one would flatter every policy."""
    maker = PromptMaker(1)
    head = len("<|im_start|>user\n")
    assert head <= shared(prompt(maker, 0, 900), prompt(maker, 1, 900)) < head + 16


def test_what_blocks_do_not_cover_is_the_rows_own() -> None:
    """Traces name only full blocks: two rows with the same blocks still end in different questions."""
    maker = PromptMaker(1)
    assert 512 <= shared(prompt(maker, 0, 800, 5), prompt(maker, 1, 800, 5)) < 512 + 16


def test_the_same_seed_makes_the_same_prompts_whatever_was_made_before() -> None:
    """The driver deals rows out to processes and forgets old blocks: neither may change a byte."""
    busy = PromptMaker(3, cached_blocks=2)
    for block in range(20):
        prompt(busy, block, 600, block)
    assert prompt(busy, 5, 1600, 0, 1, 2) == prompt(PromptMaker(3), 5, 1600, 0, 1, 2)


def test_another_seed_shares_nothing() -> None:
    """The second of two compared runs must not find the first one's prefixes in the engines' caches."""
    one, other = prompt(PromptMaker(1), 0, 1600, 0, 1), prompt(PromptMaker(2), 0, 1600, 0, 1)
    assert shared(one, other) < 17 + 16


def test_a_shorter_partial_block_is_a_prefix_of_the_longer_one() -> None:
    """A conversation's last, half-filled block goes on in the next turn: the reuse is real down to the token."""
    maker = PromptMaker(1)
    turn, next_turn = prompt(maker, 0, 700, 0, 1), prompt(maker, 1, 1000, 0, 1)
    closing = len("<|im_end|>\n<|im_start|>assistant\n")
    assert shared(turn, next_turn) == pytest.approx(700 - closing, abs=2)
