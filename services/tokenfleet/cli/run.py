"""`tokenfleet run SERVICE`: one service as this process, configured by the environment and the fleet file."""

import argparse
import importlib
import os

from tokenfleet.cli._errors import CommandError, UsageError

#: what `tokenfleet run` knows, and the extra that each needs (of the same name)
SERVICES = ("gateway", "slomax", "fleetmind", "tokenpilot", "siteagent", "accountant", "emulator")


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "run",
        help="run one service",
        description="Run one service until SIGTERM. Settings are the TOKENFLEET_* variables.",
    )
    parser.add_argument("service", metavar="SERVICE", choices=SERVICES, help=", ".join(SERVICES))
    parser.add_argument("--site", help="the site it serves (TOKENFLEET_SITE)")
    parser.add_argument("--fleet", metavar="FILE", help="the fleet file (TOKENFLEET_FLEET)")


def run(args: argparse.Namespace) -> int:
    if args.site is not None:
        os.environ["TOKENFLEET_SITE"] = args.site
    if args.fleet is not None:
        os.environ["TOKENFLEET_FLEET"] = args.fleet
    try:
        # the emulator's own __main__ is for using it alone, without a fleet's environment
        entry = "hosted" if args.service == "emulator" else "__main__"
        module = importlib.import_module(f"tokenfleet.{args.service}.{entry}")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.split(".")[0] == "tokenfleet":
            raise CommandError(f"this installation has no {args.service}: {error}") from None
        raise CommandError(
            f"{args.service} needs the Python package {missing!r}: pip install 'tokenfleet[{args.service}]'"
        ) from None

    from tokenfleet.fleet import FleetError
    from tokenfleet.runtime.settings import SettingsError

    try:
        return int(module.main() or 0)
    except (SettingsError, FleetError) as error:
        raise UsageError(str(error)) from None
    except FileNotFoundError as error:
        if error.filename == os.environ.get("TOKENFLEET_FLEET", "fleet.toml"):
            raise UsageError(f"no fleet file {error.filename}: set TOKENFLEET_FLEET") from None
        raise
