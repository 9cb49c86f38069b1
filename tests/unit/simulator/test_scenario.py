"""Scenario files: what is refused, and that a refusal names everything that is wrong."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from tokenfleet.simulator.arrivals import draw
from tokenfleet.simulator.errors import ScenarioError, UnknownPolicyError
from tokenfleet.simulator.policies import choose
from tokenfleet.simulator.scenario import load, packaged, parse

HEAD = """
fleet = "reference"
[scenario]
name = "x"
duration_s = 10
[[workload]]
trace = "builtin"
rate_per_s = 5
"""


def test_packaged_scenarios_are_sound_or_only_lack_their_traces() -> None:
    """A scenario that ships broken is found by its first user."""
    assert "reference" in packaged()
    findings = []
    for name in packaged():
        try:
            load(name)
        except ScenarioError as error:
            findings += error.findings
    assert all("no trace" in finding for finding in findings), findings


def test_every_mistake_is_named_at_once() -> None:
    """Whoever writes a scenario should not fix one line per run."""
    text = """
fleet = "reference"
[scenario]
name = "x"
warmup_s = -1
[[workload]]
trace = "builtin"
speed = 2
[[faults]]
kind = "engine_down"
target = "nowhere"
at_s = 1
for_s = 2
[[faults]]
kind = "messages_lost"
at_s = 1
for_s = 2
"""
    with pytest.raises(ScenarioError) as caught:
        parse(text.encode())
    said = str(caught.value)
    for part in ("warmup_s", "rate_per_s", "duration_s", "speed", "fault 1", "'nowhere'", "fault 2", "share"):
        assert part in said, part


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("colour = 1", "colour"),
        ("[bus]\nloss = 1.5", "shares"),
        ('[[pools]]\nsite="z"\nmodel="chat-8b"\nversion="1"\nprofile="8b-h100"\ncount=2', "no site 'z'"),
        ('[[pools]]\nsite="b"\nmodel="chat-8b"\nversion="1"\nprofile="9b-h100"\ncount=2', "no profile '9b-h100'"),
        ("[engines]\nc = 0", "engines.c"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(line: str, what: str) -> None:
    """An unknown key that is ignored is a knob that somebody believes to have turned."""
    with pytest.raises(ScenarioError, match=what):
        parse(
            f"{line if line.startswith('colour') else ''}\n{HEAD}\n{'' if line.startswith('colour') else line}".encode()
        )


def test_pools_add_instances_to_a_packaged_fleet() -> None:
    """Sixteen equal instances are one table, not sixteen."""
    made = parse((HEAD + '[[pools]]\nsite="b"\nmodel="chat-8b"\nversion="1"\nprofile="8b-h100"\ncount=3').encode())
    assert len(made.fleet.pools("b")["chat-8b", "1"]) == 4
    assert made.hub == "a"


def test_a_missing_trace_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public traces are not part of the package; the message says how to point at them."""
    monkeypatch.delenv("TOKENFLEET_SHARED", raising=False)
    text = HEAD.replace('trace = "builtin"\nrate_per_s = 5', 'trace = "mine"\ndefault_tenant = "studio"')
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ScenarioError, match=r"no trace 'mine'.*--traces"):
        load(str(tmp_path / "x.toml"))
    rows = b'{"format": "llm-trace-slice/1", "block_size": 512}\n{"t": 0, "in": 10, "out": 3}\n'
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(rows))
    found = load(str(tmp_path / "x.toml")).traces[0]
    assert found is not None
    assert found.rows[0].input_tokens == 10


def test_unknown_policies_are_refused_by_name() -> None:
    """A typing error must not silently run something else."""
    assert choose("tokenfleet").placement == "predicted-latency"
    assert choose("least-work//none").admission == "none"
    for wrong in ("tokenfeet", "least-work/nowhere", "a/b/c/d"):
        with pytest.raises(UnknownPolicyError, match="known"):
            choose(wrong)


def test_a_policys_options() -> None:
    """A mistyped option that is ignored compares a policy with itself."""
    chosen = choose("predicted-latency//pools@frozen=60@shares=chat:3,batch:1.5")
    assert (chosen.frozen_s, chosen.shares, chosen.admission) == (60.0, {"chat": 3.0, "batch": 1.5}, "pools")
    for wrong in (
        "tokenfleet@frozen", "tokenfleet@frozen=soon", "tokenfleet@shares=chat:0", "tokenfleet@warm=1",
        "llm-d@frozen=60", "predicted-latency//fcfs@shares=chat:1",
    ):  # fmt: skip
        with pytest.raises(UnknownPolicyError):
            choose(wrong)
    with pytest.raises(UnknownPolicyError):
        choose("tokenfleet@shares=nobody:1").applied(parse(HEAD.encode()).fleet)


def test_a_part_of_the_workload_may_begin_later() -> None:
    """A shift of the workload: only batch work joins, at half-time."""
    late = HEAD + '[[workload]]\ntrace = "builtin"\nrate_per_s = 5\ntasks = ["labels"]\nfrom_s = 5\nuntil_s = 9\n'
    joined = Counter(one.task for one in draw(parse(late.encode()), 1)) - Counter(
        one.task for one in draw(parse(HEAD.encode()), 1)
    )
    assert set(joined) == {"labels"}
    with pytest.raises(ScenarioError, match="no tasks labours"):
        parse(late.replace("labels", "labours").encode())
    with pytest.raises(ScenarioError, match="from_s"):
        parse(late.replace("until_s = 9", "until_s = 4").encode())
