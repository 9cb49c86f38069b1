"""Postgres as every process of the fleet meets it: connections, tables, schema versions.

Decides how a connection is made (bounded pool, time-outs on the server's side), which schema this code expects, and
that one process at a time changes it. Knows nothing of what the rows mean.

Alembic applies the schema under a session advisory lock, so that any number of replicas may start at once: one runs
the DDL, the others wait and find it done. Code that finds a revision it does not know stops with `SchemaAheadError`
and writes nothing: an old binary must not misread a newer schema.
"""

import asyncio
import contextlib
import importlib.metadata
import re
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

T = TypeVar("T")

#: key of the advisory lock under which the schema changes; any constant that no other program uses ("tfleet")
MIGRATION_LOCK = 0x7466_6C65_6574
#: SQLSTATE classes after which the same statement may succeed later: connection, rollback (deadlock), resources,
#: operator intervention (shutdown, statement time-out); 55P03 is a lock time-out, 25006 a server in recovery
_TRANSIENT_CLASSES = ("08", "40", "53", "57")
_TRANSIENT_STATES = ("55P03", "25006")
#: and those that say that the values are wrong: data exception, integrity violation, program limit exceeded
_DATA_CLASSES = ("22", "23", "54")


class DatabaseError(RuntimeError):
    """Postgres could not be used as asked."""


class DatabaseUrlError(DatabaseError):
    """The Postgres URL is missing or not one."""


class DatabaseDownError(DatabaseError):
    """Postgres cannot be reached, or not in time."""


class SchemaAheadError(DatabaseError):
    """The database has a newer schema than this code knows: nothing is read or written."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"schema ahead: the database is at revision {found!r}, which this version of tokenfleet does not know; "
            "upgrade tokenfleet before it uses this database"
        )
        self.found = found


class SchemaBehindError(DatabaseError):
    """The database has an older schema than this code needs."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(
            f"schema behind: the database is at revision {found or '(none)'!r}, this version of tokenfleet needs "
            f"{needed!r}; run 'tokenfleet db migrate'"
        )
        self.found = found
        self.needed = needed


class MigrationsMissingError(DatabaseError):
    """The migration scripts are not where this installation should have them."""


#: all that work on the database may raise; the driver's own errors reach us where a connection is being made
ERRORS = (SQLAlchemyError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, DatabaseError)

metadata = MetaData()

#: the ledger: one row per attempt, attempt 0 for a request that was never dispatched. Exactly once lives here.
#: A partition a day, `attempts_YYYYMMDD`, and `attempts_default` for rows of other days.
attempts = Table(
    "attempts",
    metadata,
    Column("request_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    #: exactly one row of a request is final
    Column("final", Boolean, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("service_class", Text, nullable=False),
    Column("task", Text, nullable=False),
    Column("model_asked", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("model_served", Text, nullable=False),
    #: where the client entered
    Column("site", Text, nullable=False),
    #: where it was served; empty: nowhere
    Column("served_site", Text, nullable=False),
    Column("instance", Text, nullable=False),
    Column("booking", Text, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("fallback", Boolean, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    #: output that the request would have had: delivered if completed, else an estimate; null: nothing to go by
    Column("offered_output_tokens", BigInteger),
    Column("offered_estimated", Boolean, nullable=False),
    Column("output_budget_tokens", BigInteger),
    Column("cached_tokens", BigInteger),
    Column("prefix_hit_tokens_predicted", BigInteger, nullable=False),
    Column("usage_source", Text, nullable=False),
    Column("request_bytes", BigInteger, nullable=False),
    Column("response_bytes", BigInteger, nullable=False),
    Column("received_at", DateTime(timezone=True), nullable=False),
    Column("finished_at", DateTime(timezone=True), nullable=False),
    Column("queue_ms", Double),
    Column("first_byte_ms", Double),
    Column("ttft_ms", Double),
    Column("tpot_ms", Double),
    Column("e2e_ms", Double, nullable=False),
    Column("predicted_ttft_ms", Double),
    Column("predicted_tpot_ms", Double),
    Column("ttft_objective_ms", Double),
    Column("tpot_objective_ms", Double),
    Column("e2e_objective_ms", Double),
    Column("finish_reason", Text, nullable=False),
    #: completed and every objective that it had was met
    Column("compliant", Boolean, nullable=False),
    #: objectives missed by a completed request, comma-separated: ttft, tpot, e2e
    Column("missed", Text, nullable=False),
    #: delivered tokens that count for nothing, and why
    Column("wasted_tokens", BigInteger, nullable=False),
    Column("wasted_cause", Text, nullable=False),
    Column("gateway", Text, nullable=False),
    Column("gateway_incarnation", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("recorded_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    # received_at is the same in all rows of a request, so keys with it are as unique as without
    PrimaryKeyConstraint("request_id", "attempt", "received_at", name="attempts_pkey"),
    postgresql_partition_by="RANGE (received_at)",
)
Index(
    "attempts_one_final",
    attempts.c.request_id,
    attempts.c.received_at,
    unique=True,
    postgresql_where=attempts.c.final,
)
Index("attempts_finished_at", attempts.c.finished_at)

#: events that no row could be made of; kept so that a mended reader can take them up again
quarantine = Table(
    "quarantine",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("payload_hash", LargeBinary, nullable=False),
    Column("subject", Text, nullable=False),
    Column("reason", Text, nullable=False),
    #: at most `store.PAYLOAD_BYTES_MAX`; `truncated` says that the rest is gone
    Column("payload", LargeBinary, nullable=False),
    Column("truncated", Boolean, nullable=False),
    Column("quarantined_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    UniqueConstraint("payload_hash", name="quarantine_payload_hash_key"),
)

#: API keys: only a keyed hash is kept
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("key_hash", LargeBinary, nullable=False),
    Column("tenant", Text, nullable=False),
    #: classes that the key may use; null: all of its tenant's
    Column("classes", ARRAY(Text)),
    Column("label", Text, nullable=False, server_default=""),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("revoked_at", DateTime(timezone=True)),
    UniqueConstraint("key_hash", name="api_keys_key_hash_key"),
)


def is_partition(name: str) -> bool:
    """Whether a table is a part of the ledger, which the code reaches through `attempts` only."""
    return re.fullmatch(r"attempts_(\d{8}|default)", name) is not None


def engine_url(url: str) -> URL:
    """`postgresql://…` as SQLAlchemy's asyncpg dialect reads it. Raises `DatabaseUrlError`."""
    if not url:
        raise DatabaseUrlError("no Postgres URL: set TOKENFLEET_POSTGRES_URL=postgresql://user:password@host/database")
    try:
        parsed = make_url(url)
    except ArgumentError:
        # the URL may hold a password: never repeated
        raise DatabaseUrlError("TOKENFLEET_POSTGRES_URL is not a URL") from None
    if parsed.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        raise DatabaseUrlError(f"a postgresql:// URL is needed, not {parsed.drivername}://")
    mode = parsed.query.get("sslmode")
    if mode is not None:  # libpq's word; asyncpg's is `ssl`
        parsed = parsed.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return parsed.set(drivername="postgresql+asyncpg")


def create_engine(
    url: str,
    *,
    application: str = "tokenfleet",
    pool_size: int = 4,
    statement_timeout_ms: int = 5_000,
    lock_timeout_ms: int = 2_000,
    pre_ping: bool = True,
) -> AsyncEngine:
    """A pool of at most `pool_size` connections; connects lazily. Raises `DatabaseUrlError`.

    Without `pre_ping` the first statement after a restart of Postgres fails, which suits whoever retries anyway.

    Time-outs run on the server, so that an abandoned statement ends even if its client is gone; 0 means none.
    """
    return create_async_engine(
        engine_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=10,
        pool_pre_ping=pre_ping,
        connect_args={
            "timeout": 5,
            # for a server that is cut off: the statement's own time-out runs there and cannot reach us
            "command_timeout": statement_timeout_ms / 1000 + 5 if statement_timeout_ms else None,
            "server_settings": {
                "application_name": application,
                "statement_timeout": str(statement_timeout_ms),
                "lock_timeout": str(lock_timeout_ms),
                "idle_in_transaction_session_timeout": "10000",
            },
        },
    )


def is_transient(error: BaseException) -> bool:
    """Whether the same work may succeed later: the server is down, overloaded, locked, or chose us as a victim."""
    if isinstance(error, PoolTimeout | OSError | TimeoutError | DatabaseDownError):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = str(getattr(cause, "sqlstate", None) or "")
    if state:
        return state[:2] in _TRANSIENT_CLASSES or state in _TRANSIENT_STATES
    return isinstance(error, OperationalError | InterfaceError | asyncpg.InterfaceError)


def is_datas_fault(error: DBAPIError) -> bool:
    """Whether Postgres refuses what is written, and not who writes or how: values out of range, broken constraints,
    rows that are too large. A missing column or privilege is not the data's fault.
    """
    return str(getattr(error.orig, "sqlstate", None) or "")[:2] in _DATA_CLASSES


def brief(error: BaseException) -> str:
    """The first line of an error: never statements, parameters or URLs."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Finish database work even if the caller is cancelled meanwhile, then let the cancellation go on.

    A cancellation in the middle of the driver's protocol can leave a session on the server that the pool believes
    free. The work is bounded by the server's time-outs.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved: the caller is leaving and nobody else will look
        raise


# -- schema -------------------------------------------------------------------------------------------------------


class SchemaState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a database stands against this code."""

    #: revision in the database; empty: none yet
    found: str
    #: newest revision that this code knows
    head: str
    #: the database is at a revision that this code does not know
    ahead: bool

    @property
    def current(self) -> bool:
        """Exactly what this code needs."""
        return self.found == self.head


def migrations_directory() -> Path:
    """The migration scripts of this installation. Raises `MigrationsMissingError`.

    A checkout has them beside `services/`; an installed wheel as shared data, wherever the installer put that.
    """
    looked: list[Path] = []
    for candidate in _migration_places():
        if (candidate / "env.py").is_file():
            return candidate
        if candidate not in looked:
            looked.append(candidate)
    raise MigrationsMissingError("no migrations found; looked in " + ", ".join(map(str, looked)))


def _migration_places() -> Iterator[Path]:
    yield Path(__file__).resolve().parents[2] / "migrations"
    try:
        # what the installer itself recorded: right for --user, --target and virtual environments alike
        for file in importlib.metadata.distribution("tokenfleet").files or ():
            if file.parts[-2:] == ("migrations", "env.py"):
                yield Path(str(file.locate())).resolve().parent
    except importlib.metadata.PackageNotFoundError:
        pass
    for root in (sysconfig.get_path("data"), sys.prefix, sys.base_prefix):
        yield Path(root) / "share" / "tokenfleet" / "migrations"


def _alembic_config(connection: Connection | None = None) -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def _state(connection: Connection) -> SchemaState:
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_alembic_config())
    known = {script.revision for script in scripts.walk_revisions()}
    # in the order of history a database has one revision; a branch left behind by hand would show as several
    found = ",".join(MigrationContext.configure(connection).get_current_heads())
    return SchemaState(found=found, head=scripts.get_current_head() or "", ahead=bool(found) and found not in known)


@contextlib.asynccontextmanager
async def _connected(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    try:
        async with engine.connect() as connection:
            yield connection
    except DatabaseError:
        raise
    except ERRORS as error:
        if is_transient(error):
            raise DatabaseDownError(f"Postgres cannot be used: {brief(error)}") from error
        raise DatabaseError(f"Postgres refused: {brief(error)}") from error


async def schema_state(engine: AsyncEngine) -> SchemaState:
    """Where the database stands. Raises `DatabaseDownError`."""
    async with _connected(engine) as connection:
        return await connection.run_sync(_state)


async def check_schema(engine: AsyncEngine) -> None:
    """Pass only if the schema is the one this code needs.

    Raises `SchemaAheadError`, `SchemaBehindError`, `DatabaseDownError`.
    """
    state = await schema_state(engine)
    if state.ahead:
        raise SchemaAheadError(state.found)
    if not state.current:
        raise SchemaBehindError(state.found, state.head)


async def migrate(url: str) -> tuple[SchemaState, SchemaState]:
    """Bring the schema to this code's head, waiting for whoever is at it; returns the states before and after.

    Raises `SchemaAheadError`, `DatabaseDownError`.
    """
    engine = create_engine(
        url, application="tokenfleet-migrate", pool_size=1, statement_timeout_ms=0, lock_timeout_ms=0
    )
    try:
        async with _connected(engine) as connection:
            # a session lock, not a transaction's: a later migration may need to run outside of one
            await connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": MIGRATION_LOCK})
            try:
                # a table lock that is not to be had soon would block everybody queueing behind it
                await connection.execute(text("SET lock_timeout = '30s'"))
                before = await connection.run_sync(_state)
                await connection.commit()
                if before.ahead:
                    raise SchemaAheadError(before.found)
                if before.current:
                    return before, before
                await connection.run_sync(_upgrade)
                await connection.commit()
                after = await connection.run_sync(_state)
                await connection.commit()
                return before, after
            finally:
                # the session ends with the engine below, and the lock with it: no unlock on a broken connection
                await connection.rollback()
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> None:
    from alembic import command

    command.upgrade(_alembic_config(connection), "head")


async def wait_for_schema(url: str, *, timeout_s: float = 60.0, poll_s: float = 0.25) -> SchemaState:
    """Wait until the database answers and has this code's schema.

    Raises `SchemaAheadError` at once, `SchemaBehindError` or `DatabaseDownError` when the time is up.
    """
    end = time.monotonic() + timeout_s
    engine = create_engine(url, pool_size=1)
    try:
        while True:
            try:
                await check_schema(engine)
                return await schema_state(engine)
            except (SchemaBehindError, DatabaseDownError):
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(poll_s)
    finally:
        await engine.dispose()
