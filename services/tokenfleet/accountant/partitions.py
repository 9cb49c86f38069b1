"""The ledger's days: a partition made before its day comes, old ones dropped.

Decides which days have a partition, `attempts_YYYYMMDD`, and how one is made or dropped while others write. Refuses to
know what rows mean. A row is never refused for its day: where no partition is, `attempts_default` takes it, and making
the partition later moves it. Days are UTC and today is Postgres' today, so that no replica's clock matters.
"""

import datetime

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tokenfleet.database import is_partition, uncancelled

#: where rows go whose day has no partition
DEFAULT = "attempts_default"
#: one maker at a time, in all replicas ("tfpart")
_LOCK = 0x7466_7061_7274


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """One partition."""

    name: str
    day: datetime.date
    size_bytes: int


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """What retention did, or would do."""

    #: the first day that stays
    first_day: datetime.date
    #: partitions dropped, oldest first
    dropped: tuple[str, ...]
    #: rows of as old days deleted from the default partition
    deleted_rows: int


async def days(engine: AsyncEngine) -> list[Day]:
    """The partitions there are, oldest first; the default is none of them."""

    async def work() -> list[Day]:
        async with engine.connect() as connection:
            return await _days(connection)

    return await uncancelled(work())


async def ensure(engine: AsyncEngine, *, behind: int = 1, ahead: int = 3) -> list[str]:
    """Make the partitions from `behind` days ago to `ahead` days hence that are missing; their names.

    Each is made in a transaction of its own and attached, which lets others read and write the ledger meanwhile; only
    rows without a partition of their own wait. Raises what `database.is_transient` accepts when somebody is in the way.
    """
    made = []
    present = {day.day for day in await days(engine)}
    today = await uncancelled(_today(engine))
    for offset in range(-behind, ahead + 1):
        day = today + datetime.timedelta(days=offset)
        if day not in present and await uncancelled(_make(engine, day)):
            made.append(_name(day))
    return made


async def retain(engine: AsyncEngine, *, keep_days: int, dry_run: bool = False) -> Retained:
    """Drop the days before the last `keep_days` whole ones; today always stays. ValueError below one day.

    A day is dropped in a transaction of its own, with a lock on the ledger for a moment. An outcome that the bus
    delivers again after its day was dropped is taken for a new one: rare after a day, and gone with the next run.
    """
    if keep_days < 1:
        raise ValueError("retention of less than a day: the bus may still deliver its outcomes again")
    return await uncancelled(_retain(engine, keep_days, dry_run))


async def _today(engine: AsyncEngine) -> datetime.date:
    async with engine.connect() as connection:
        found: datetime.date = (await connection.execute(text("SELECT (now() AT TIME ZONE 'UTC')::date"))).scalar_one()
        return found


async def _days(connection: AsyncConnection) -> list[Day]:
    found = await connection.execute(
        text(
            "SELECT child.relname, pg_total_relation_size(child.oid) FROM pg_inherits "
            "JOIN pg_class child ON child.oid = inhrelid WHERE inhparent = 'attempts'::regclass"
        )
    )
    return sorted(
        (
            Day(name=name, day=datetime.datetime.strptime(name[-8:], "%Y%m%d").date(), size_bytes=size)
            for name, size in found
            if is_partition(name) and name != DEFAULT
        ),
        key=lambda one: one.day,
    )


def _name(day: datetime.date) -> str:
    return f"attempts_{day:%Y%m%d}"


async def _make(engine: AsyncEngine, day: datetime.date) -> bool:
    """False when somebody else was faster."""
    name, until = _name(day), day + datetime.timedelta(days=1)
    async with engine.begin() as connection:
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        if any(one.day == day for one in await _days(connection)):
            return False
        # parent before child, as writers lock: nobody waits for each other in a ring. Nothing comes into the default
        # between moving its rows of the day out and attaching
        await connection.execute(text("LOCK TABLE ONLY attempts IN SHARE UPDATE EXCLUSIVE MODE"))
        await connection.execute(text(f"LOCK TABLE {DEFAULT} IN ACCESS EXCLUSIVE MODE"))
        await connection.execute(text(f"CREATE TABLE {name} (LIKE attempts INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"))
        await connection.execute(
            text(
                f"WITH moved AS (DELETE FROM {DEFAULT} WHERE received_at >= '{day} 00:00+00'"
                f" AND received_at < '{until} 00:00+00' RETURNING *) INSERT INTO {name} SELECT * FROM moved"
            )
        )
        await connection.execute(
            text(
                f"ALTER TABLE attempts ATTACH PARTITION {name}"
                f" FOR VALUES FROM ('{day} 00:00+00') TO ('{until} 00:00+00')"
            )
        )
    return True


async def _retain(engine: AsyncEngine, keep_days: int, dry_run: bool) -> Retained:
    first_day = await _today(engine) - datetime.timedelta(days=keep_days)
    old = [day for day in await days(engine) if day.day < first_day]
    if not dry_run:
        for day in old:
            async with engine.begin() as connection:
                await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
                await connection.execute(text(f"DROP TABLE IF EXISTS {day.name}"))
    verb = "SELECT count(*) FROM" if dry_run else "DELETE FROM"
    async with engine.begin() as connection:
        done = await connection.execute(text(f"{verb} {DEFAULT} WHERE received_at < '{first_day} 00:00+00'"))
        rows = int(done.scalar_one()) if dry_run else done.rowcount
    return Retained(first_day=first_day, dropped=tuple(day.name for day in old), deleted_rows=rows)
