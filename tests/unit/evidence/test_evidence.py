"""The evidence's own machinery: a claim that no longer holds must fail, and every figure must come from a run."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.evidence import (
    Bars,
    Cell,
    Compare,
    Figures,
    Goal,
    Lines,
    Part,
    Quick,
    _judge,
    _run,
    _simulated,
    _write,
    simulated,
)
from benchmarks.evidence import __main__ as command

Values = dict[str, list[float | None]]


def drawn(seed: int, *, mean: float, trend: float = 0.0, folder: str = "") -> dict[str, float | None]:
    """A cell: a value per seed; it leaves a trace of having been run."""
    if folder:
        with (Path(folder) / "runs").open("a") as log:
            log.write(f"{mean} {seed}\n")
    return {"value": mean + 0.01 * (seed % 3) + trend * seed, "seed": float(seed)}


def failing(seed: int) -> dict[str, float | None]:
    """A cell that cannot be run."""
    raise RuntimeError(f"seed {seed} fell over")


def part(ours: float = 1.0, theirs: float = 2.0, **more: Any) -> Part:
    return Part(
        title="One",
        question="Which is smaller?",
        cells=(
            Cell(name="ours", run=drawn, args={"mean": ours, **more}),
            Cell(name="theirs", run=drawn, args={"mean": theirs, **more}),
        ),
        compare=(Compare(name="smaller", metric="value", ours="ours", theirs="theirs", expect=-1, at_most=-0.4),),
        goals=(Goal(name="small", cell="ours", metric="value", at_most=1.5),),
        plots=(
            Bars(title="Values", metric="value", cells=("ours", "theirs")),
            Lines(title="Over x", metric="value", series={"both": ((1.0, "ours"), (2.0, "theirs"))}, x="x"),
        ),
        seeds=(1, 2, 3, 4, 5),
        quick=Quick(seeds=3),
        findings="Ours is.",
    )


def judged(values: Values, one: Compare, seeds: tuple[int, ...]) -> _judge.Compared:
    cells = tuple(Cell(name=name, run=drawn, args={"mean": 0.0}) for name in values)
    runs = {(name, s): Figures(metrics={"value": v[n]}) for name, v in values.items() for n, s in enumerate(seeds)}
    whole = Part(title="", question="", cells=cells, compare=(one,), seeds=seeds)
    (found,) = _judge.judge(whole, cells, runs, seeds).compared
    return found


def compare(**more: Any) -> Compare:
    return Compare(
        **{"name": "c", "metric": "value", "ours": "a", "theirs": "b", "how": "absolute", "expect": -1, **more}
    )


def test_what_is_written_is_what_the_runs_found_and_then_nothing_flips(tmp_path: Path) -> None:
    """A figure in a document that no run printed is worth less than none."""
    one = part(folder=str(tmp_path))
    kept = command.full("one", one, jobs=1, cache=tmp_path / "cache", folder=tmp_path / "docs")
    runs = (tmp_path / "runs").read_text().split("\n")[:-1]
    assert sorted(runs) == sorted(f"{mean} {seed}" for mean in (1.0, 2.0) for seed in (1, 2, 3, 4, 5))
    ours = kept.full.cells["ours"]["value"]
    assert ours.values == (1.01, 1.02, 1.0, 1.01, 1.02)
    assert ours.mean == pytest.approx(sum(v for v in ours.values if v is not None) / 5)
    (compared,) = kept.full.compared
    assert (compared.sign, compared.reached, compared.surely) == (-1, True, True)
    assert kept.quick is not None
    assert kept.quick.cells["ours"]["value"].values == (1.01, 1.02, 1.0)
    text = (tmp_path / "docs" / "one.md").read_text()
    assert "1.012" in text
    assert "Ours is." in text
    assert "make evidence-one" in text
    assert (tmp_path / "docs" / "one-1.svg").stat().st_size > 1000
    assert command.check("one", one, jobs=1, cache=tmp_path / "cache", folder=tmp_path / "docs") == []
    again = command.full("one", one, jobs=1, cache=None, folder=tmp_path / "again")
    assert msgspec.json.encode(again) == msgspec.json.encode(kept)
    for path in (tmp_path / "docs").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_flipped_sign_fails(tmp_path: Path) -> None:
    """A core was changed, and what was better is now worse."""
    command.full("one", part(), jobs=1, cache=None, folder=tmp_path)
    flipped = command.check("one", part(ours=3.0), jobs=1, cache=None, folder=tmp_path)
    assert any(one.startswith("smaller: the sign was -1 and is +1") for one in flipped)
    assert any(one.startswith("small: was reached") for one in flipped)
    same = command.check("one", part(ours=2.0), jobs=1, cache=None, folder=tmp_path)
    assert any("the sign was -1 and is +0" in one for one in same)


def test_an_undecided_difference_may_stay_undecided_or_go_our_way_and_not_the_other(tmp_path: Path) -> None:
    """An interval that includes zero is no claim; the opposite, proven, contradicts what the part expects."""
    command.full("one", part(ours=2.0), jobs=1, cache=None, folder=tmp_path)
    kept = _write.load(tmp_path / "one.json")
    assert kept is not None
    assert kept.full.compared[0].sign == 0
    assert command.check("one", part(ours=1.0), jobs=1, cache=None, folder=tmp_path) == []
    worse = command.check("one", part(ours=3.0), jobs=1, cache=None, folder=tmp_path)
    assert len(worse) == 1
    assert worse[0].startswith("smaller: was undecided and is +1, against what is expected")


def test_a_quick_mean_may_not_turn_against_what_all_seeds_said() -> None:
    """With few seeds the quick subset has no sign: its mean must at least lean as the full runs did."""
    seeds = (1, 2, 3)
    sure = judged({"a": [1.0, 1.1, 1.0], "b": [2.0, 2.0, 2.1]}, compare(), seeds)
    weak = judged({"a": [1.0, 4.0, 1.0], "b": [2.0, 3.0, 3.5]}, compare(), seeds)
    turned = judged({"a": [1.0, 9.0, 1.0], "b": [2.0, 3.0, 3.5]}, compare(), seeds)
    assert (sure.sign, weak.sign, weak.leans, turned.sign, turned.leans) == (-1, 0, -1, 0, 1)

    def outcome(one: _judge.Compared) -> _judge.Judged:
        return _judge.Judged(cells={}, compared=(one,), goals=())

    assert _judge.flips(outcome(sure), outcome(weak), outcome(weak)) == []
    assert len(_judge.flips(outcome(sure), outcome(weak), outcome(turned))) == 1
    gone = _judge.Judged(cells={}, compared=(), goals=())
    assert _judge.flips(outcome(sure), outcome(weak), gone) == ["c: is committed, and was not judged now"]


def test_differences_are_paired_and_one_run_has_no_sign() -> None:
    """Seeds differ more than policies: only the difference on the same arrivals tells."""
    found = judged({"a": [1.0, 11.0, 21.0], "b": [2.0, 12.1, 22.2]}, compare(), (1, 2, 3))
    assert found.sign == -1
    assert found.mean == pytest.approx(-1.1)
    assert judged({"a": [1.0], "b": [2.0]}, compare(), (1,)).sign == 0


def test_the_best_of_several_is_what_ours_is_compared_with() -> None:
    """Beating the worst of five is easy."""
    values: Values = {"a": [2.0, 2.0], "b": [3.0, 3.0], "c": [1.0, 1.0], "d": [math.inf, 1.0]}
    assert judged(values, compare(theirs=("b", "c", "d")), (1, 2)).theirs == "c"
    assert judged(values, compare(theirs=("b", "c"), expect=1), (1, 2)).theirs == "b"


def test_what_never_came_is_worse_than_any_number_and_has_no_mean() -> None:
    """A policy that answered fewer than 95% has an infinite P95; leaving it out would flatter it."""
    seeds = (1, 2, 3)
    never = judged({"a": [1.0, 1.0, 1.0], "b": [math.inf, math.inf, math.inf]}, compare(at_most=-1.0), seeds)
    assert (never.mean, never.sign, never.reached) == (None, -1, True)
    ours = judged({"a": [1.0, math.inf, 1.0], "b": [2.0, 2.0, 2.0]}, compare(at_most=0.0), seeds)
    assert (ours.mean, ours.sign, ours.reached) == (None, 0, False)
    unknown = judged({"a": [1.0, None, 1.0], "b": [2.0, 2.0, 2.0]}, compare(at_most=0.0), seeds)
    assert (unknown.mean, unknown.sign, unknown.reached) == (None, 0, False)


def test_a_run_is_kept_for_the_same_code_arguments_and_seed_only(tmp_path: Path) -> None:
    """An interrupted hour goes on; a changed argument or seed never passes for what was run."""
    cells = part(folder=str(tmp_path)).cells
    cache = tmp_path / "cache"
    first = _run.run_jobs(_run.jobs_of(cells[:1], (1, 2)), cache=cache)
    again = _run.run_jobs(_run.jobs_of(cells, (1, 2, 3)), cache=cache)
    assert first.items() <= again.items()
    assert (tmp_path / "runs").read_text().split("\n")[:-1] == ["1.0 1", "1.0 2", "1.0 3", "2.0 1", "2.0 2", "2.0 3"]
    kept = json.loads(next(cache.glob("*.json")).read_text())
    assert kept["figures"]["metrics"]["seed"] == kept["seed"]


def test_code_is_followed_by_imports() -> None:
    """A change to a core, however deep, makes a simulation run again."""
    code = _run.Code()
    before = code.digest(simulated)
    assert before == code.digest(simulated)
    reached = set(code._files)
    for inside in ("tokenpilot/predictor.py", "slomax/policy.py", "engine_model/engine.py", "simulator/world.py"):
        assert _run.ROOT / "services" / "tokenfleet" / inside in reached
    path = _run.ROOT / "services" / "tokenfleet" / "engine_model" / "engine.py"
    code._files[path] = ("another text", code._files[path][1])
    assert code.digest(simulated) != before


def test_what_a_part_says_is_no_code() -> None:
    """Findings are written after the runs: writing them must not make an hour's runs stale."""
    import ast

    said = ast.parse('"""Doc."""\nFINDINGS = "text"\nPART: Part = Part(findings=FINDINGS)\ndef run(seed): return {}\n')
    assert [_run._only_says(node) for node in said.body] == [True, True, True, False]


def test_a_cell_that_fails_fails_the_part() -> None:
    """Figures of the runs that happened to work would be a selection."""
    cells = (Cell(name="falls", run=failing),)
    with pytest.raises(RuntimeError, match="seed 2 fell over"):
        _run.run_jobs(_run.jobs_of(cells, (2,)), cache=None)


def test_a_part_without_its_trace_is_skipped_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces are not part of the repository; silence would pass for evidence."""
    monkeypatch.setenv("TOKENFLEET_TRACES", str(tmp_path))
    cell = Cell(name="c", run=simulated, args={"scenario": "conversation-70b", "policy": "llm-d"})
    needy = Part(title="Needy", question="?", cells=(cell,))
    with pytest.raises(_run.MissingTraceError, match="mooncake-conversation"):
        _run.need(needy)
    monkeypatch.setattr(_run, "known", lambda: ["needy"])
    monkeypatch.setitem(sys.modules, "benchmarks.evidence.needy", type("Module", (), {"PART": needy}))
    assert command.main(["--check"]) == 0
    assert "needy: SKIPPED, it needs the traces mooncake-conversation" in capsys.readouterr().err


def test_every_part_is_sound_and_its_quick_subset_exists() -> None:
    """A comparison of a cell that does not exist is never judged, and so never fails."""
    for name in _run.known():
        one = _run.part(name)
        assert one.faults() == []
        if one.quick is not None:
            cells, _ = command.subset(one)
            assert cells, name
    broken = msgspec.structs.replace(part(), compare=(compare(ours="ours", theirs="nobody"),))
    assert broken.faults() == ["c: no cell 'nobody'"]


def test_overrides_are_laid_over_a_scenario() -> None:
    """A changed copy of a scenario file would drift from it."""
    told = {"scenario": {"duration_s": 8}, "workload": {"rate_per_s": 2.0}, "fleet": {"fleet": {"name": "other"}}}
    scenario = _simulated.load("reference", told)
    assert scenario.info.duration_s == 8
    assert scenario.info.drain_s == _simulated.load("reference").info.drain_s
    assert scenario.sources[0].rate_per_s == 2.0
    assert scenario.fleet.info.name == "other"
    assert scenario.fleet.sites == _simulated.load("reference").fleet.sites


def test_a_simulated_cell_returns_figures_of_its_run() -> None:
    """Every scope is there by name, over what was offered."""
    overrides = {"scenario": {"duration_s": 8, "warmup_s": 1}, "workload": {"rate_per_s": 4.0}}
    found = simulated(1, scenario="reference", policy="tokenfleet", overrides=overrides).metrics
    done = _simulated.simulate(1, scenario="reference", policy="tokenfleet", overrides=overrides)
    assert found["offered"] == done.report.overall.offered > 0
    assert found["compliance"] == done.report.overall.compliance
    assert found["ttft_p95_s"] == pytest.approx((done.report.overall.ttft_ms.p95 or math.inf) / 1000)
    name, cls = next(iter(done.report.classes.items()))
    assert found[f"class.{name}.goodput_tokens_per_s"] == cls.goodput_tokens_per_s
