"""The ledger on a real Postgres: exactly once, whoever writes what how often."""

import asyncio
import collections
import datetime
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from tests.e2e.running import patience

from tokenfleet.accountant import store
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.database import attempts, create_engine, is_transient, uncancelled
from tokenfleet_schemas import codec
from tokenfleet_schemas.outcome import OutcomeFinished, Times

RECEIVED = 1_800_000_000_000


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(database_url)
    yield made
    await made.dispose()


def outcome(request_id: str, *, attempt: int = 1, final: bool = True, **changes: Any) -> OutcomeFinished:
    values: dict[str, Any] = {
        "id": f"{request_id}:finished:{attempt}",
        "site": "a",
        "request_id": request_id,
        "attempt": attempt,
        "final": final,
        "outcome": "completed",
        "gateway": "g",
        "gateway_incarnation": "i",
        "tenant": "acme",
        "service_class": "chat",
        "model_asked": "m@1",
        "model": "m",
        "version": "1",
        "served_site": "b",
        "instance": "b1",
        "input_tokens": 10,
        "output_tokens": 20,
        "received_unix_ms": RECEIVED,
        "times": Times(ttft_ms=600.0, tpot_ms=10.0, e2e_ms=800.0),
        "ttft_objective_ms": 500.0,
    }
    return OutcomeFinished(**(values | changes))


def row(*words: Any, **changes: Any) -> store.Row:
    return store.row_of(outcome(*words, **changes), OutputMedian())


async def ledger(url: str, columns: str = "request_id, attempt, outcome, final") -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetch(f"SELECT {columns} FROM attempts ORDER BY request_id, attempt")
    finally:
        await connection.close()
    return [tuple(one) for one in found]


def test_a_row_has_every_column_of_its_table() -> None:
    """A column added to one and not the other would stay empty without a word."""
    columns = {column.name for column in attempts.columns}
    assert set(store.Row.__struct_fields__) == columns - {"recorded_at"}


async def test_what_the_gateway_said_is_what_the_ledger_holds(engine: AsyncEngine, database_url: str) -> None:
    """L09: who asked for what, who served it where, and which promise was missed, on one row."""
    await store.write(engine, [row("r1")])
    (found,) = await ledger(
        database_url,
        "model_asked, model, served_site, instance, site, compliant, missed, wasted_tokens, wasted_cause, "
        "EXTRACT(EPOCH FROM received_at) * 1000, EXTRACT(EPOCH FROM finished_at) * 1000, ttft_ms, recorded_at IS NULL",
    )
    assert found[:9] == ("m@1", "m", "b", "b1", "a", False, "ttft", 20, "missed_ttft")
    assert [float(value) for value in found[9:12]] == [RECEIVED, RECEIVED + 800, 600.0]
    assert found[12] is False


@pytest.mark.parametrize("writers", [4, 8])
async def test_repeats_in_any_order_over_many_writers_make_one_row_each(database_url: str, writers: int) -> None:
    """L07 and L03: 2,000 outcomes delivered one to five times, shuffled, in overlapping batches: no deadlocks."""
    rng = random.Random(1)
    truth = {(f"r{n}", n % 3): row(f"r{n}", attempt=n % 3) for n in range(2000)}
    deliveries = [one for one in truth.values() for _ in range(rng.randint(1, 5))]
    rng.shuffle(deliveries)
    engines = [create_engine(database_url) for _ in range(writers)]
    written: list[store.Written] = []

    async def writer(number: int) -> None:
        mine = deliveries[number::writers]
        for start in range(0, len(mine), 100):
            # a batch that Postgres would not take now is tried again, as the service does
            for _ in range(20):
                try:
                    written.append(await store.write(engines[number], mine[start : start + 100]))
                    break
                except DBAPIError as error:
                    if not is_transient(error):
                        raise
            else:
                pytest.fail("a batch never got in")

    await asyncio.gather(*(writer(number) for number in range(writers)))
    for one in engines:
        await one.dispose()
    assert {found[:2] for found in await ledger(database_url)} == set(truth)
    connection = await asyncpg.connect(database_url)
    # statistics are written when sessions end
    deadlocks = await connection.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    await connection.close()
    assert deadlocks == 0
    assert sum(one.inserted for one in written) == len(truth)
    assert sum(one.duplicates for one in written) == len(deliveries) - len(truth)
    assert sum(one.quarantined for one in written) == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [3, pytest.param(300, marks=pytest.mark.soak)])
async def test_eight_writers_and_shared_tenants_lose_no_unit(database_url: str, seconds: int) -> None:
    """L03: writers that upserted the same counters in different orders deadlocked, and a flush was dropped for good.
    Eight writers, 200 tenants that they share, batches of overlapping requests in random order: every tenant's count
    and tokens are right, no deadlock, and 99 of 100 batches are in within a second."""
    writers, tenants = 8, 200
    engines = [create_engine(database_url) for _ in range(writers)]
    end = asyncio.get_running_loop().time() + seconds
    wanted: collections.Counter[str] = collections.Counter()
    known: set[tuple[str, int]] = set()
    took_s: list[float] = []
    retried = 0

    async def writer(number: int) -> None:
        nonlocal retried
        rng = random.Random(number)
        loop = asyncio.get_running_loop()
        batches = 0
        while loop.time() < end:
            # neighbours write the same requests at the same time, each in an order of its own
            requests = rng.sample(range(1000 * batches, 1000 * batches + 1000), 300)
            batches += 1
            rows = [row(f"r{n}", attempt=n % 3, tenant=f"t{n % tenants}") for n in requests]
            for one in rows:
                if one.key not in known:
                    known.add(one.key)
                    wanted[one.tenant] += 1
            begun = loop.time()
            while True:
                try:
                    await store.write(engines[number], rows)
                    break
                except DBAPIError as error:
                    if not is_transient(error):
                        raise
                    retried += 1
            took_s.append(loop.time() - begun)

    await asyncio.gather(*(writer(number) for number in range(writers)))
    for one in engines:
        await one.dispose()
    connection = await asyncpg.connect(database_url)
    found = await connection.fetch("SELECT tenant, count(*), sum(output_tokens)::bigint FROM attempts GROUP BY tenant")
    deadlocks = await connection.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    await connection.close()
    tokens = row("r0").output_tokens
    assert {tuple(one) for one in found} == {(tenant, count, count * tokens) for tenant, count in wanted.items()}
    assert len(wanted) == tenants
    assert deadlocks == 0
    # a batch that waited too long for another's lock is written again, and that is seen
    assert retried <= 0.05 * len(took_s) + writers
    assert len(took_s) >= writers
    if seconds >= 60:  # of few batches one that a busy machine held up is too many
        print(f"{len(took_s)} batches, {retried} retried, p99 {sorted(took_s)[len(took_s) * 99 // 100]:.3f} s")
        assert sum(one > patience(1.0) for one in took_s) <= 0.01 * len(took_s)


@pytest.mark.parametrize("order", ["guess first", "truth first", "together"])
async def test_the_truth_replaces_a_guess_and_never_the_other_way(
    engine: AsyncEngine, database_url: str, order: str
) -> None:
    """A gateway was cut off for ten seconds: owner_lost and the true outcome reach the ledger in either order."""
    guess = [
        row("same", outcome="owner_lost"),
        row("later", attempt=0, outcome="owner_lost"),
        row("ended", attempt=1, outcome="owner_lost"),
        row("lost", attempt=0, outcome="owner_lost"),
    ]
    truth = [row("same"), row("later", attempt=2), row("ended", final=False, outcome="failed")]
    if order == "guess first":
        assert (await store.write(engine, guess)).inserted == 4
        done = await store.write(engine, truth)
        assert (done.inserted, done.replaced, done.duplicates) == (3, 3, 0)
        assert (await store.write(engine, guess)).inserted == 0
    elif order == "truth first":
        await store.write(engine, truth)
        done = await store.write(engine, guess)
        assert (done.inserted, done.duplicates) == (1, 3)
    else:
        await store.write(engine, [*guess, *truth])
    found = await ledger(database_url)
    assert ("same", 1, "completed", True) in found
    assert [one for one in found if one[0] == "later"] == [("later", 2, "completed", True)]
    assert ("ended", 1, "failed", False) in found
    assert ("lost", 0, "owner_lost", True) in found


async def test_a_guess_and_the_truth_at_the_same_moment(database_url: str) -> None:
    """Two writers, one with the guess and one with the truth, over and over: the truth always stands at the end."""
    one, other = create_engine(database_url, pool_size=1), create_engine(database_url, pool_size=1)
    for number in range(60):
        await asyncio.gather(
            store.write(one, [row(f"r{number}", attempt=0, outcome="owner_lost")]),
            store.write(other, [row(f"r{number}")]),
        )
    await one.dispose()
    await other.dispose()
    assert await ledger(database_url) == sorted((f"r{n}", 1, "completed", True) for n in range(60))


async def test_one_bad_row_does_not_stop_the_others(engine: AsyncEngine, database_url: str) -> None:
    """B05: a size beyond any column, a broken event, an impossible time: to quarantine with the reason, rest in."""
    rows = [row(f"r{n}") for n in range(20)]
    rows.insert(7, row("huge", input_tokens=2**70))
    broken = store.read("tf.v1.outcome.finished.a.m.b1", b'{"type": "nonsense"}', OutputMedian())
    timeless = store.read(
        "tf.v1.outcome.finished.a.m.b1", codec.encode(outcome("when", received_unix_ms=2**62)), OutputMedian()
    )
    assert isinstance(broken, store.Poison)
    assert isinstance(timeless, store.Poison)
    done = await store.write(engine, rows, [broken, timeless])
    assert (done.inserted, done.quarantined) == (20, 3)
    assert len(await ledger(database_url)) == 20
    # delivered again: still three
    assert (await store.write(engine, rows, [broken, timeless])).quarantined == 0
    assert await store.quarantined(engine) == 3
    connection = await asyncpg.connect(database_url)
    reasons = [one["reason"] for one in await connection.fetch("SELECT reason FROM quarantine ORDER BY reason")]
    await connection.close()
    assert any("impossible time" in reason for reason in reasons)
    assert any("Postgres refused the row" in reason for reason in reasons)


async def test_quarantined_events_are_taken_up_again_once_they_can_be_read(
    engine: AsyncEngine, database_url: str
) -> None:
    """An event of a newer gateway came before the accountant was upgraded; afterwards nothing may be missing."""
    good = store.Poison(
        subject="tf.v1.outcome.finished.a.m.b1", payload=codec.encode(outcome("r1")), reason="unknown field, then"
    )
    bad = store.Poison(subject="tf.v1.outcome.finished.a.m.b1", payload=b"{", reason="broken")
    known = store.Poison(subject="tf.v1.outcome.finished.a.m.b1", payload=codec.encode(outcome("r2")), reason="then")
    await store.write(engine, [row("r2")], [good, bad, known])
    dry = await store.redrive(engine, dry_run=True)
    assert (dry.redriven, len(dry.left), len(await ledger(database_url))) == (2, 1, 1)
    done = await store.redrive(engine)
    assert (done.redriven, done.duplicates, len(done.left)) == (1, 1, 1)
    assert [found[0] for found in await ledger(database_url)] == ["r1", "r2"]
    assert await store.quarantined(engine) == 1


async def test_two_final_outcomes_of_one_request_are_not_dropped_in_silence(
    engine: AsyncEngine, database_url: str
) -> None:
    """A gateway that breaks the rule of one final outcome must be found out, not averaged in."""
    await store.write(engine, [row("r1", attempt=1)])
    done = await store.write(engine, [row("r1", attempt=2)])
    assert (done.inserted, done.quarantined) == (0, 1)
    assert len(await ledger(database_url)) == 1
    # nor by an operator who has the quarantine taken up again: what cannot go in stays, with the reason
    again = await store.redrive(engine)
    assert (again.redriven, again.duplicates) == (0, 0)
    assert list(again.left.values()) == ["another attempt of this request is final already"]
    assert await store.quarantined(engine) == 1


@pytest.mark.parametrize(
    ("breaking", "mending"),
    [
        ("ALTER TABLE attempts RENAME COLUMN task TO was_task", "ALTER TABLE attempts RENAME COLUMN was_task TO task"),
        ("ALTER TABLE quarantine RENAME TO was_quarantine", "ALTER TABLE was_quarantine RENAME TO quarantine"),
    ],
)
async def test_a_wrong_schema_is_no_outcomes_fault(
    engine: AsyncEngine, database_url: str, breaking: str, mending: str
) -> None:
    """An operator's hand slipped in the schema, and all outcomes of that hour were called poison. They wait instead."""
    operator = await asyncpg.connect(database_url)
    poison = [store.Poison(subject="x", payload=b"{", reason="broken")]
    await operator.execute(breaking)
    with pytest.raises(DBAPIError):
        await store.write(engine, [row("r1"), row("r2")], poison)
    await operator.execute(mending)
    await operator.close()
    assert await store.quarantined(engine) == 0
    done = await store.write(engine, [row("r1"), row("r2")], poison)
    assert (done.inserted, done.quarantined) == (2, 1)


async def test_strange_names_and_backward_clocks_are_held(engine: AsyncEngine, database_url: str) -> None:
    """O04: a client asks for a model with a NUL in its name, and a clock ran backwards: a row all the same."""
    await store.write(
        engine, [row("r1", model_asked="m\0'; DROP TABLE attempts; --", times=Times(queue_ms=-5.0, e2e_ms=-1.0))]
    )
    assert await ledger(database_url, "model_asked, queue_ms, e2e_ms, finished_at - received_at") == [
        ("m�'; DROP TABLE attempts; --", 0.0, 0.0, datetime.timedelta(0))
    ]


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_cancelled_work_leaves_no_connection_behind(database_url: str, kind: str) -> None:
    """L05: cancelling tasks in the middle of the driver's protocol left sessions that the pool believed free."""
    engine = create_engine(database_url, application="leaky", pool_size=5)
    rng = random.Random(5)
    watcher = await asyncpg.connect(database_url)

    async def operation() -> None:
        async def work() -> None:
            async with engine.begin() as connection:
                await connection.execute(text("SELECT pg_sleep(0.001)"))
                await connection.execute(text("SELECT 1"))

        await uncancelled(work())

    async def in_group() -> None:
        with anyio.move_on_after(rng.random() * 0.004):
            async with anyio.create_task_group() as group:
                group.start_soon(operation)

    try:
        for _ in range(50):
            if kind == "anyio":
                await asyncio.gather(*(in_group() for _ in range(20)))
                continue
            tasks = [asyncio.create_task(operation()) for _ in range(20)]
            await asyncio.sleep(rng.random() * 0.004)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of the queue pool behind the engine
        sessions = await watcher.fetch("SELECT state FROM pg_stat_activity WHERE application_name = 'leaky'")
        assert len(sessions) <= 5
        assert {one["state"] for one in sessions} <= {"idle"}
        await asyncio.wait_for(asyncio.gather(*(operation() for _ in range(5))), 5)
    finally:
        await watcher.close()
        await engine.dispose()


async def test_a_locked_table_fails_in_time_and_as_something_to_try_again(database_url: str) -> None:
    """L04: somebody holds a lock on the ledger; the writer gives up within its limit instead of filling the server."""
    engine = create_engine(database_url, lock_timeout_ms=100)
    blocker = await asyncpg.connect(database_url)
    transaction = blocker.transaction()
    await transaction.start()
    await blocker.execute("LOCK TABLE attempts IN ACCESS EXCLUSIVE MODE")
    try:
        with pytest.raises(DBAPIError) as refused:
            await asyncio.wait_for(store.write(engine, [row("r1")]), 2)
        assert is_transient(refused.value)
        await transaction.rollback()
        assert (await store.write(engine, [row("r1")])).inserted == 1
    finally:
        await blocker.close()
        await engine.dispose()
