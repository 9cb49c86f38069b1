"""`tokenfleet simulate`: the same bytes for the same seed, honest exit codes, and files where they were asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenfleet.cli.__main__ import main

SMALL = """
fleet = "reference"
[scenario]
name = "small"
duration_s = 6
drain_s = 60
[[workload]]
trace = "builtin"
rate_per_s = 5
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_the_same_seed_gives_the_same_bytes(small: str) -> None:
    """Results that nobody can repeat are no evidence; strings hash differently in every Python process."""
    command = [sys.executable, "-m", "tokenfleet.cli", "simulate", small, "--json", "--seed", "4", "--processes", "1"]
    outputs = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        outputs.append(subprocess.run(command, capture_output=True, check=True, env=env).stdout)
    assert outputs[0] == outputs[1]
    lines = [json.loads(line) for line in outputs[0].splitlines()]
    assert [line["policy"] for line in lines] == ["tokenfleet", "round-robin"]
    assert {"policy", "seed", "duration_s", "overall", "classes", "tenants", "sites"} <= set(lines[0])
    assert lines[0]["seed"] == 4
    assert lines[0]["overall"]["offered"] == lines[1]["overall"]["offered"]


def test_tables_files_and_seeds(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, means with intervals over seeds, one file of requests per policy."""
    arguments = [
        "simulate",
        small,
        "--policy",
        "tokenfleet",
        "--policy",
        "least-work/home-first/none",
        "--processes",
        "1",
    ]
    assert main([*arguments, "--records", str(tmp_path / "out")]) == 0
    assert "TTFT p50 s" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tokenfleet.jsonl",
        "least-work_home-first_none.jsonl",
    }
    summary = tmp_path / "summary.json"
    assert main([*arguments, "--seeds", "2", "--summary", str(summary)]) == 0
    assert "±" in capsys.readouterr().out
    first = json.loads(summary.read_bytes())[0]
    assert first["seeds"] == [1, 2]
    assert first["overall"]["compliance"]["ci95"] is not None


def test_a_page_with_plots(small: str, tmp_path: Path) -> None:
    """The same page as a live replay's, from the simulated requests."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert main(["simulate", small, "--policy", "tokenfleet", "--html", str(page), "--json"]) == 0
    assert b"Simulation of small" in page.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "which scenario"),
        (["nowhere"], "packaged scenarios are"),
        (["reference", "--policy", "best"], "unknown policy 'best'"),
        (["reference", "--seeds", "0"], "--seeds"),
        (["reference", "--speed", "0"], "--speed"),
        (["reference", "--knee", "3", "2"], "--knee"),
    ],
)
def test_wrong_input_is_exit_2_and_says_what(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts tell a wrong command (2) from work that failed (1)."""
    assert main(["simulate", *arguments]) == 2
    assert what in capsys.readouterr().err


def test_the_list_names_scenarios_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be run is found without reading the source."""
    assert main(["simulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert "reference" in said
    assert "llm-d+queue" in said


def test_the_knee_of_a_small_fleet(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON per policy, with every speed that was tried."""
    code = main(["simulate", small, "--policy", "tokenfleet", "--knee", "0.5", "0.6", "--json", "--processes", "1"])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "tokenfleet"
    assert {"stable", "knee", "tried"} <= set(found)
