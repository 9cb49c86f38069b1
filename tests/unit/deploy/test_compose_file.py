"""docker-compose.yml against what the services really read, without an engine."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenfleet.fleet import parse
from tokenfleet.local.cluster import members
from tokenfleet.local.fleetfile import REFERENCE
from tokenfleet.runtime.permissions import user_name, user_names
from tokenfleet.runtime.settings import Settings

ROOT = Path(__file__).parents[3]
#: settings that may stay at their default in a container: names of replicas are made up, unique by construction
OPTIONAL = {"TOKENFLEET_REPLICA", "TOKENFLEET_RECORD_DIR"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return found


@pytest.fixture(scope="module")
def image_env() -> dict[str, str]:
    """What the image sets by itself."""
    return dict(re.findall(r"(TOKENFLEET_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))


def _ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: s for name, s in compose["services"].items() if "tokenfleet" in s["image"]}


def test_every_variable_is_a_setting(compose: dict[str, Any], image_env: dict[str, str]) -> None:
    """A renamed setting lived on in the compose file, and the service ran with its default."""
    known = {f"TOKENFLEET_{field.upper()}" for field in Settings.__struct_fields__}
    for name, service in _ours(compose).items():
        environment = {**image_env, **service["environment"]}
        assert set(environment) <= known, name
        # the types fit too
        Settings.load({k: re.sub(r"\$\{[^}]*\}", "info", str(v)) for k, v in environment.items()})


def test_no_setting_is_missing(compose: dict[str, Any], image_env: dict[str, str]) -> None:
    """A new setting must reach the compose file, or be known to need nothing there."""
    used = set(image_env).union(*(service["environment"] for service in _ours(compose).values()))
    known = {f"TOKENFLEET_{field.upper()}" for field in Settings.__struct_fields__}
    assert known - used == OPTIONAL


def test_it_runs_what_up_runs(compose: dict[str, Any]) -> None:
    """The compose file fell behind: a service that `tokenfleet up` starts was not in it."""
    fleet = parse(REFERENCE.read_bytes())
    sites = [name for name, site in fleet.sites.items() if site.instances]
    expected = {(m.service, m.site) for m in members(fleet) if m.service != "emulator"}
    expected |= {("emulator", site) for site in sites}
    running = {
        (service["command"][1], service["environment"]["TOKENFLEET_SITE"])
        for service in _ours(compose).values()
        if service["command"][0] == "run"
    }
    assert running == expected
    needs_database = {m.service for m in members(fleet) if m.database}
    for name, service in _ours(compose).items():
        if service["command"][0] != "run":
            continue
        kind, site = service["command"][1], service["environment"]["TOKENFLEET_SITE"]
        environment = service["environment"]
        assert ("TOKENFLEET_POSTGRES_URL" in environment) == (kind in needs_database), name
        assert ("TOKENFLEET_API_PORT" in environment) == (kind == "gateway"), name
        if kind == "emulator":
            assert "TOKENFLEET_NATS_URL" not in environment
            continue
        user = environment["TOKENFLEET_NATS_USER"]
        assert user in {user_name(kind), user_name(kind, site)}, name
        assert user in user_names(fleet)
        variable = f"TF_NATS_PASSWORD_{user.upper().replace('-', '_')}"
        assert environment["TOKENFLEET_NATS_PASSWORD"] == f"${{{variable}}}", name


def test_only_loopback_is_published(compose: dict[str, Any]) -> None:
    """A database port published on all interfaces bypasses the host's firewall."""
    published = [str(port) for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    inner = {port.rpartition(":")[2] for port in published}
    assert inner == {"8080", "9090", "4222"}
    assert len(set(published)) == len(published)


def test_every_long_running_service_has_a_health_check(compose: dict[str, Any]) -> None:
    """`up --wait` said healthy for what was never asked."""
    assert "HEALTHCHECK" in (ROOT / "Dockerfile").read_text()
    for name, service in compose["services"].items():
        if name in ("migrate", "provision"):
            assert service["healthcheck"] == {"disable": True}
        elif name not in _ours(compose):
            assert service["healthcheck"]["test"], name
        assert service["init"] is True, name


def test_secrets_come_from_the_environment_only(compose: dict[str, Any]) -> None:
    """A password in the repository is everybody's password."""
    text = (ROOT / "docker-compose.yml").read_text()
    example = set(re.findall(r"(?m)^(TF_\w+)=", (ROOT / ".env.example").read_text()))
    assert set(re.findall(r"\$\{(TF_\w+?):\?", text)) == example
    nats_wants = set(re.findall(r"\$(TF_NATS_PASSWORD_\w+)", (ROOT / "deploy" / "nats.conf").read_text()))
    assert nats_wants <= set(compose["services"]["nats"]["environment"])
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_written_files_are_up_to_date() -> None:
    """The contract gained a subject and the bus's users did not: `make deploy` writes these files anew."""
    script = (
        "import json, runpy\n"
        f"render = runpy.run_path({str(ROOT / 'deploy' / 'render.py')!r})['render']\n"
        "print(json.dumps({str(path): text for path, text in render().items()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    files: dict[str, str] = yaml.safe_load(done.stdout)
    assert len(files) == 3
    for path, text in files.items():
        assert Path(path).read_text() == text, f"{path} is stale: run `make deploy`"


def test_env_is_made_once_with_good_secrets(tmp_path: Path) -> None:
    """Running the set-up again replaced the secrets, and no service could log in any more."""
    target = tmp_path / ".env"
    command = [sys.executable, str(ROOT / "deploy" / "make_env.py"), str(target)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    text = target.read_text()
    values = re.findall(r"(?m)^TF_\w+=(.*)$", text)
    assert len(values) == len(set(values)) > 10
    assert all(re.fullmatch(r"[a-z][0-9a-f]{48}", value) for value in values)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
    assert target.read_text() == text


def test_the_image_runs_as_an_ordinary_user_and_takes_nothing_it_does_not_need() -> None:
    """Root in a container, and a build that sent .git, .env and the virtual environment to the engine."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"(?m)^USER 10001", dockerfile)
    assert "# syntax" not in dockerfile
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    copied = {word for line in re.findall(r"(?m)^COPY (?!--)(.*) \S+$", dockerfile) for word in line.split()}
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
