"""`tokenfleet version`."""

import argparse
import importlib.metadata
import json
import platform


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("version", help="print the version")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    version = importlib.metadata.version("tokenfleet")
    if args.json:
        print(json.dumps({"tokenfleet": version, "python": platform.python_version()}))
    else:
        print(f"tokenfleet {version}")
    return 0
