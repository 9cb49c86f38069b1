"""A site's KV content told to the fleet in bounded bytes."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.siteagent.kv_summary import by_model, sample


def test_a_small_site_is_told_whole_and_once() -> None:
    """Two instances hold the same system prompt: it is named once, and nothing is left out."""
    one, two = [b"a" * 8, b"b" * 8], [b"b" * 8, b"c" * 8]
    assert sample([one, two]) == (b"a" * 8 + b"b" * 8 + b"c" * 8, 0)
    assert sample([]) == (b"", 0)


@given(st.integers(0, 3_000), st.integers(1, 200), st.integers(0, 9))
def test_it_never_exceeds_its_bound_and_names_exactly_its_share(count: int, most: int, seed: int) -> None:
    """Whoever looks for a digest with these low bits finds it, and only what is held."""
    dice = random.Random(seed)
    held = [dice.randbytes(8) for _ in range(count)]
    packed, bits = sample([held[::2], held[1::2]], most)
    told = {packed[at : at + 8] for at in range(0, len(packed), 8)}
    assert len(told) <= most
    assert told == {one for one in held if int.from_bytes(one, "little") % (1 << bits) == 0}
    assert bits == 0 or len({one for one in held if int.from_bytes(one, "little") % (1 << (bits - 1)) == 0}) > most


def test_instances_are_gathered_by_model() -> None:
    """A site's models are told apart: digests do not say which model they are of."""
    found = by_model({"x": ("m", [b"1"]), "y": ("n", [b"2"]), "z": ("m", [b"3"])})
    assert found == {"m": [[b"1"], [b"3"]], "n": [[b"2"]]}
