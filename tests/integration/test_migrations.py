"""The schema: applied once however many start at once, refused when newer, found wherever it was installed."""

import asyncio
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from tokenfleet import database

ROOT = Path(__file__).resolve().parents[2]


def tokenfleet(*words: str, url: str, python: str = sys.executable) -> "subprocess.Popen[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    return subprocess.Popen(
        [python, "-m", "tokenfleet.cli", *words],
        env=clean | {"TOKENFLEET_POSTGRES_URL": url},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def rows(url: str, query: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def test_five_replicas_start_on_an_empty_database(empty_database_url: str) -> None:
    """O01: three pods ran the upgrade at once; elsewhere the loser crash-looped. One runs it, the others wait."""
    started = [tokenfleet("db", "migrate", "--json", url=empty_database_url) for _ in range(5)]
    answers = []
    for process in started:
        out, error = await asyncio.to_thread(process.communicate, None, 60)
        assert process.returncode == 0, error
        answers.append(json.loads(out))
    head = answers[0]["to"]
    assert [answer["changed"] for answer in answers].count(True) == 1
    assert {answer["to"] for answer in answers} == {head}
    assert await rows(empty_database_url, "SELECT version_num FROM alembic_version") == [(head,)]


async def test_many_races_in_one_process(empty_database_url: str) -> None:
    """The same twenty times from nothing, each with five migrating at the same moment."""
    for _ in range(20):
        results = await asyncio.gather(*(database.migrate(empty_database_url) for _ in range(5)))
        assert [before.found for before, _ in results].count("") == 1
        assert all(after.current for _, after in results)
        await execute(empty_database_url, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")


async def test_the_tables_are_those_that_the_code_knows(database_url: str) -> None:
    """A column in the code and not in a migration would fail at the first insert of a real installation."""

    def differences(connection: Connection) -> list[object]:
        def include(_object: object, name: str | None, *_more: object) -> bool:
            return name is None or not database.is_partition(name)

        context = MigrationContext.configure(connection, opts={"include_object": include})
        return list(compare_metadata(context, database.metadata))

    engine = database.create_engine(database_url)
    async with engine.connect() as connection:
        found = await connection.run_sync(differences)
    await engine.dispose()
    assert found == []


async def test_an_old_binary_stops_at_a_newer_schema(database_url: str) -> None:
    """O01: an old binary called a newer schema "behind" and went on. It must say "ahead" and write nothing."""
    await execute(database_url, "UPDATE alembic_version SET version_num = '9999_from_the_future'")
    for words in (("db", "migrate"), ("db", "wait", "--timeout", "5"), ("keys", "list")):
        process = tokenfleet(*words, url=database_url)
        _, error = await asyncio.to_thread(process.communicate, None, 30)
        assert (process.returncode, "schema ahead" in error) == (1, True), error
    process = tokenfleet("db", "current", "--json", url=database_url)
    out, _ = await asyncio.to_thread(process.communicate, None, 30)
    assert (process.returncode, json.loads(out)["verdict"]) == (1, "ahead")
    assert await rows(database_url, "SELECT version_num FROM alembic_version") == [("9999_from_the_future",)]


async def test_waiting_ends_when_somebody_migrates(empty_database_url: str) -> None:
    """A service starts before the migration job: it waits for it instead of failing."""
    with pytest.raises(database.SchemaBehindError, match="tokenfleet db migrate"):
        await database.wait_for_schema(empty_database_url, timeout_s=0.1)
    waiting = asyncio.create_task(database.wait_for_schema(empty_database_url, timeout_s=30, poll_s=0.05))
    await database.migrate(empty_database_url)
    assert (await waiting).current


async def test_no_server_is_said_in_one_line() -> None:
    """The URL is wrong: one line that names the trouble and not the password."""
    process = tokenfleet("db", "migrate", url="postgresql://u:hidden@127.0.0.1:1/x")
    _, error = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 1
    assert error.startswith("tokenfleet db: Postgres cannot be used")
    assert "hidden" not in error
    process = tokenfleet("db", "migrate", url="")
    _, error = await asyncio.to_thread(process.communicate, None, 30)
    assert (process.returncode, "TOKENFLEET_POSTGRES_URL" in error) == (2, True)


def _install_copy(target: Path) -> None:
    """What a wheel leaves behind, without building one: packages, shared data, the installer's record."""
    site = target / "lib"
    for source in (ROOT / "services" / "tokenfleet", ROOT / "schemas" / "tokenfleet_schemas"):
        shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    data = target / "share" / "tokenfleet" / "migrations"
    shutil.copytree(ROOT / "migrations", data, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "tokenfleet-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenfleet\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(
        "tokenfleet/__init__.py,,\n../share/tokenfleet/migrations/env.py,,\ntokenfleet-0.1.0.dist-info/METADATA,,\n"
    )


async def test_an_installed_package_finds_its_migrations(empty_database_url: str, tmp_path: Path) -> None:
    """A wheel has no checkout around it: the scripts are where the installer put the shared data."""
    _install_copy(tmp_path)
    script = (
        "import asyncio, sys; from tokenfleet import database;"
        "print(database.__file__, database.migrations_directory());"
        "asyncio.run(database.migrate(sys.argv[1]))"
    )
    packages = sysconfig.get_path("purelib")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path / 'lib')!r}, {packages!r}]; {script}",
        empty_database_url,
        cwd="/",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    module, scripts = out.decode().split()
    assert module.startswith(str(tmp_path))
    assert Path(scripts) == tmp_path / "share" / "tokenfleet" / "migrations"
    assert len(await rows(empty_database_url, "SELECT version_num FROM alembic_version")) == 1


def test_no_migrations_anywhere_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken package must not look like a schema without revisions."""
    monkeypatch.setattr(database, "__file__", str(tmp_path / "a" / "b" / "database.py"))

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    # an editable installation puts a copy under its prefix too
    monkeypatch.setattr(database, "sys", SimpleNamespace(prefix=str(tmp_path), base_prefix=str(tmp_path)))
    monkeypatch.setattr(database, "sysconfig", SimpleNamespace(get_path=lambda _name: str(tmp_path)))
    with pytest.raises(database.MigrationsMissingError, match=r"looked in .*share/tokenfleet/migrations"):
        database.migrations_directory()
