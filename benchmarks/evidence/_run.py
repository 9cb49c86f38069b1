"""Runs cells: every seed of each, on as many processes as asked for, and never one twice that was run by the same code.

Decides in what order runs are made and which kept one may stand for a new one: only one that the same code made from
the same arguments, seed and traces. What counts as the same code is found by following imports from the cell's own
module, so that a change to the gateway's HTTP does not make a simulation run again and a change to a core does.
"""

import ast
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from benchmarks.evidence import _simulated
from benchmarks.evidence._part import Cell, Figures, Part, Run

ROOT = Path(__file__).parents[2]
#: finished runs; git ignores it
CACHE = ROOT / ".evidence"
_SOURCES = {"tokenfleet": ROOT / "services", "tokenfleet_schemas": ROOT / "schemas", "benchmarks": ROOT}
#: what a part's module says about a run's judgement and not about the run
_SAID = {"PART", "FINDINGS", "QUESTION"}


class MissingTraceError(Exception):
    """A part needs traces that are not at hand; names them."""


class Job(msgspec.Struct, frozen=True):
    """One run to be made."""

    cell: Cell
    seed: int


#: (jobs ended, all jobs, the job that ended, its seconds; 0 when it was kept from before)
OnJob = Callable[[int, int, Job, float], None]


# ---------------------------------------------------------------------------------------------- the same code


class Code:
    """Digests of functions with all repository code that they can reach by imports."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[str, frozenset[Path]]] = {}

    def digest(self, run: Run) -> str:
        """The digest of what `run` may execute, and of the fleets and scenarios in the package."""
        start = _file(run.__module__)
        reached: set[Path] = set()
        left = [start] if start is not None else []
        while left:
            path = left.pop()
            if path not in reached:
                reached.add(path)
                left += self._read(path)[1]
        told = hashlib.sha256()
        for path in sorted(reached):
            told.update(f"{path.relative_to(ROOT)} {self._read(path)[0]}\n".encode())
        for path in sorted((ROOT / "services").rglob("*.toml")):
            told.update(path.read_bytes())
        return told.hexdigest()

    def _read(self, path: Path) -> tuple[str, frozenset[Path]]:
        if path not in self._files:
            tree = ast.parse(path.read_bytes())
            if path.parent == Path(__file__).parent:
                tree.body = [one for one in tree.body if not _only_says(one)]
            text = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
            named = [name for node in ast.walk(tree) for name in _imports(node, path)]
            files = {found for name in named if (found := _file(name)) is not None}
            self._files[path] = (text, frozenset(files))
        return self._files[path]


def _only_says(node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id in _SAID
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id in _SAID for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _imports(node: ast.AST, path: Path) -> Iterable[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    root = _SOURCES.get(module.split(".")[0])
    if root is None:
        return None
    place = root.joinpath(*module.split("."))
    for found in (place.with_suffix(".py"), place / "__init__.py"):
        if found.is_file():
            return found
    return None


# ------------------------------------------------------------------------------- parts and what they need


def known() -> list[str]:
    """Names of all parts."""
    folder = Path(__file__).parent
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def part(name: str) -> Part:
    """A part by name. Raises `KeyError` when there is none, `ValueError` when it contradicts itself."""
    if name not in known():
        raise KeyError(f"no part {name!r}; there are {', '.join(known()) or 'none'}")
    module: ModuleType = importlib.import_module(f"benchmarks.evidence.{name}")
    found: Part = module.PART
    if faults := found.faults():
        raise ValueError(f"{name}: {'; '.join(faults)}")
    return found


def need(of: Part) -> list[Path]:
    """The traces that a part reads. Raises `MissingTraceError`."""
    names = set(of.traces)
    for cell in of.cells:
        if isinstance(cell.args.get("scenario"), str):
            names.update(_simulated.traces_of(cell.args))
    folder = _simulated.trace_dir()
    found, missing = [], []
    for name in sorted(names):
        places = [place / f"{name}{end}" for place in (folder, ROOT) if place for end in ("", ".jsonl.gz", ".jsonl")]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            missing.append(name)
        else:
            found.append(path)
    if missing:
        where = folder or "no directory of traces: set TOKENFLEET_TRACES or give --traces DIR"
        raise MissingTraceError(f"needs the traces {', '.join(missing)} ({where})")
    return found


# ---------------------------------------------------------------------------------------------- running


def jobs_of(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Job]:
    """Every cell with each of its seeds, those that want the machine to themselves last."""
    found = [Job(cell, seed) for cell in cells for seed in (cell.seeds if cell.seeds is not None else seeds)]
    return sorted(found, key=lambda job: job.cell.alone)


def run_jobs(
    todo: Sequence[Job],
    *,
    traces: Sequence[Path] = (),
    processes: int = 1,
    cache: Path | None = CACHE,
    on_job: OnJob | None = None,
) -> dict[tuple[str, int], Figures]:
    """Figures by (cell, seed). What `cache` has is taken from it, and new runs are kept there as soon as they are made.

    Raises what a cell raises.
    """
    code = Code()
    read = hashlib.sha256()
    for path in traces:
        read.update(f"{path.name} {path.stat().st_size} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    keys = {id(job): _key(job, code, read.hexdigest()) for job in todo}
    found: dict[tuple[str, int], Figures] = {}
    left: list[Job] = []
    for job in todo:
        kept = None if cache is None or job.cell.alone else _kept(cache / f"{keys[id(job)]}.json")
        if kept is None:
            left.append(job)
        else:
            found[job.cell.name, job.seed] = kept
            if on_job is not None:
                on_job(len(found), len(todo), job, 0.0)

    def ended(job: Job, result: Figures, seconds: float) -> None:
        found[job.cell.name, job.seed] = result
        if cache is not None:
            _keep(cache / f"{keys[id(job)]}.json", job, result)
        if on_job is not None:
            on_job(len(found), len(todo), job, seconds)

    for alone in (False, True):
        some = [job for job in left if job.cell.alone == alone]
        if some and processes == 1 and not alone:
            for job in some:
                ended(job, *_make(job.cell.run, job.seed, job.cell.args))
        elif some:
            _pool(some, 1 if alone else processes, ended)
    return found


def _pool(todo: Sequence[Job], processes: int, ended: Callable[[Job, Figures, float], None]) -> None:
    context = multiprocessing.get_context("spawn")
    # A cell alone gets a process of its own too: its peak of memory is then its own.
    tasks = 1 if todo[0].cell.alone else None
    with ProcessPoolExecutor(min(processes, len(todo)), mp_context=context, max_tasks_per_child=tasks) as pool:
        open_: dict[Future[tuple[Figures, float]], Job] = {
            pool.submit(_make, job.cell.run, job.seed, job.cell.args): job for job in todo
        }
        while open_:
            done, _ = wait(open_, return_when=FIRST_COMPLETED)
            for future in done:
                job = open_.pop(future)
                if future.exception() is not None:
                    for other in open_:
                        other.cancel()
                ended(job, *future.result())


def _make(run: Run, seed: int, args: dict[str, Any]) -> tuple[Figures, float]:
    began_s = time.monotonic()
    made = run(seed, **args)
    figures = made if isinstance(made, Figures) else Figures(metrics=dict(made))
    return figures, time.monotonic() - began_s


def _key(job: Job, code: Code, traces: str) -> str:
    told = json.dumps(
        [
            job.cell.run.__module__,
            job.cell.run.__qualname__,
            job.cell.args,
            job.seed,
            traces,
            code.digest(job.cell.run),
        ],
        sort_keys=True,
    )
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _kept(path: Path) -> Figures | None:
    if not path.is_file():
        return None
    raw = json.loads(path.read_text())["figures"]
    return Figures(
        metrics=raw["metrics"],
        series={name: [(x, y) for x, y in points] for name, points in raw["series"].items()},
    )


def _keep(path: Path, job: Job, result: Figures) -> None:
    path.parent.mkdir(exist_ok=True)
    told = {"cell": job.cell.name, "seed": job.seed, "figures": msgspec.structs.asdict(result)}
    # json and not msgspec: it has a word for infinity. Written aside first: a stopped write must not pass for a run.
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(told))
    aside.replace(path)


def progress(title: str) -> OnJob:
    """A line on stderr per finished run, with what is left at this pace."""
    began_s = time.monotonic()
    made = 0

    def say(ended: int, all_: int, job: Job, seconds: float) -> None:
        nonlocal made
        if not seconds:
            return
        made += 1
        gone_s = time.monotonic() - began_s
        left_s = math.ceil(gone_s / made * (all_ - ended))
        text = f"{title}: {ended} of {all_} runs, {job.cell.name} seed {job.seed} took {seconds:.0f} s; {left_s} s left"
        print(text, file=sys.stderr, flush=True)

    return say
