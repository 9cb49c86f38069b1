"""`tokenfleet watch` and the README's subscriber, as the read-only user, against a real server."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest

from tokenfleet.cli import _nats
from tokenfleet.cli.__main__ import main
from tokenfleet.fleet import parse
from tokenfleet.local.nats import NatsServer
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.permissions import nats_users, user_names
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas.codec import decode, encode
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import subject_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "schemas" / "examples" / "v1"


def example(name: str, **changes: Any) -> Event:
    return msgspec.structs.replace(decode((EXAMPLES / f"{name}.json").read_bytes()), **changes)


def publish(server: NatsServer, *events: Event) -> None:
    async def go() -> None:
        client = await nats.connect(server.url_for("admin"))
        try:
            for event in events:
                await client.jetstream().publish(subject_of(event), encode(event))
        finally:
            await client.close()

    with asyncio.Runner() as runner:
        runner.run(go())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    fleet = parse((ROOT / "services/tokenfleet/local/reference.fleet.toml").read_bytes())
    users = nats_users(fleet, {name: f"secret-of-{name}" for name in user_names(fleet)})
    with NatsServer(tmp_path_factory.mktemp("nats"), users=[user.entry() for user in users]) as running:
        assert isinstance(running, NatsServer)

        async def provision() -> None:
            bus = Bus(
                Settings(nats_url=running.bare_url, nats_user="admin", nats_password="secret-of-admin"),
                Clock(),
                "admin",
            )
            await bus.connect()
            await bus.provision()
            await bus.close()

        with asyncio.Runner() as runner:
            runner.run(provision())
        publish(
            running,
            example("capacity.reported"),
            example("capacity.reported.unreachable"),
            example("capacity.probed"),
            example("goodput.measured"),
            example("placement.assigned"),
            example("placement.held"),
            example("outcome.finished"),
        )
        yield running


def watch(server: NatsServer, *words: str, user: str = "subscriber") -> int:
    return main(["watch", *words, "--nats", server.url_for(user)])


def test_capacity_is_a_table_of_what_holds_now(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator of another team looks which instances are there; unknown is shown as unknown."""
    assert watch(server, "capacity", "--no-follow") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["FACT", "WHAT"]
    assert len(lines) == 3
    text = "\n".join(lines)
    assert "b-chat-1" in text
    assert "chat-8b@1 ready running 37 waiting 2 kv 64%" in text
    assert "doc-32b@? NOT READY (unreachable) running ? waiting ? kv ?" in text
    assert "to c: rtt 92.4 ms loss 0%" in text


def test_json_lines_are_the_messages_themselves(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    """A script reads them with any JSON parser, and back into the Structs."""
    assert watch(server, "goodput", "--json", "--limit", "1") == 0
    (only,) = capsys.readouterr().out.splitlines()
    assert decode(only.encode()) == example("goodput.measured")
    assert json.loads(only)["type"] == "tokenfleet.goodput.v1.measured"


def test_site_model_and_since_narrow_the_stream(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    """One site's view of one model, from five minutes ago."""
    assert (
        watch(server, "placements", "--site", "b", "--model", "chat-8b", "--since", "5m", "--no-follow", user="admin")
        == 0
    )
    text = capsys.readouterr().out
    assert "assigned" in text
    assert "to b-chat-1 by room" in text
    assert "lacks prefill_tokens, predicted wait 240 ms" in text
    assert watch(server, "placements", "--site", "c", "--since", "5m", "--no-follow", user="admin") == 0
    assert capsys.readouterr().out == ""
    assert watch(server, "outcomes", "--since", "1h", "--no-follow", user="admin") == 0
    assert "attempt 1 completed at b/b-chat-1 812+214 tok" in capsys.readouterr().out


def test_credentials_of_a_url_win_and_are_decoded() -> None:
    """A password with a slash is percent-encoded in a URL and nowhere else."""
    assert _nats.credentials("nats://me:p%40ss%2F@[::1]:4333") == {
        "nats_url": "nats://[::1]:4333",
        "nats_user": "me",
        "nats_password": "p@ss/",
    }
    assert _nats.credentials("nats://bus") == {"nats_url": "nats://bus:4222"}
    assert _nats.credentials("nats://u:p@one,nats://u:p@two:4333") == {
        "nats_url": "nats://one:4222,nats://two:4333",
        "nats_user": "u",
        "nats_password": "p",
    }


def test_what_the_user_may_not_read_is_said_plainly(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    """`subscriber` tries the placements: no silent waiting for a message that never comes."""
    assert watch(server, "placements") == 1
    assert "user 'subscriber' may not read stream TF_PLACEMENT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["capacity", "--nats", "http://127.0.0.1:1"], 2, "expected nats://"),
        (["capacity", "--nats", "nats://127.0.0.1:notaport"], 2, "--nats"),
        (["capacity", "--since", "yesterday"], 2, "no time like"),
        (["capacity", "--limit", "0"], 2, "no positive number"),
        (["weather"], 2, "invalid choice"),
    ],
)
def test_wrong_words_end_with_2_and_a_reason(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command or its input is wrong."""
    try:
        got = main(["watch", *words])
    except SystemExit as end:
        got = int(end.code or 0)
    assert got == code
    assert said in capsys.readouterr().err


def test_it_needs_nothing_but_msgspec_and_nats_py_and_follows_live(server: NatsServer) -> None:
    """`pip install tokenfleet` on a laptop: no aiohttp, no SQLAlchemy; a new report appears, Ctrl-C ends it."""
    program = (
        "import sys\n"
        "for name in ('aiohttp', 'sqlalchemy', 'asyncpg', 'uvloop', 'prometheus_client', 'tokenizers', 'jinja2'):\n"
        "    sys.modules[name] = None\n"
        "from tokenfleet.cli.__main__ import main\n"
        "sys.exit(main(['watch', 'capacity', '--site', 'd', '--json', '--limit', '2']))\n"
    )
    with following(server, ["-c", program]) as process:
        publish(server, example("capacity.reported", id="d:1", site="d", instance="d-1"))
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["instance"] == "d-1"
        publish(server, example("capacity.reported", id="d:2", site="d", instance="d-2"))
        assert json.loads(process.stdout.readline())["instance"] == "d-2"
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_the_example_of_the_readme_runs_as_printed(server: NatsServer) -> None:
    """Ten lines of Python that somebody pastes must show the fleet."""
    source = ROOT / "docs" / "examples" / "subscribe.py"
    body = source.read_text().split("async def main")[1]
    assert len([row for row in body.splitlines() if row.strip()]) <= 11
    with following(server, [str(source)]) as process:
        assert process.stdout is not None
        seen = {process.stdout.readline().strip() for _ in range(2)}
        assert seen == {"b-chat-1 chat-8b ready 37", "c-doc-1 doc-32b unreachable None"}


class following:
    """A Python process with the subscriber's URL that is ended with the test."""

    def __init__(self, server: NatsServer, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")},
                "TOKENFLEET_NATS_URL": server.url_for("subscriber"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "subprocess.Popen[str]":
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate()
