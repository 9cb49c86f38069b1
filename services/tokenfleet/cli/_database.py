"""What the verbs that use Postgres share: settings, and database errors as one line."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenfleet.cli._errors import CommandError, UsageError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tokenfleet.fleet import Fleet
    from tokenfleet.runtime.settings import Settings

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser, *, fleet: bool = False) -> None:
    """The options that override the environment."""
    parser.add_argument("--postgres", metavar="URL", help="postgresql://… (TOKENFLEET_POSTGRES_URL)")
    if fleet:
        parser.add_argument("--fleet", metavar="FILE", help="the fleet file (TOKENFLEET_FLEET)")


def settings(args: argparse.Namespace) -> "Settings":
    """The environment's settings with the options laid over. Raises `UsageError`."""
    import msgspec

    from tokenfleet.runtime.settings import Settings, SettingsError

    try:
        found = Settings.load()
    except SettingsError as error:
        raise UsageError(str(error)) from None
    given = {"postgres_url": getattr(args, "postgres", None), "fleet": getattr(args, "fleet", None)}
    return msgspec.structs.replace(found, **{key: value for key, value in given.items() if value})


def load_fleet(path: str) -> "Fleet":
    """The fleet file. Raises `UsageError`."""
    from tokenfleet.fleet import FleetError, parse

    try:
        return parse(Path(path).read_bytes(), source=path)
    except OSError as error:
        raise UsageError(f"no fleet file {path}: {error.strerror} (TOKENFLEET_FLEET)") from None
    except FleetError as error:
        raise UsageError(str(error)) from None


def work(job: Coroutine[Any, Any, T]) -> T:
    """Run a database job; what goes wrong becomes one line and an exit code."""
    from tokenfleet.database import ERRORS, DatabaseError, DatabaseUrlError, brief, is_transient

    try:
        return asyncio.run(job)
    except DatabaseUrlError as error:
        raise UsageError(str(error)) from None
    except DatabaseError as error:
        raise CommandError(str(error)) from None
    except ERRORS as error:
        what = "Postgres cannot be used" if is_transient(error) else "Postgres refused"
        raise CommandError(f"{what}: {brief(error)}") from None


@contextlib.asynccontextmanager
async def checked_engine(url: str) -> "AsyncIterator[AsyncEngine]":
    """A small pool on a database that has exactly this code's schema."""
    from tokenfleet.database import check_schema, create_engine

    engine = create_engine(url, application="tokenfleet-cli", pool_size=2, statement_timeout_ms=60_000)
    try:
        await check_schema(engine)
        yield engine
    finally:
        await engine.dispose()
