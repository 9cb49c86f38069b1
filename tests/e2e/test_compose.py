"""docker-compose.yml, run for real: the fleet in containers, as an operator of one host has it.

`make test-compose`; needs a Docker engine with compose v2. NATS_IMAGE, POSTGRES_IMAGE and PYTHON_IMAGE name other base
images; without POSTGRES_IMAGE an older local Postgres serves where the named one cannot be had.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from tokenfleet.local.ports import free_ports
from tokenfleet_schemas import codec
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.goodput import GoodputMeasured

ROOT = Path(__file__).parents[2]
PROJECT = f"tokenfleet-test-{os.getpid()}"
# the first test's set-up builds the image
pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]


def _works(*words: str, timeout_s: float = 20) -> bool:
    try:
        return subprocess.run(words, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _postgres_image() -> str:
    wished = os.environ.get("POSTGRES_IMAGE")
    if wished:
        return wished
    for image in ("postgres:18", "postgres:17"):
        if _works("docker", "image", "inspect", image) or _works("docker", "pull", "-q", image, timeout_s=180):
            return image
    pytest.fail("no Postgres image can be had")


class Stack:
    """The running project."""

    def __init__(self, env_file: Path) -> None:
        self.env_file = env_file
        ports = free_ports(2)
        self.api = f"http://127.0.0.1:{ports[0]}/v1"
        self.nats = f"nats://127.0.0.1:{ports[1]}"
        # two digits are appended to the prefix: 213 → 21301 …
        self.metrics_prefix = next(str(p // 100) for p in free_ports(50) if p % 100 < 50)
        self.environment = {
            **os.environ,
            "POSTGRES_IMAGE": _postgres_image(),
            "TF_API_PORT": str(ports[0]),
            "TF_NATS_PORT": str(ports[1]),
            "TF_METRICS_PREFIX": self.metrics_prefix,
        }

    def compose(self, *words: str, timeout_s: float = 120) -> str:
        """One compose command; fails with what it said."""
        command = ["docker", "compose", "-p", PROJECT, "--env-file", str(self.env_file), *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def secret(self, name: str) -> str:
        found = re.search(rf"(?m)^{name}=(.*)$", self.env_file.read_text())
        assert found is not None
        return found[1]

    def get(self, url: str, key: str = "") -> tuple[int, bytes]:
        return _http(url, None, key)

    def ask(self, key: str, *, model: str = "chat-8b", tokens: int = 8) -> tuple[int, dict[str, Any]]:
        body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": "Say something."}]}
        try:
            status, answer = _http(f"{self.api}/chat/completions", body, key)
        except OSError as error:
            # the container is being started again
            return 0, {"error": str(error)}
        found: dict[str, Any] = json.loads(answer)
        return status, found

    def sql(self, statement: str) -> str:
        words = ("exec", "-T", "postgres", "psql", "-h", "127.0.0.1", "-U", "tokenfleet", "-d", "tokenfleet", "-tA")
        password = self.secret("TF_POSTGRES_PASSWORD")
        return self.compose(words[0], "-e", f"PGPASSWORD={password}", *words[1:], "-c", statement).strip()


def _http(url: str, body: dict[str, Any] | None, key: str) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not _works("docker", "version"):
        pytest.skip("no Docker engine answers here: docker-compose.yml is only checked as a file")
    env_file = tmp_path_factory.mktemp("compose") / "env"
    subprocess.run([sys.executable, str(ROOT / "deploy" / "make_env.py"), str(env_file)], check=True)
    stack = Stack(env_file)
    try:
        stack.compose("build", timeout_s=900)
        try:
            stack.compose("up", "--wait", "--wait-timeout", "240", timeout_s=300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{stack.compose('logs', '--tail', '15')[-12_000:]}") from None
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", timeout_s=180)


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    """An API key, made as the operator makes one."""
    out = stack.compose("exec", "-T", "gateway", "tokenfleet", "keys", "create", "--tenant", "studio", "--json")
    return str(json.loads(out)["key"])


def _answered(stack: Stack, key: str, *, within_s: float, model: str = "chat-8b") -> dict[str, Any]:
    """Ask until it works: a new key and a restarted service need a moment to be known."""
    end = time.monotonic() + within_s
    while True:
        status, answer = stack.ask(key, model=model)
        if status == 200:
            return answer
        assert time.monotonic() < end, f"{status}: {answer}"
        time.sleep(0.5)


@pytest.mark.parametrize("model", ["chat-8b", "chat-8b@2", "doc-32b"])
def test_requests_are_answered(stack: Stack, key: str, model: str) -> None:
    """Every service ran in its container, and none could reach the other."""
    answer = _answered(stack, key, within_s=30, model=model)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0
    status, _ = stack.ask("wrong-key")
    assert status == 401


async def test_the_subscriber_reads_capacity_and_goodput_and_nothing_else(stack: Stack, key: str) -> None:
    """A dashboard's user must see the fleet, and must not see who asks what."""
    user, password = "subscriber", stack.secret("TF_NATS_PASSWORD_SUBSCRIBER")
    loop = asyncio.get_running_loop()
    denied: asyncio.Future[str] = loop.create_future()

    async def on_error(error: Exception) -> None:
        if not denied.done():
            denied.set_result(str(error).lower())

    client = await nats.connect(
        stack.nats, user=user, password=password, inbox_prefix=f"_INBOX_{user}", error_cb=on_error
    )
    try:
        capacity: asyncio.Queue[bytes] = asyncio.Queue()
        goodput: asyncio.Queue[bytes] = asyncio.Queue()

        async def on_capacity(message: Any) -> None:
            capacity.put_nowait(message.data)

        async def on_goodput(message: Any) -> None:
            goodput.put_nowait(message.data)

        await client.subscribe("tf.v1.capacity.reported.*.*.*", cb=on_capacity)
        await client.subscribe("tf.v1.goodput.measured.*.*.*", cb=on_goodput)
        await client.flush()
        async with asyncio.timeout(30):
            report = codec.decode(await capacity.get())
        assert isinstance(report, CapacityReported)
        assert report.site in {"b", "c", "d"}
        await asyncio.to_thread(_answered, stack, key, within_s=30)
        async with asyncio.timeout(90):
            while True:
                measured = codec.decode(await goodput.get())
                assert isinstance(measured, GoodputMeasured)
                if measured.completed:
                    break
        assert measured.output_tokens > 0

        await client.subscribe("tf.v1.request.received.>", cb=on_capacity)
        async with asyncio.timeout(10):
            assert "permissions violation" in await denied
    finally:
        await client.close()


@pytest.mark.parametrize("service", ["fleetmind", "tokenpilot-b", "gateway"])
def test_a_restarted_service_comes_back(stack: Stack, key: str, service: str) -> None:
    """An upgrade restarts one service after the other; the rest must not need it too."""
    stack.compose("restart", service)
    answer = _answered(stack, key, within_s=45)
    assert answer["choices"][0]["message"]["content"]


def test_the_ledger_has_every_request_once(stack: Stack, key: str) -> None:
    """Goodput is read from Postgres: each answered request has its one final row there, with its tokens."""
    before = int(stack.sql("SELECT count(*) FROM attempts WHERE final AND outcome = 'completed'"))
    answers = [_answered(stack, key, within_s=30) for _ in range(5)]
    tokens = sum(int(answer["usage"]["completion_tokens"]) for answer in answers)
    end = time.monotonic() + 30
    while (found := int(stack.sql("SELECT count(*) FROM attempts WHERE final AND outcome = 'completed'"))) < before + 5:
        assert time.monotonic() < end, f"{found - before} of 5 rows"
        time.sleep(0.5)
    newest = "SELECT output_tokens FROM attempts WHERE final ORDER BY finished_at DESC LIMIT 5"
    assert int(stack.sql(f"SELECT sum(output_tokens) FROM ({newest}) AS newest")) == tokens
    doubled = "SELECT count(*) FROM (SELECT request_id FROM attempts WHERE final GROUP BY 1 HAVING count(*) > 1) AS d"
    assert int(stack.sql(doubled)) == 0


def test_metrics_are_published_for_every_service(stack: Stack) -> None:
    """Prometheus on the host scrapes the published ports."""
    config = json.loads(stack.compose("config", "--format", "json"))
    ports = [
        int(port["published"])
        for service in config["services"].values()
        for port in service.get("ports", [])
        if port["target"] == 9090
    ]
    assert len(ports) == 13
    for port in ports:
        status, page = stack.get(f"http://127.0.0.1:{port}/metrics")
        assert status == 200
        assert b"# TYPE" in page
