"""`python -m benchmarks.fidelity fit|rank|parity`."""

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.fidelity import fit, parity, rank
from tokenfleet.local.errors import LocalError


def main(argv: list[str] | None = None) -> int:
    """0: done and within the goals; 1: it missed them, or could not be run; 2: the command is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_fit(verbs.add_parser("fit", help="measure a real engine, fit the engine model to it, predict the other half"))
    _add_rank(verbs.add_parser("rank", help="policies on real engines, and the same in the simulation"))
    _add_parity(verbs.add_parser("parity", help="one scenario live with emulators, and in the simulation"))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (fit.FitError, rank.RankError, parity.ParityError, LocalError, OSError) as error:
        fit.say(str(error))
        return 1


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_fit)
    parser.add_argument("--url", default="", help="the engine's base URL with /v1; nobody else should be using it")
    parser.add_argument("--model", default="", help="the model's name at that URL")
    parser.add_argument("--name", default="fitted", help="what the profile is called")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="length of each open segment")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    limits = parser.add_argument_group("how the engine was started")
    limits.add_argument("--token-budget", type=int, default=2048, metavar="N", help="vLLM: --max-num-batched-tokens")
    limits.add_argument("--max-sequences", type=int, default=256, metavar="N", help="vLLM: --max-num-seqs")
    limits.add_argument("--scheduling", choices=("fcfs", "priority"), default="fcfs")
    limits.add_argument("--kv-tokens", type=int, default=0, metavar="N", help="default: what its metrics say")
    limits.add_argument("--block-tokens", type=int, default=0, metavar="N", help="default: what its metrics say")
    limits.add_argument("--max-model-len", type=int, default=0, metavar="N", help="default: what /v1/models says")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured and found")
    parser.add_argument("--again", type=Path, metavar="FILE", help="fit what --save kept instead of measuring")


def _fit(args: argparse.Namespace) -> int:
    import asyncio

    if args.again:
        saved = fit.load(args.again)
        limits, segments = saved.limits, saved.segments
    elif not (args.url and args.model):
        raise fit.FitError("say --url and --model, or --again")
    else:
        limits = asyncio.run(
            fit.limits_of(
                args.url,
                token_budget=args.token_budget,
                max_sequences=args.max_sequences,
                kv_tokens=args.kv_tokens,
                block_tokens=args.block_tokens,
                max_model_len=args.max_model_len,
                scheduling=args.scheduling,
            )
        )
        segments = fit.measured(args.url, args.model, limits, seconds=args.seconds, seed=args.seed)
        if args.save:
            fit.save(args.save, limits, segments, None)
    found = fit.fit(segments, limits, name=args.name, say=fit.say)
    if args.save:
        fit.save(args.save, limits, segments, found)
    print(fit.as_toml(found.profile, found.scheduling))
    print("\n".join(f"# {line}" for line in fit.table(found).splitlines()))
    return 0 if max(found.held.ttft_median, found.held.tpot_median) <= 0.2 else 1


def _add_rank(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_rank)
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="base URL without /v1; twice")
    parser.add_argument("--model", required=True, help="the model's name at those URLs")
    parser.add_argument(
        "--fitted", required=True, type=Path, metavar="FILE", help="what `fit --save` kept of such an engine"
    )
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="FILE", help="the model's tokenizer.json")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="arrivals of a run")
    parser.add_argument("--rate", type=float, default=6.0, metavar="R", help="requests per second")
    parser.add_argument("--documents", type=int, default=12, metavar="N")
    parser.add_argument("--shared-tokens", type=int, default=1536, metavar="N", help="of each document")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--save", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--simulate-only", action="store_true", help="only the simulation: to choose a load")


def _rank(args: argparse.Namespace) -> int:
    import asyncio

    saved = fit.load(args.fitted)
    if saved.fitted is None:
        raise rank.RankError(f"{args.fitted} holds no fitted profile")
    profile, limits, model = saved.fitted.profile, saved.limits, args.model
    load = rank.Load(
        rate_per_s=args.rate, seconds=args.seconds, documents=args.documents, shared_tokens=args.shared_tokens
    )
    engines: list[str] = args.engine
    live: list[rank.Figure] = []
    if not args.simulate_only:
        alphabet = rank.Alphabet(args.tokenizer)
        where = args.tokenizer.resolve()
        text = rank.fleet_text(engines, model, profile, where, max_model_len=limits.max_model_len)
        measuring = rank.measure(engines, model, text, alphabet, load, runs=args.runs, seed=args.seed, say=fit.say)
        live = asyncio.run(measuring)
    text = rank.fleet_text(engines, model, profile, "", max_model_len=limits.max_model_len, simulated=True)
    seeds = range(args.seed, args.seed + args.runs)
    asked = {seed: rank.draw(load, seed) for seed in seeds}
    how = {"text": text, "model": model, "profile": profile, "scheduling": limits.scheduling}
    simulation = [rank.simulated(policy, seed, asked[seed], load, **how) for seed in seeds for policy in rank.POLICIES]
    found = rank.compare(load, live or simulation, simulation)
    print(rank.table(found))
    if args.save:
        Path(args.save).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0 if found.holds else 1


def _add_parity(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_parity)
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="arrivals")
    parser.add_argument("--rate", type=float, default=5.0, metavar="R", help="requests per second, about")
    parser.add_argument("--turns", type=int, nargs=2, default=[4, 10], metavar=("MIN", "MAX"), help="of a chat")
    parser.add_argument("--undeclared", action="store_true", help="the fleet file does not say how fast instances are")
    profiles = parity.Load().profiles
    parser.add_argument("--profiles", nargs="+", default=profiles, metavar="NAME", help="hardware of each instance")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--save", metavar="FILE", help="keep the live run, to compare it again")
    parser.add_argument("--again", metavar="FILE", help="compare what --save kept instead of running")


def _parity(args: argparse.Namespace) -> int:
    import asyncio

    if args.again:
        run = parity.decode(Path(args.again).read_bytes())
    else:
        load = parity.Load(
            seconds=args.seconds,
            rate_per_s=args.rate,
            profiles=tuple(args.profiles),
            declared=not args.undeclared,
            turns=(args.turns[0], args.turns[1]),
            seed=args.seed,
        )
        run = asyncio.run(parity.live(load, fit.say))
        if args.save:
            Path(args.save).write_bytes(parity.encode(run))
    found = parity.compare(run)
    print(parity.table(found))
    return 0 if found.reached else 1


if __name__ == "__main__":
    sys.exit(main())
