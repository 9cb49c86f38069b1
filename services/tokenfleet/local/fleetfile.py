"""The fleet file as it is on this machine: emulated instances get ports, everything else stays as written.

Decides which instances run here (those with a hardware profile) and where they listen.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from tokenfleet.fleet import Fleet, parse
from tokenfleet.local.errors import LocalError

#: the fleet that `tokenfleet up` runs when none is named
REFERENCE = Path(__file__).with_name("reference.fleet.toml")


def emulated(fleet: Fleet) -> list[str]:
    """Names of the instances that an emulator plays, in the file's order."""
    return [name for site in fleet.sites.values() for name, i in site.instances.items() if i.profile]


def resolve(text: str, *, ports: Mapping[str, int], host: str = "127.0.0.1") -> str:
    """The file's text with the emulated instances' addresses filled in.

    `ports` holds `<instance>` (the API) and `<instance>.admin` for each, `<process>.metrics` for agents and
    gateways. Comments are lost: this is a derived file.
    """
    raw = tomllib.loads(text)
    for site_name, site in raw.get("sites", {}).items():
        for process in (f"siteagent-{site_name}", f"gateway-{site_name}", "gateway" if site.get("entry") else ""):
            if f"{process}.metrics" in ports:
                site.setdefault("probe_url", f"http://{host}:{ports[f'{process}.metrics']}")
        for name, instance in site.get("instances", {}).items():
            if instance.get("profile"):
                instance["url"] = f"http://{host}:{ports[name]}"
                instance["admin_port"] = ports[f"{name}.admin"]
    return tomli_w.dumps(raw)


def write_fleet(path: Path, text: str) -> Fleet:
    """Check a fleet file's text, then replace the file at once; raises `FleetError` and leaves the old one."""
    fleet = parse(text.encode(), source=str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return fleet


def set_policy(path: Path, **policy: str) -> None:
    """Change entries of `[policy]` in a resolved file; running services take it up without a restart.

    Raises `FleetError` for a policy that does not exist and leaves the file as it was.
    """
    raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    raw.setdefault("policy", {}).update(policy)
    write_fleet(path, tomli_w.dumps(raw))


def read_fleet_text(path: Path) -> str:
    """A fleet file's text; raises `LocalError` saying why it cannot be had."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {path}: {error}") from None
