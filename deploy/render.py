"""Writes what docker-compose.yml mounts: `deploy/compose.fleet.toml`, `deploy/nats.conf`, and `.env.example`.

Everything is derived: the fleet file from the reference fleet (only the instances' addresses differ), the users and
permissions from the message contract. `make deploy` runs it; a test fails when the files are stale.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

from tokenfleet.cli.__main__ import main as tokenfleet
from tokenfleet.fleet import parse
from tokenfleet.local.fleetfile import REFERENCE
from tokenfleet.runtime.permissions import user_names

ROOT = Path(__file__).parent.parent
HEADER = """\
# Written by deploy/render.py from the reference fleet (`make deploy`): the same fleet, with the addresses of
# docker-compose.yml's emulators. To run engines of your own, give their `url` and drop `profile` and `admin_port`.
"""
ENV_HEADER = """\
# Secrets of docker-compose.yml. `python3 deploy/make_env.py` writes .env with every `change-me` replaced by a random
# value. The passwords of NATS must begin with a letter: nats-server would take 12e3 for a number.
"""


def render_fleet() -> str:
    """The reference fleet's text with each emulated instance at its site's emulator."""
    text = REFERENCE.read_text(encoding="utf-8")
    fleet = parse(text.encode())
    for site_name, site in fleet.sites.items():
        for number, name in enumerate(site.instances, start=1):
            line = re.compile(rf'^({re.escape(name)} = \{{.*?)url = "[^"]*"(.*?) *\}}$', re.MULTILINE)
            text, found = line.subn(
                rf'\1url = "http://emulator-{site_name}:{8000 + number}", admin_port = {9000 + number}\2 }}', text
            )
            if found != 1:
                raise SystemExit(f"{REFERENCE}: instance {name} is not on one line of its own")
    parse(text.encode())
    return f"{HEADER}\n{text}"


def render_nats(fleet_file: Path) -> str:
    """The server's configuration."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = tokenfleet(["bus", "config", "--fleet", str(fleet_file)])
    if code != 0:
        raise SystemExit("tokenfleet bus config failed")
    return out.getvalue()


def render_env(fleet_text: str) -> str:
    """Every secret that docker-compose.yml asks for."""
    users = user_names(parse(fleet_text.encode()))
    lines = ["TF_SECRET=change-me", "TF_POSTGRES_PASSWORD=change-me"]
    lines += [f"TF_NATS_PASSWORD_{user.upper().replace('-', '_')}=change-me" for user in users]
    return ENV_HEADER + "\n".join(lines) + "\n"


def render() -> dict[Path, str]:
    """All files and their contents."""
    fleet_file = ROOT / "deploy" / "compose.fleet.toml"
    fleet_text = render_fleet()
    # the users depend on sites and their kinds only, which the reference has too
    return {
        fleet_file: fleet_text,
        ROOT / "deploy" / "nats.conf": render_nats(REFERENCE),
        ROOT / ".env.example": render_env(fleet_text),
    }


def main() -> int:
    """Write the files."""
    for path, text in render().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
