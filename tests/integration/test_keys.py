"""API keys on a real Postgres, and the command that makes them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tokenfleet import keys
from tokenfleet.database import create_engine

FLEET = """
[fleet]
name = "test"
default_class = "chat"
[sites.a]
zone = "eu"
entry = true
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 1000
[classes.chat]
ttft_ms = 500
[classes.batch]
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
"""


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(database_url)
    yield made
    await made.dispose()


async def test_a_key_is_found_by_its_hash_until_it_is_revoked(engine: AsyncEngine) -> None:
    """A leaked key is revoked: the next look-up must not know it, while the tenant's other key lives on."""
    kept, key = await keys.create(engine, "secret", tenant="acme", classes=["chat"], label="laptop")
    other, other_key = await keys.create(engine, "secret", tenant="acme")
    assert await keys.find(engine, keys.hash_key("secret", key)) == kept
    assert (kept.tenant, kept.classes, kept.label) == ("acme", ("chat",), "laptop")
    assert other.classes is None

    revoked = await keys.revoke(engine, kept.id)
    assert revoked.revoked_at is not None
    assert (await keys.revoke(engine, kept.id)).revoked_at == revoked.revoked_at
    assert await keys.find(engine, keys.hash_key("secret", key)) is None
    assert await keys.active(engine) == {keys.hash_key("secret", other_key): other}
    assert {found.id for found in await keys.list_keys(engine)} == {kept.id, other.id}
    with pytest.raises(keys.UnknownKeyError, match="nonesuch"):
        await keys.revoke(engine, "nonesuch")


async def test_nothing_in_the_table_can_be_used_as_a_key(engine: AsyncEngine, database_url: str) -> None:
    """A backup of the database falls into wrong hands: no key and nothing that hashes without the secret is in it."""
    _, key = await keys.create(engine, "secret", tenant="acme")
    connection = await asyncpg.connect(database_url)
    try:
        row = await connection.fetchrow("SELECT * FROM api_keys")
    finally:
        await connection.close()
    assert row is not None
    assert key.removeprefix("tf_") not in str(dict(row))
    assert row["key_hash"] == keys.hash_key("secret", key) != keys.hash_key("other secret", key)


def test_keys_are_long_random_and_url_safe() -> None:
    """Guessing and shell quoting: 22 characters or more of [A-Za-z0-9_-], never the same twice."""
    made = {keys.new_key() for _ in range(1000)}
    assert len(made) == 1000
    assert all(re.fullmatch(r"tf_[A-Za-z0-9_-]{22,}", key) for key in made)
    with pytest.raises(keys.NoSecretError, match="TOKENFLEET_SECRET"):
        keys.hash_key("", "tf_x")


def tokenfleet(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    return subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", *words],
        env=clean | environ,
        capture_output=True,
        text=True,
        check=False,
    )


async def test_the_command_makes_lists_and_revokes(database_url: str, tmp_path: Path) -> None:
    """The operator's whole road: a key printed once, listed without it, revoked by its id."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    environ = {
        "TOKENFLEET_POSTGRES_URL": database_url,
        "TOKENFLEET_SECRET": "secret",
        "TOKENFLEET_FLEET": str(fleet),
    }
    made = tokenfleet("keys", "create", "--tenant", "acme", "--class", "chat", "--json", **environ)
    assert made.returncode == 0, made.stderr
    answer = json.loads(made.stdout)
    assert set(answer) == {"id", "key", "tenant"}
    listed = tokenfleet("keys", "list", **environ)
    assert answer["id"] in listed.stdout
    assert answer["key"] not in listed.stdout
    assert tokenfleet("keys", "revoke", answer["id"], **environ).returncode == 0
    (shown,) = json.loads(tokenfleet("keys", "list", "--json", **environ).stdout)["keys"]
    assert shown["revoked_at"] is not None

    for words, code, said in (
        (("create", "--tenant", "nobody"), 2, "no tenant 'nobody'"),
        (("create", "--tenant", "acme", "--class", "batch"), 2, "may not use class 'batch'"),
        (("revoke", "key_none"), 1, "no API key has the id 'key_none'"),
        (("list", "--postgres", "mysql://x/y"), 2, "postgresql://"),
        (("list", "--postgres", "postgresql://u:hidden@127.0.0.1:1/x"), 1, "Postgres cannot be used"),
    ):
        failed = tokenfleet("keys", *words, **environ)
        assert (failed.returncode, said in failed.stderr) == (code, True), failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1
        assert "hidden" not in failed.stderr
    no_secret = tokenfleet("keys", "create", "--tenant", "acme", **(environ | {"TOKENFLEET_SECRET": ""}))
    assert (no_secret.returncode, "TOKENFLEET_SECRET" in no_secret.stderr) == (2, True)
