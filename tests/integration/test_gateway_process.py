"""The gateway as a process of its own: keys from a real Postgres, orderly end, clear words when it cannot start."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.integration.gateway_bench import FLEET

from tokenfleet import keys
from tokenfleet.database import create_engine
from tokenfleet.local.ports import free_ports


def environment(tmp_path: Path, nats_url: str, postgres_url: str, **changes: str) -> dict[str, str]:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    ours = {
        "TOKENFLEET_NATS_URL": nats_url,
        "TOKENFLEET_POSTGRES_URL": postgres_url,
        "TOKENFLEET_FLEET": str(fleet),
        "TOKENFLEET_SITE": "a",
        "TOKENFLEET_SECRET": "test-secret",
        **changes,
    }
    return {**{k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}, **ours}


@asynccontextmanager
async def process(env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenfleet.gateway", env=env, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def until_listening(started: asyncio.subprocess.Process) -> str:
    """Its log until it listens."""
    assert started.stderr is not None
    log = ""
    async with asyncio.timeout(20):
        while "listening for clients" not in log:
            line = await started.stderr.readline()
            assert line, log
            log += line.decode()
    return log


async def test_a_key_of_postgres_opens_and_its_revocation_is_seen_by_the_next_gateway(
    tmp_path: Path, nats_url: str, database_url: str
) -> None:
    """From `keys create` to a client's call, and SIGTERM ends it in order; health is on the API's port too."""
    database = create_engine(database_url)
    try:
        kept, key = await keys.create(database, "test-secret", tenant="acme", label="test")
        (port,) = free_ports(1)
        env = environment(tmp_path, nats_url, database_url, TOKENFLEET_API_PORT=str(port))
        base = f"http://127.0.0.1:{port}"
        statuses = []
        for revoked in (False, True):
            if revoked:
                await keys.revoke(database, kept.id)
            async with process(env) as gateway, aiohttp.ClientSession() as client:
                log = await until_listening(gateway)
                for path in ("/healthz", "/readyz"):
                    async with client.get(base + path) as answer:
                        assert answer.status == 200
                async with client.get(base + "/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
                    statuses.append(answer.status)
                gateway.send_signal(signal.SIGTERM)
                assert gateway.stderr is not None
                log += (await asyncio.wait_for(gateway.stderr.read(), 15)).decode()
                assert await asyncio.wait_for(gateway.wait(), 15) == 0, log
                assert key not in log
        assert statuses == [200, 401]
    finally:
        await database.dispose()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"TOKENFLEET_SECRET": ""}, "TOKENFLEET_SECRET"),
        ({"TOKENFLEET_SITE": "nowhere"}, "nowhere"),
        ({"TOKENFLEET_POSTGRES_URL": ""}, "TOKENFLEET_POSTGRES_URL"),
    ],
)
async def test_what_is_missing_is_said_with_exit_code_2(
    tmp_path: Path, nats_url: str, changes: dict[str, str], said: str
) -> None:
    """One line that names the variable, no traceback."""
    async with process(environment(tmp_path, nats_url, "postgresql://x@127.0.0.1:1/x", **changes)) as gateway:
        assert gateway.stderr is not None
        log = (await asyncio.wait_for(gateway.stderr.read(), 20)).decode()
        assert await gateway.wait() == 2, log
        assert said in log
        assert "Traceback" not in log
