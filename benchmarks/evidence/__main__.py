"""`python -m benchmarks.evidence`: runs parts and writes docs/evidence, or checks that their signs still hold."""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.evidence import _judge, _run, _write
from benchmarks.evidence._part import Cell, Part, Quick
from benchmarks.evidence._simulated import merged

DOCS = _run.ROOT / "docs" / "evidence"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: written, or nothing flipped; 1: a sign flipped or a run failed; 2: the command is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("part", nargs="*", help="parts to run and to write down; with --check all if none is named")
    parser.add_argument(
        "--check", action="store_true", help="run the quick subsets and compare signs with docs/evidence"
    )
    parser.add_argument("--quick", action="store_true", help="run the quick subset only and print it; writes nothing")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at once (default: cores)"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where traces are (default: $TOKENFLEET_TRACES)")
    parser.add_argument(
        "--fresh", action="store_true", help="run again what was kept from an earlier run of the same code"
    )
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name:12} {_run.part(name).title}" for name in _run.known()))
        return 0
    names = args.part or (_run.known() if args.check else [])
    if (not names and not args.check) or args.jobs < 1:
        parser.error("which part? --list names them" if not names else "--jobs must be at least 1")
    if args.traces is not None:
        os.environ["TOKENFLEET_TRACES"] = str(args.traces.resolve())  # the worker processes look there too
    try:
        parts = {name: _run.part(name) for name in names}
    except (KeyError, ValueError) as error:
        print(error.args[0], file=sys.stderr)
        return 2
    cache = None if args.fresh else _run.CACHE
    wrong: list[str] = []
    began_s = time.monotonic()
    for name, part in parts.items():
        try:
            if args.check:
                wrong += [f"{name}: {flip}" for flip in check(name, part, jobs=args.jobs, cache=cache)]
            elif args.quick:
                print(_write.markdown(name, part, quick(name, part, jobs=args.jobs, cache=cache)))
            else:
                full(name, part, jobs=args.jobs, cache=cache)
        except _run.MissingTraceError as error:
            print(f"{name}: SKIPPED, it {error}", file=sys.stderr, flush=True)
    if args.check:
        print(
            f"{len(parts)} parts in {time.monotonic() - began_s:.0f} s: " + ("FLIPPED" if wrong else "nothing flipped")
        )
        for one in wrong:
            print(f"  {one}")
    return 1 if wrong else 0


def full(name: str, part: Part, *, jobs: int, cache: Path | None, folder: Path = DOCS) -> _write.Kept:
    """Run a part whole, and its quick subset by the same code; write its documents."""
    traces = _run.need(part)
    todo = _run.jobs_of(part.cells, part.seeds)
    runs = _run.run_jobs(todo, traces=traces, processes=jobs, cache=cache, on_job=_run.progress(name))
    kept = _write.Kept(
        part=name,
        command=f"make evidence-{name}",
        commit=commit(),
        seeds=part.seeds,
        full=_judge.judge(part, part.cells, runs, part.seeds),
        quick=None if part.quick is None else quick(name, part, jobs=jobs, cache=cache).full,
    )
    for path in _write.write(folder, name, part, kept, runs):
        with contextlib.suppress(ValueError):  # a folder elsewhere is named in full
            path = path.relative_to(_run.ROOT)
        print(path)
    return kept


def quick(name: str, part: Part, *, jobs: int, cache: Path | None) -> _write.Kept:
    """Run a part's quick subset; nothing is written. A part without one has nothing to judge."""
    cells, seeds = subset(part)
    todo = _run.jobs_of(cells, seeds)
    title = f"{name}, quick"
    runs = _run.run_jobs(todo, traces=_run.need(part), processes=jobs, cache=cache, on_job=_run.progress(title))
    return _write.Kept(
        part=name,
        command=f"python -m benchmarks.evidence --quick {name}",
        commit=commit(),
        seeds=seeds,
        full=_judge.judge(part, cells, runs, seeds),
    )


def subset(part: Part) -> tuple[list[Cell], tuple[int, ...]]:
    """The cells and seeds of a part's quick subset."""
    spec = part.quick or Quick(cells=(), seeds=0)
    if part.quick is None:
        return [], part.seeds
    chosen = [cell for cell in part.cells if not spec.cells or cell.name in spec.cells]
    cells = [
        msgspec.structs.replace(
            cell,
            args=merged(cell.args, spec.args),
            seeds=None if cell.seeds is None else cell.seeds[: spec.seeds],
        )
        for cell in chosen
    ]
    return cells, part.seeds[: spec.seeds]


def check(name: str, part: Part, *, jobs: int, cache: Path | None, folder: Path = DOCS) -> list[str]:
    """What the quick subset of now says otherwise than what is committed."""
    _run.need(part)
    kept = _write.load(folder / f"{name}.json")
    if kept is None or kept.quick is None or part.quick is None:
        print(f"{name}: nothing committed to compare with", file=sys.stderr, flush=True)
        return []
    now = quick(name, part, jobs=jobs, cache=cache).full
    found = _judge.flips(kept.full, kept.quick, now)
    print(f"{name}: {len(now.compared)} comparisons, {len(now.goals)} goals, {len(found)} flipped", flush=True)
    return found


def commit() -> str:
    """The revision of the checkout, with `+` where files that matter have changes on top."""

    def git(*args: str) -> str:
        found = subprocess.run(["git", *args], cwd=_run.ROOT, capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else ""

    revision = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "services", "schemas", "benchmarks")
    return f"{revision or 'unknown'}{'+' if changed else ''}"


if __name__ == "__main__":
    sys.exit(main())
