"""How alembic reaches the database: on the connection that `tokenfleet.database` hands over, under its lock.

`alembic` itself (to write a new revision) uses TOKENFLEET_POSTGRES_URL.
"""

import asyncio
import os

from alembic import context
from sqlalchemy.engine import Connection

from tokenfleet.database import create_engine, is_partition, metadata


def _include(_object: object, name: str | None, kind: str, _reflected: bool, _other: object) -> bool:
    """Partitions are not the metadata's: autogenerate would drop them."""
    return not (kind == "table" and name is not None and is_partition(name))


def run(connection: Connection) -> None:
    """Run the revisions on one connection, each in its own transaction."""
    context.configure(
        connection=connection, target_metadata=metadata, transaction_per_migration=True, include_object=_include
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_alone() -> None:
    """Without a connection given: for `alembic revision --autogenerate`."""
    engine = create_engine(os.environ.get("TOKENFLEET_POSTGRES_URL", ""), pool_size=1, statement_timeout_ms=0)
    async with engine.connect() as connection:
        await connection.run_sync(run)
        await connection.commit()
    await engine.dispose()


if context.is_offline_mode():
    context.configure(dialect_name="postgresql", target_metadata=metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    given = context.config.attributes.get("connection")
    if given is not None:
        run(given)
    else:
        asyncio.run(run_alone())
