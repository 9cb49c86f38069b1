"""The command line as scripts see it: exit codes, one-line errors, JSON."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenfleet.cli.__main__ import main, verbs
from tokenfleet.local.fleetfile import REFERENCE


def test_every_verb_declares_itself_and_stays_cheap() -> None:
    """`tokenfleet --help` took two seconds because one verb imported the plotting library."""
    for name in verbs():
        module = importlib.import_module(f"tokenfleet.cli.{name}")
        assert callable(module.add)
        assert callable(module.run)
    script = "import sys; from tokenfleet.cli.__main__ import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"nats", "sqlalchemy", "aiohttp", "matplotlib", "numpy", "uvloop"} & set(loaded)


def test_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts compare versions."""
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenfleet"]


def test_a_right_fleet_file_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    """What ships must pass its own check."""
    assert main(["check", str(REFERENCE), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["sites"] == 4


def test_each_finding_of_a_wrong_fleet_file_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator fixes ten mistakes in one round, not in ten."""
    path = tmp_path / "fleet.toml"
    text = REFERENCE.read_text().replace('zones = ["eu"]', 'zones = ["moon"]').replace("tpot_ms = 60", "tpot_ms = -1")
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert any("moon" in line for line in lines)
    assert any("tpot_ms" in line for line in lines)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-verb"],
        ["run", "no-such-service"],
        ["check", "/no/such/file"],
        ["up", "--port", "99999"],
        ["up", "--ready-file", "/no/such/directory/ready.json"],
    ],
)
def test_wrong_input_is_exit_code_2_without_a_traceback(argv: list[str]) -> None:
    """Scripts tell a mistake of theirs from a failure of ours by the exit code."""
    done = subprocess.run([sys.executable, "-m", "tokenfleet.cli", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "tokenfleet" in done.stderr


def test_an_unknown_setting_of_a_service_is_named() -> None:
    """A misspelt variable was ignored, and the service ran with the default."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", "run", "emulator"],
        env={"TOKENFLEET_FLEET": str(REFERENCE), "TOKENFLEET_METRICS_PROT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "TOKENFLEET_METRICS_PROT" in done.stderr


def test_variables_of_other_verbs_do_not_stop_a_verb() -> None:
    """With `TOKENFLEET_KEY` set for `replay`, every other verb ended with "no such setting"."""
    from tokenfleet.runtime.settings import Settings

    assert Settings.load({"TOKENFLEET_KEY": "tf_x", "TOKENFLEET_SHARED": "/data"}) == Settings.load({})
