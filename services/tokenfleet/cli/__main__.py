"""Entry point: finds the verbs, parses the arguments, turns errors into one line and an exit code."""

import argparse
import importlib
import importlib.metadata
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

import tokenfleet.cli
from tokenfleet.cli._errors import CommandError

#: the order of `--help`; verbs that are not named come last, by name
_ORDER = (
    "up", "demo", "run", "replay", "simulate", "watch", "goodput", "explain", "plan", "reserve", "keys", "db", "bus",
    "check", "version",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says errors in the same form as everything else does."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"tokenfleet: {message}\n")


def verbs() -> list[str]:
    """The names of the verb modules, in the order in which help lists them."""
    found = [m.name for m in pkgutil.iter_modules(tokenfleet.cli.__path__) if not m.name.startswith("_")]
    rank = {name: number for number, name in enumerate(_ORDER)}
    return sorted(found, key=lambda name: (rank.get(name, len(rank)), name))


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="tokenfleet", description="Event-driven control plane for LLM inference fleets.")
    parser.add_argument("--version", action="version", version=f"tokenfleet {importlib.metadata.version('tokenfleet')}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in verbs():
        importlib.import_module(f"tokenfleet.cli.{name}").add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # a verb says in one line what went wrong; the libraries' words on the way there are for services, which log
    logging.getLogger("tokenfleet").addHandler(logging.NullHandler())
    args = build_parser().parse_args(argv)
    verb = importlib.import_module(f"tokenfleet.cli.{args.verb}")
    try:
        code = int(verb.run(args))
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"tokenfleet {args.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tokenfleet":
            raise
        print(
            f"tokenfleet {args.verb}: the Python package {error.name!r} is not installed; "
            "install the extra that this needs, or all: pip install 'tokenfleet[all]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (`| head`) has seen enough; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
