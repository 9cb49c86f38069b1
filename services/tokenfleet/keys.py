"""API keys: who a client is. Decides how keys are made, kept and found; what a tenant may do is the fleet file's word.

A key is shown once, when it is made. Kept is its HMAC-SHA256 under the fleet secret: a stolen table cannot be used,
nor checked by guessing without that secret. Keys are long random strings, so a slow password hash would add nothing.
"""

import datetime
import hmac
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from tokenfleet.database import api_keys, uncancelled

#: what every key begins with, so that scanners for leaked secrets can know one
PREFIX = "tf_"


class KeysError(RuntimeError):
    """An API key could not be made, found or revoked."""


class NoSecretError(KeysError):
    """No fleet secret: keys cannot be hashed. Set TOKENFLEET_SECRET."""

    def __init__(self) -> None:
        super().__init__("no fleet secret: set TOKENFLEET_SECRET (the same for all gateways)")


class UnknownKeyError(KeysError):
    """There is no key with this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no API key has the id {key_id!r}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is kept: never the key itself."""

    id: str
    tenant: str
    #: classes it may use; None: all of its tenant's
    classes: tuple[str, ...] | None = None
    label: str = ""
    created_at: datetime.datetime
    revoked_at: datetime.datetime | None = None


def new_key() -> str:
    """A fresh key: `tf_` and 32 URL-safe characters (192 random bits)."""
    return PREFIX + secrets.token_urlsafe(24)


def hash_key(secret: str, key: str) -> bytes:
    """What is kept of a key: HMAC-SHA256 under the fleet secret. Raises `NoSecretError`."""
    if not secret:
        raise NoSecretError
    return hmac.digest(secret.encode(), b"tokenfleet api key\0" + key.encode("utf-8", "surrogatepass"), "sha256")


async def create(
    engine: AsyncEngine, secret: str, *, tenant: str, classes: Sequence[str] | None = None, label: str = ""
) -> tuple[ApiKey, str]:
    """Make a key for a tenant; returns what is kept and the key itself, which nobody can show again."""
    key = new_key()
    kept = await add(engine, secret, key, tenant=tenant, classes=classes, label=label)
    return kept, key


async def add(
    engine: AsyncEngine,
    secret: str,
    key: str,
    *,
    tenant: str,
    classes: Sequence[str] | None = None,
    label: str = "",
) -> ApiKey:
    """Keep a key that the caller made with `new_key`."""
    values = {
        "id": "key_" + secrets.token_hex(6),
        "key_hash": hash_key(secret, key),
        "tenant": tenant,
        "classes": None if classes is None else list(classes),
        "label": label,
    }

    async def work() -> ApiKey:
        async with engine.begin() as connection:
            row = (await connection.execute(insert(api_keys).values(values).returning(api_keys))).one()
            return _kept(row)

    return await uncancelled(work())


async def list_keys(engine: AsyncEngine, *, tenant: str | None = None) -> list[ApiKey]:
    """All keys, revoked ones too, oldest first."""
    query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
    if tenant is not None:
        query = query.where(api_keys.c.tenant == tenant)

    async def work() -> list[ApiKey]:
        async with engine.connect() as connection:
            return [_kept(row) for row in await connection.execute(query)]

    return await uncancelled(work())


async def revoke(engine: AsyncEngine, key_id: str) -> ApiKey:
    """End a key; a second time changes nothing. Raises `UnknownKeyError`."""
    statement = (
        update(api_keys)
        .where(api_keys.c.id == key_id)
        .values(revoked_at=func.coalesce(api_keys.c.revoked_at, func.now()))
        .returning(api_keys)
    )

    async def work() -> ApiKey:
        async with engine.begin() as connection:
            row = (await connection.execute(statement)).one_or_none()
            if row is None:
                raise UnknownKeyError(key_id)
            return _kept(row)

    return await uncancelled(work())


async def find(engine: AsyncEngine, key_hash: bytes) -> ApiKey | None:
    """The key with this hash, if it exists and was not revoked: one indexed look-up."""
    query = select(api_keys).where(api_keys.c.key_hash == key_hash, api_keys.c.revoked_at.is_(None))

    async def work() -> ApiKey | None:
        async with engine.connect() as connection:
            row = (await connection.execute(query)).one_or_none()
            return None if row is None else _kept(row)

    return await uncancelled(work())


async def active(engine: AsyncEngine) -> dict[bytes, ApiKey]:
    """Every key that may be used, by hash: what a gateway holds in memory and renews."""
    query = select(api_keys).where(api_keys.c.revoked_at.is_(None))

    async def work() -> dict[bytes, ApiKey]:
        async with engine.connect() as connection:
            return {bytes(row.key_hash): _kept(row) for row in await connection.execute(query)}

    return await uncancelled(work())


def _kept(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=row.id,
        tenant=row.tenant,
        classes=None if row.classes is None else tuple(row.classes),
        label=row.label,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
