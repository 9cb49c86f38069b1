"""The ledger by day: rows keep their place and stay unique while days are made, moved and dropped under them."""

import asyncio
import datetime
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from alembic import command
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from tokenfleet import database
from tokenfleet.accountant import partitions, store
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.database import create_engine, is_transient
from tokenfleet_schemas.outcome import OutcomeFinished, Times

DAY = datetime.timedelta(days=1)
#: Postgres' day in these tests is this machine's
NOW = datetime.datetime.now(datetime.UTC)
TODAY = NOW.date()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(database_url)
    yield made
    await made.dispose()


def row(request_id: str, received: datetime.datetime = NOW, attempt: int = 1, **changes: Any) -> store.Row:
    values: dict[str, Any] = {
        "id": f"{request_id}:finished:{attempt}",
        "site": "a",
        "request_id": request_id,
        "attempt": attempt,
        "final": True,
        "outcome": "completed",
        "gateway": "g",
        "gateway_incarnation": "i",
        "tenant": "acme",
        "service_class": "chat",
        "model_asked": "m",
        "model": "m",
        "version": "1",
        "input_tokens": 10,
        "output_tokens": 20,
        "received_unix_ms": int(received.timestamp() * 1000),
        "times": Times(ttft_ms=600.0, e2e_ms=800.0),
    }
    return store.row_of(OutcomeFinished(**(values | changes)), OutputMedian())


async def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(found) for found in await connection.fetch(query)]
    finally:
        await connection.close()


PLACES = "SELECT tableoid::regclass::text, request_id FROM attempts ORDER BY request_id"


async def at_revision(url: str, revision: str, *, down: bool = False) -> None:
    def move(connection: Connection) -> None:
        (command.downgrade if down else command.upgrade)(database._alembic_config(connection), revision)

    engine = create_engine(url, pool_size=1)
    async with engine.connect() as connection:
        await connection.run_sync(move)
        await connection.commit()
    await engine.dispose()


async def test_rows_of_the_one_table_move_to_their_days_and_back(empty_database_url: str) -> None:
    """A ledger of the first version is upgraded, used, and brought back: not a row, not a value is lost."""
    await at_revision(empty_database_url, "0001")
    columns = ", ".join(store.Row.__struct_fields__)
    received = [NOW - DAY * 500, NOW - DAY * 2, NOW - DAY * 2, NOW, NOW + DAY * 30]
    rows = [row(f"r{number}", at) for number, at in enumerate(received)]
    connection = await asyncpg.connect(empty_database_url)
    for one in rows:
        places = ", ".join(f"${number + 1}" for number in range(len(store.Row.__struct_fields__)))
        values = [getattr(one, name) for name in store.Row.__struct_fields__]
        await connection.execute(f"INSERT INTO attempts ({columns}) VALUES ({places})", *values)
    await connection.close()
    everything = f"SELECT {columns}, recorded_at FROM attempts ORDER BY request_id"
    before = await fetch(empty_database_url, everything)
    await database.migrate(empty_database_url)
    assert await fetch(empty_database_url, everything) == before
    two_days_ago, today = partitions._name(TODAY - DAY * 2), partitions._name(TODAY)
    assert [place for place, _ in await fetch(empty_database_url, PLACES)] == [
        "attempts_default", two_days_ago, two_days_ago, today, "attempts_default",
    ]  # fmt: skip
    engine = create_engine(empty_database_url)
    assert (await store.write(engine, [*rows, row("new")])).inserted == 1
    await engine.dispose()
    await at_revision(empty_database_url, "0001", down=True)
    after = await fetch(empty_database_url, everything)
    assert [one for one in after if one[0] != "new"] == before
    assert len(after) == len(before) + 1
    with pytest.raises(asyncpg.UniqueViolationError):
        await fetch(empty_database_url, "INSERT INTO attempts SELECT * FROM attempts RETURNING 1")
    await database.migrate(empty_database_url)
    assert len(await fetch(empty_database_url, PLACES)) == len(after)


async def test_days_are_made_once_by_any_number_of_replicas(engine: AsyncEngine, database_url: str) -> None:
    """Four accountants start together and each wants the coming days: every day is made by one of them."""
    made = await asyncio.gather(*(partitions.ensure(engine) for _ in range(4)))
    wanted = [partitions._name(TODAY + DAY * offset) for offset in range(-1, 4)]
    assert sorted(name for names in made for name in names) == wanted
    assert [day.name for day in await partitions.days(engine)] == wanted
    assert await partitions.ensure(engine) == []


async def test_rows_before_their_day_was_made_are_moved(engine: AsyncEngine, database_url: str) -> None:
    """The database was too busy for DDL at midnight: the new day's rows wait in the default, and move later."""
    await store.write(engine, [row("today"), row("skewed", NOW + DAY * 300)])
    assert [place for place, _ in await fetch(database_url, PLACES)] == ["attempts_default"] * 2
    await partitions.ensure(engine)
    assert await fetch(database_url, PLACES) == [("attempts_default", "skewed"), (partitions._name(TODAY), "today")]
    assert (await store.write(engine, [row("today"), row("skewed", NOW + DAY * 300)])).duplicates == 2


async def test_repeats_across_midnight_while_days_are_made_and_dropped(database_url: str) -> None:
    """L07 at the worst moment: 1,200 attempts around midnight, one to five times each, by four writers, guesses among
    them, while one replica makes days (moving rows that are there already) and an operator drops an old one."""
    rng = random.Random(7)
    midnight = datetime.datetime.combine(TODAY, datetime.time(), datetime.UTC)
    truth: dict[tuple[str, int], store.Row] = {}
    guesses: list[store.Row] = []
    for number in range(400):
        received = midnight + datetime.timedelta(milliseconds=rng.randint(-20, 20))
        for attempt in (1, 2, 3):
            one = row(f"r{number}", received, attempt, final=attempt == 3)
            truth[one.key] = one
        if number % 4 == 0:
            guesses.append(row(f"r{number}", received, rng.choice([0, 2, 3]), outcome="owner_lost"))
    deliveries = [one for one in [*truth.values(), *guesses] for _ in range(rng.randint(1, 5))]
    rng.shuffle(deliveries)
    engines = [create_engine(database_url) for _ in range(5)]
    await store.write(engines[4], [row("old", NOW - DAY * 40)])
    await partitions.ensure(engines[4], behind=40, ahead=-40)

    async def insist(work: Any) -> Any:
        for _ in range(50):
            try:
                return await work()
            except DBAPIError as error:
                if not is_transient(error):
                    raise
        pytest.fail("never got in")

    async def writer(number: int) -> None:
        mine = deliveries[number::4]
        for start in range(0, len(mine), 50):
            await insist(lambda start=start: store.write(engines[number], mine[start : start + 50]))

    async def keeper() -> None:
        for offset in range(-2, 3):
            await insist(lambda offset=offset: partitions.ensure(engines[4], behind=-offset, ahead=offset))
            await asyncio.sleep(0.02)
        await insist(lambda: partitions.retain(engines[4], keep_days=30))

    await asyncio.gather(*(writer(number) for number in range(4)), keeper())
    await partitions.ensure(engines[4])
    for one in engines:
        await one.dispose()
    found = await fetch(database_url, "SELECT request_id, attempt, outcome, tableoid::regclass::text FROM attempts")
    assert sorted((one[0], one[1]) for one in found) == sorted(truth)
    assert {one[2] for one in found} == {"completed"}
    assert {one[3] for one in found} <= {partitions._name(TODAY), partitions._name(TODAY - DAY)}


def tokenfleet(*words: str, url: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    return subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", *words],
        env=clean | {"TOKENFLEET_POSTGRES_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )


async def test_old_days_are_dropped_and_the_kept_ones_are_whole(engine: AsyncEngine, database_url: str) -> None:
    """Retention by hand: what is older goes as tables, strays of no day as rows, the days asked for stay whole."""
    await partitions.ensure(engine, behind=5)
    rows = [row(f"d{ago}-{number}", NOW - DAY * ago) for ago in (0, 1, 2, 3, 4, 5, 90) for number in range(3)]
    await store.write(engine, rows)
    words = ("db", "retain", "--days", "2", "--json")
    said = await asyncio.to_thread(tokenfleet, *words, "--dry-run", url=database_url)
    assert said.returncode == 0, said.stderr
    would = json.loads(said.stdout)
    assert len(await fetch(database_url, PLACES)) == 21
    done = json.loads((await asyncio.to_thread(tokenfleet, *words, url=database_url)).stdout)
    assert done == would
    assert done == {
        "first_day": (TODAY - DAY * 2).isoformat(),
        "dropped": [partitions._name(TODAY - DAY * ago) for ago in (5, 4, 3)],
        "deleted_rows": 3,
    }
    assert [name for _, name in await fetch(database_url, PLACES)] == sorted(
        f"d{ago}-{number}" for ago in (0, 1, 2) for number in range(3)
    )
    again = await asyncio.to_thread(tokenfleet, "db", "retain", "--days", "2", url=database_url)
    assert again.stdout == f"0 days before {TODAY - DAY * 2} dropped\n"
    none = await asyncio.to_thread(tokenfleet, "db", "retain", "--days", "0", url=database_url)
    assert (none.returncode, "the least is 1" in none.stderr) == (2, True)
