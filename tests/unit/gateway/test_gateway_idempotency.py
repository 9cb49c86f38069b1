"""Keys of clients: what is known of them, and the head that says when to come again."""

import pytest
from aiohttp.test_utils import make_mocked_request

from tokenfleet.gateway.idempotency import HEADER, Kept, Once, key_of
from tokenfleet.gateway.openai import ApiError, refusal
from tokenfleet.gateway.settings import Limits
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas.streams import BUCKETS, IDEMPOTENCY_BUCKET


async def once(secret: str = "s") -> Once:
    return Once(Bus(Settings(), Clock(), "g"), secret=secret, gateway="g", incarnation="1", limits=Limits())


async def test_names_and_digests_tell_apart_what_must_be() -> None:
    """L10: a key of one tenant is useless for another; parts that run into each other must not look alike."""
    made = await once()
    assert made.name("acme", "key") == made.name("acme", "key")
    others = {made.name("acme", "key"), made.name("acm", "ekey"), made.name("beta", "key"), made.digest("acme", b"key")}
    assert len(others) == 4
    assert made.digest("chat", b"{}") != made.digest("completions", b"{}")
    assert made.name("acme", "key") != (await once("another fleet's")).name("acme", "key")
    assert "acme" not in made.name("acme", "key")


def test_answers_are_not_kept_longer_than_their_keys() -> None:
    """The bucket that forgets a key first lets another gateway run it again while this one still has the answer."""
    ttl_s = BUCKETS[IDEMPOTENCY_BUCKET].ttl_s
    assert ttl_s is not None
    assert Limits().answer_kept_s <= ttl_s
    assert 2 * Limits().lease_s < Limits().claim_silent_s < ttl_s


@pytest.mark.parametrize(
    ("status", "retry_after_s", "there"), [(409, 2.4, "2"), (409, None, None), (422, None, None), (503, None, "1")]
)
def test_a_conflict_that_ends_by_itself_says_when(status: int, retry_after_s: float | None, there: str | None) -> None:
    """G11: SDKs come again for a 409; when is for us to say."""
    assert ApiError(status, "x", "y", retry_after_s=retry_after_s).headers.get("Retry-After") == there


def test_one_key_of_printable_characters() -> None:
    """What is no key is refused, and no key is none."""
    assert key_of(make_mocked_request("POST", "/")) is None
    assert key_of(make_mocked_request("POST", "/", headers={HEADER: " a b "})) == "a b"
    for value in ("", "x" * 256, "\u00e4"):
        with pytest.raises(ApiError):
            key_of(make_mocked_request("POST", "/", headers={HEADER: value}))


async def test_a_reader_of_what_fails_gets_the_error_and_later_ones_too() -> None:
    """Ten clients wait for one run: when it fails, none of them waits for ever."""
    kept = Kept()
    kept.fail(refusal("patience"))
    kept.fail(refusal("unavailable"))
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await kept.follow(make_mocked_request("POST", "/"), repeated=True, stall_s=1.0)
        assert caught.value.code == "patience"


async def test_an_answer_goes_out_in_parts_from_anywhere() -> None:
    """A repeat of a long answer: no one write is so large that an honest reader takes too long for it."""
    kept = Kept()
    pieces = [bytes([n % 251]) * 1000 for n in range(300)]
    for piece in pieces:
        await kept.write(piece)
    at, parts = 0, []
    while True:
        data, at = kept._from(at)
        if not data:
            break
        parts.append(data)
    assert b"".join(parts) == b"".join(pieces)
    assert max(len(part) for part in parts) < 70_000
    assert kept.size == 300_000
