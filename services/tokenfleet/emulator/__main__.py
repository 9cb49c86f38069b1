"""`python -m tokenfleet.emulator FLEET`: emulated engines alone, addresses on stdout as one line of JSON."""

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path

import msgspec

from tokenfleet import fleet as fleets
from tokenfleet.emulator.service import EmulatorError, run
from tokenfleet.emulator.settings import EmulatorSettings


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM. Exit codes: 0 stopped, 1 cannot serve, 2 the fleet file is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tokenfleet.emulator", description=main.__doc__)
    parser.add_argument("fleet", type=Path, help="fleet.toml; instances with a profile are served")
    parser.add_argument("--site", help="only this site's instances")
    parser.add_argument("--time-scale", type=float, default=1.0, help="2 runs everything twice as fast")
    parser.add_argument("--bind-host", default="", help="listen here instead of at the URLs' hosts")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        fleet = fleets.parse(options.fleet.read_bytes(), source=str(options.fleet))
    except (OSError, fleets.FleetError) as error:
        print(error, file=sys.stderr)
        return 2
    settings = msgspec.structs.replace(EmulatorSettings(), bind_host=options.bind_host)

    def announce(addresses: dict[str, dict[str, str]]) -> None:
        print(json.dumps(addresses), flush=True)

    work = run(fleet, site=options.site, time_scale=options.time_scale, announce=announce, settings=settings)
    try:
        asyncio.run(work)
    except EmulatorError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
