"""The embedded servers, and the fixtures that stand on them."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import asyncpg
import nats
import pytest

from tokenfleet.local.errors import DataDirError, NotReadyError
from tokenfleet.local.nats import NatsServer
from tokenfleet.local.postgres import PostgresServer
from tokenfleet.local.processes import wait_until_gone


async def test_acknowledged_messages_survive_a_killed_nats(nats_server: NatsServer) -> None:
    """An operator's broker was OOM-killed; whatever it had acknowledged must be there after the restart, same URL."""
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(name="FACTS", subjects=["facts.>"])
    for number in range(100):
        await client.jetstream().publish("facts.a", str(number).encode())
    await client.close()

    before = nats_server.url
    nats_server.kill()
    nats_server.start()

    assert nats_server.url == before
    client = await nats.connect(nats_server.url)
    found = await client.jsm().stream_info("FACTS")
    assert found.state.messages == 100
    await client.close()


async def test_committed_rows_survive_a_killed_postgres(postgres_server: PostgresServer) -> None:
    """A killed database comes back on its URL with every committed row, its old lock file not in the way."""
    connection = await asyncpg.connect(postgres_server.url)
    await connection.execute("CREATE TABLE t (n int)")
    await connection.executemany("INSERT INTO t VALUES ($1)", [(n,) for n in range(50)])

    postgres_server.kill()
    postgres_server.start()

    connection = await asyncpg.connect(postgres_server.url)
    assert await connection.fetchval("SELECT count(*) FROM t") == 50
    await connection.close()


async def test_postgres_asks_for_the_password(postgres_server: PostgresServer) -> None:
    """Other users of the machine reach the TCP port: without the password they must not get in."""
    wrong = postgres_server.url.replace(postgres_server.url.split(":")[2].split("@")[0], "guess")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(wrong)
    assert oct((postgres_server.data.stat().st_mode) & 0o777) == "0o700"


async def test_nats_users_are_enforced(tmp_path: Path) -> None:
    """A user sees its own subjects only, and nobody enters without credentials."""
    users = [
        {"user": "writer", "password": "one"},
        {
            "user": "reader",
            "password": "two",
            "permissions": {"publish": {"deny": ">"}, "subscribe": {"allow": "facts.>"}},
        },
    ]
    with NatsServer(tmp_path / "nats", users=users) as server:
        assert isinstance(server, NatsServer)
        denied: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def on_error(error: Exception) -> None:
            if not denied.done():
                denied.set_result(str(error))

        reader = await nats.connect(server.url_for("reader"), error_cb=on_error)
        await reader.publish("facts.a", b"")
        assert "permissions violation" in (await asyncio.wait_for(denied, 5)).lower()
        await reader.close()
        stranger, words = await asyncio.open_connection(server.host, server.port)
        words.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        answer = await asyncio.wait_for(stranger.readuntil(b"-ERR"), 5) + await stranger.readline()
        assert b"Authorization Violation" in answer
        words.close()


def test_a_first_start_cut_short_is_begun_anew(tmp_path: Path) -> None:
    """Ctrl-C during the very first start left half a data directory, and every later start failed on it."""
    data = tmp_path / "postgres"
    data.mkdir()
    (data / "PG_VERSION").write_text("18\n")
    with PostgresServer(data, durable=False) as server:
        assert server.pid is not None


def test_data_of_another_major_version_is_refused(tmp_path: Path) -> None:
    """After an upgrade of the wheel the old directory must be named, not touched."""
    data = tmp_path / "postgres"
    data.mkdir()
    (data / "PG_VERSION").write_text("16\n")
    (data / ".complete").touch()
    with pytest.raises(DataDirError, match="Postgres 16"):
        PostgresServer(data).start()


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """A taken port is named by the server's own log line, so the error has to carry it."""
    with NatsServer(tmp_path / "one") as first:
        assert isinstance(first, NatsServer)
        second = NatsServer(tmp_path / "two", port=first.port)
        with pytest.raises(NotReadyError, match="address already in use"):
            second.start(timeout_s=10)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_servers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """kill -9 of the supervisor must not leave a database behind that blocks the next start."""
    script = textwrap.dedent(
        """
        import pathlib, sys, time
        from tokenfleet.local.nats import NatsServer
        from tokenfleet.local.postgres import PostgresServer
        root = pathlib.Path(sys.argv[1])
        nats, postgres = NatsServer(root / "nats"), PostgresServer(root / "postgres", durable=False)
        nats.start()
        postgres.start()
        print(nats.pid, postgres.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    for child in children:
        assert wait_until_gone(child, timeout_s=10)
    with PostgresServer(tmp_path / "postgres", durable=False) as again:
        assert again.pid is not None


async def test_shared_servers_give_each_test_a_clean_namespace(clean_nats_url: str, empty_database_url: str) -> None:
    """Tests that find each other's streams or rows pass and fail by order."""
    client = await nats.connect(clean_nats_url)
    assert await client.jsm().streams_info() == []
    await client.jetstream().add_stream(name="LEFT_BEHIND", subjects=["left"])
    await client.close()
    connection = await asyncpg.connect(empty_database_url)
    assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
    await connection.close()
