"""What every test may ask for: a real NATS, a real Postgres, and servers of its own to kill.

The same tests run everywhere: against containers where a Docker engine answers and has (or can get) the images, against
the embedded servers elsewhere. `TOKENFLEET_TEST_SERVERS=docker|embedded` decides it by hand.

===================  ========  ==========================================================================
fixture              scope     is
===================  ========  ==========================================================================
nats_url             session   a NATS with JetStream, shared
clean_nats_url       function  the same one without any stream, consumer or bucket
postgres_url         session   a Postgres superuser's URL, shared; for creating databases
empty_database_url   function  a database of one's own, empty
database_url         function  a database of one's own with the schema applied
nats_server          function  an embedded `NatsServer` of one's own: `.url`, `.kill()`, `.start()`, `.restart()`
postgres_server      function  an embedded `PostgresServer` of one's own, likewise
===================  ========  ==========================================================================
"""

import asyncio
import functools
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import pytest

from tokenfleet.local.nats import NatsServer
from tokenfleet.local.postgres import PostgresServer

T = TypeVar("T")
NATS_IMAGE = os.environ.get("NATS_IMAGE", "nats:2.15")
POSTGRES_IMAGE = os.environ.get("POSTGRES_IMAGE", "postgres:18")
_numbers = itertools.count(1)


def run_apart(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a loop of its own, leaving the tests' loop alone."""
    with asyncio.Runner() as runner:
        return runner.run(main())


def docker(*words: str, timeout_s: float = 20) -> bool:
    """Whether this docker command works here; False too where there is no docker."""
    try:
        done = subprocess.run(["docker", *words], timeout=timeout_s, capture_output=True, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@functools.cache
def docker_answers() -> bool:
    """Whether a Docker engine answers."""
    return docker("version", "--format", "{{.Server.Version}}")


def _in_docker(image: str) -> bool:
    wish = os.environ.get("TOKENFLEET_TEST_SERVERS", "auto")
    if wish == "embedded":
        return False
    if docker_answers() and (docker("image", "inspect", image) or docker("pull", "-q", image, timeout_s=120)):
        return True
    if wish == "docker":
        raise pytest.UsageError(f"TOKENFLEET_TEST_SERVERS=docker, but no engine answers with {image}")
    return False


def _container(image: str, port: int, ready: str, **settings: Any) -> Iterator[tuple[str, int]]:
    """A running container: (host, published port)."""
    # no helper container that would have to be pulled, and ports are looked for on the engine's host even where this
    # process runs in a container itself
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    os.environ.setdefault("TESTCONTAINERS_CONNECTION_MODE", "docker_host")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy

        container = DockerContainer(image, **settings).with_exposed_ports(port)
        container.waiting_for(LogMessageWaitStrategy(ready).with_startup_timeout(60))
        container.start()
    try:
        yield container.get_container_host_ip(), int(container.get_exposed_port(port))
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            container.stop()


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with JetStream, shared by the session."""
    if _in_docker(NATS_IMAGE):
        for host, port in _container(NATS_IMAGE, 4222, "Server is ready", command="-js"):
            yield f"nats://{host}:{port}"
        return
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        assert isinstance(server, NatsServer)
        yield server.url


@pytest.fixture
def clean_nats_url(nats_url: str) -> Iterator[str]:
    """The shared server without streams, before and after."""
    run_apart(lambda: _drop_streams(nats_url))
    yield nats_url
    run_apart(lambda: _drop_streams(nats_url))


async def _drop_streams(url: str) -> None:
    import nats

    client = await nats.connect(url, max_reconnect_attempts=5)
    try:
        manager = client.jsm()
        while found := await manager.streams_info():
            for stream in found:
                assert stream.config.name is not None
                await manager.delete_stream(stream.config.name)
    finally:
        await client.close()


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Postgres server, shared by the session: its superuser's URL."""
    if _in_docker(POSTGRES_IMAGE):
        settings = {"POSTGRES_USER": "tokenfleet", "POSTGRES_PASSWORD": "test", "POSTGRES_DB": "tokenfleet"}
        # the entrypoint starts the server twice: only the second start listens on TCP
        ready = r"listening on IPv4 address[\s\S]*ready to accept connections"
        for host, port in _container(POSTGRES_IMAGE, 5432, ready, env=settings):
            yield f"postgresql://tokenfleet:test@{host}:{port}/tokenfleet"
        return
    with PostgresServer(tmp_path_factory.mktemp("postgres") / "data", durable=False) as server:
        assert isinstance(server, PostgresServer)
        yield server.url


def _with_database(url: str, database: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{database}"))


async def _execute(url: str, *statements: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def _own_database(postgres_url: str, template: str) -> Iterator[str]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    admin = _with_database(postgres_url, "postgres")
    run_apart(lambda: _execute(admin, f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
    yield _with_database(postgres_url, name)
    run_apart(lambda: _execute(admin, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'))


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    """A database of the test's own, empty."""
    yield from _own_database(postgres_url, "template1")


@pytest.fixture(scope="session")
def migrated_template(postgres_url: str) -> str:
    """The name of a database with the schema applied, from which copies are cheap."""
    name = f"template_{os.getpid()}"
    run_apart(lambda: _execute(_with_database(postgres_url, "postgres"), f'CREATE DATABASE "{name}"'))
    migrate(_with_database(postgres_url, name))
    return name


def migrate(url: str) -> None:
    """Apply the schema as an operator does; fails with the command's words."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", "db", "migrate"],
        env={**os.environ, "TOKENFLEET_POSTGRES_URL": url},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"tokenfleet db migrate: {done.stdout}{done.stderr}"


@pytest.fixture
def database_url(postgres_url: str, migrated_template: str) -> Iterator[str]:
    """A database of the test's own with the schema applied."""
    yield from _own_database(postgres_url, migrated_template)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server to kill; it restarts on the same port with the same streams."""
    with NatsServer(tmp_path / "nats") as server:
        assert isinstance(server, NatsServer)
        yield server


@pytest.fixture
def postgres_server(tmp_path: Path) -> Iterator[PostgresServer]:
    """A server to kill; it restarts on the same port with the same data (database `tokenfleet`, no schema)."""
    with PostgresServer(tmp_path / "postgres", durable=False) as server:
        assert isinstance(server, PostgresServer)
        yield server
