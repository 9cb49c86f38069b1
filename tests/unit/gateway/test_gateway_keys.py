"""API keys as the gateway believes them: cached, revocable, and usable while Postgres is away."""

import asyncio
import datetime

import pytest

from tokenfleet.gateway.keys import Keys, KeysUnavailable
from tokenfleet.gateway.settings import KeyCache
from tokenfleet.keys import ApiKey, hash_key

SECRET = "s"
GOOD = ApiKey(id="k", tenant="acme", created_at=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))


class Database:
    """A table of one key, which may be down or hang."""

    def __init__(self) -> None:
        self.rows = {hash_key(SECRET, "good"): GOOD}
        self.asked = 0
        self.down = False
        self.hang: asyncio.Event | None = None

    async def find(self, hashed: bytes) -> ApiKey | None:
        self.asked += 1
        if self.hang is not None:
            await self.hang.wait()
        if self.down:
            raise ConnectionRefusedError
        return self.rows.get(hashed)


class Bench:
    def __init__(self, knobs: KeyCache | None = None) -> None:
        self.now_s = 1000.0
        self.database = Database()
        self.keys = Keys(self.database.find, SECRET, clock_s=lambda: self.now_s, knobs=knobs)


async def test_a_key_is_looked_up_once_and_believed_for_a_while() -> None:
    """200 requests a second must not be 200 queries a second."""
    bench = Bench()
    assert await asyncio.gather(*(bench.keys.who("good") for _ in range(50))) == [GOOD] * 50
    assert bench.database.asked == 1
    bench.now_s += 29
    await bench.keys.who("good")
    assert bench.database.asked == 1


async def test_a_revocation_takes_effect_within_its_time() -> None:
    """30 s after it at the latest."""
    bench = Bench()
    assert await bench.keys.who("good") == GOOD
    bench.database.rows.clear()
    bench.now_s += 30
    assert await bench.keys.who("good") is None


async def test_a_new_key_works_within_five_seconds_of_being_asked_for() -> None:
    """A client that was faster than its key is not locked out for long."""
    bench = Bench()
    assert await bench.keys.who("later") is None
    bench.database.rows[hash_key(SECRET, "later")] = GOOD
    assert await bench.keys.who("later") is None
    bench.now_s += 5
    assert await bench.keys.who("later") == GOOD


async def test_wrong_keys_do_not_fill_the_memory() -> None:
    """A flood of made-up keys, long ones too."""
    bench = Bench(KeyCache(entries=10))
    for number in range(50):
        assert await bench.keys.who("x" * 100_000 + str(number)) is None
        assert await bench.keys.who(str(number)) is None
    assert len(bench.keys._entries) == 10


async def test_while_postgres_is_down_known_keys_work_and_others_are_not_judged() -> None:
    """Never a 401 for a good key: the client would throw it away."""
    bench = Bench()
    await bench.keys.who("good")
    bench.database.down = True
    bench.now_s += 100
    assert await bench.keys.who("good") == GOOD
    assert bench.keys.down
    with pytest.raises(KeysUnavailable):
        await bench.keys.who("other")
    bench.now_s += 3600
    with pytest.raises(KeysUnavailable):
        await bench.keys.who("good")
    bench.database.down = False
    assert await bench.keys.who("good") == GOOD
    assert not bench.keys.down


async def test_a_hanging_database_holds_nobody_up() -> None:
    """A known key is believed after a quarter of a second, an unknown one is unavailable after a while."""
    bench = Bench(KeyCache(stale_s=0.02, look_up_s=0.05))
    await bench.keys.who("good")
    bench.database.hang = asyncio.Event()
    bench.now_s += 31
    assert await bench.keys.who("good") == GOOD
    with pytest.raises(KeysUnavailable):
        await bench.keys.who("other")
    bench.database.hang.set()
    await asyncio.sleep(0)


async def test_a_client_that_leaves_does_not_end_the_look_up_of_others() -> None:
    """The first of two who asked disconnects."""
    bench = Bench()
    bench.database.hang = asyncio.Event()
    first, second = asyncio.create_task(bench.keys.who("good")), asyncio.create_task(bench.keys.who("good"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    bench.database.hang.set()
    assert await second == GOOD
    assert bench.database.asked == 1
