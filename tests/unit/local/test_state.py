"""Ports, the state directory and the resolved fleet file of `tokenfleet up`."""

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenfleet.fleet import FleetError, parse
from tokenfleet.local.cluster import members
from tokenfleet.local.errors import DataDirError, LocalError, PortInUseError
from tokenfleet.local.fleetfile import REFERENCE, emulated, resolve, set_policy, write_fleet
from tokenfleet.local.ports import Claims, choose_ports, free_ports, require_port
from tokenfleet.local.state_dir import StateDir, default_data_dir


def test_ports_are_distinct_and_below_the_ephemeral_range() -> None:
    """A client that reconnected to its dead server got the server's port as its own source port and met itself."""
    ports = free_ports(40)
    assert len(set(ports)) == 40
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if range_file.exists():
        assert max(ports) < int(range_file.read_text().split()[0])


def test_a_wished_port_is_kept_if_free_and_avoided_if_taken() -> None:
    """A restart moved every URL although the old ports were free; and a taken one must not stop it."""
    free = free_ports(1)[0]
    assert choose_ports({"api": free, "other": 0})["api"] == free
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert choose_ports({"api": port})["api"] != port


def test_two_fleets_started_in_the_same_second_do_not_choose_the_same_port(tmp_path: Path) -> None:
    """Both found 8080 free, and one of them came up seconds later to find it taken."""
    (free,) = free_ports(1)
    one, other = Claims(tmp_path / "claims"), Claims(tmp_path / "claims")
    assert choose_ports({"api": free, "more": 0}, claims=one)["api"] == free
    assert choose_ports({"api": free}, claims=other)["api"] != free
    with pytest.raises(PortInUseError):
        require_port(free, claims=other)
    assert choose_ports({"api": free}, claims=one)["api"] == free, "its own choice is still its own"
    one.close()
    assert choose_ports({"api": free}, claims=other)["api"] == free
    other.close()


def test_a_port_asked_for_by_number_is_named_when_taken() -> None:
    """`--port 8080` silently listened elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            require_port(port)


def test_a_second_up_on_the_same_directory_is_refused_by_name(tmp_path: Path) -> None:
    """Two supervisors on one database directory destroy it."""
    script = "import sys; from pathlib import Path; from tokenfleet.local.state_dir import StateDir\n"
    script += "with StateDir(Path(sys.argv[1])): pass"
    with StateDir(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert f"process {os.getpid()}" in done.stderr
    with StateDir(tmp_path):
        pass


def test_secrets_are_made_once_and_readable_by_the_owner_only(tmp_path: Path) -> None:
    """A new secret at each start made every issued key and cached prefix worthless."""
    with StateDir(tmp_path / "state") as state:
        secret = state.secret()
        passwords = state.passwords(["a", "b"])
    with StateDir(tmp_path / "state") as state:
        assert state.secret() == secret
        assert state.passwords(["a", "b", "c"]).items() > passwords.items()
        for name in ("secret", "passwords.json"):
            assert stat.S_IMODE((state.root / name).stat().st_mode) == 0o600
        assert stat.S_IMODE(state.root.stat().st_mode) == 0o700
    assert len(secret) >= 32


def test_damaged_state_is_named(tmp_path: Path) -> None:
    """Half a file after a full disk must be said, not guessed around."""
    (tmp_path / "keys.json").write_text("{")
    with StateDir(tmp_path) as state, pytest.raises(DataDirError, match=r"keys\.json is damaged"):
        state.read("keys.json")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("/var/lib/x", "/var/lib/x/tokenfleet"),
        ("relative", "~/.local/state/tokenfleet"),
        ("", "~/.local/state/tokenfleet"),
    ],
)
def test_the_default_directory_follows_xdg(
    variable: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification says that a relative XDG_STATE_HOME is to be ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", variable)
    assert default_data_dir() == Path(expected.replace("~", str(tmp_path)))


def test_the_reference_fleet_is_what_the_readme_says() -> None:
    """A entry only, B existing, C and D expansion; a tenant bound to a zone; a model in two versions."""
    fleet = parse(REFERENCE.read_bytes())
    assert fleet.sites["a"].entry
    assert not fleet.sites["a"].instances
    assert all(fleet.sites[site].instances for site in "bcd")
    assert fleet.models["chat-8b"].versions == ("1", "2")
    assert any(tenant.zones == ("eu",) for tenant in fleet.tenants.values())
    assert set(fleet.classes) == {"interactive", "chat", "agent", "document", "batch"}
    assert {m.name for m in members(fleet)} == {
        "emulator", "fleetmind", "slomax", "accountant", "gateway",
        *(f"{service}-{site}" for service in ("siteagent", "tokenpilot") for site in "bcd"),
    }  # fmt: skip


def test_resolving_fills_in_addresses_and_nothing_else(tmp_path: Path) -> None:
    """A value that the rewriting lost would make the local fleet another one than the file says."""
    text = REFERENCE.read_text()
    before = parse(text.encode())
    ports = {name: 20_000 + n for n, i in enumerate(emulated(before)) for name in (i,)}
    ports |= {f"{name}.admin": port + 1_000 for name, port in ports.items()}
    after = write_fleet(tmp_path / "fleet.toml", resolve(text, ports=ports))
    assert (after.classes, after.tenants, after.models, after.rtt, after.policy) == (
        before.classes, before.tenants, before.models, before.rtt, before.policy,
    )  # fmt: skip
    for name in emulated(before):
        site = before.instance_site(name)
        assert site is not None
        new = after.sites[site].instances[name]
        assert (new.url, new.admin_port) == (f"http://127.0.0.1:{ports[name]}", ports[f"{name}.admin"])
        assert new.profile == before.sites[site].instances[name].profile


def test_real_engines_keep_their_address() -> None:
    """Only emulated instances move to local ports."""
    text = re.sub(
        r"^b-chat-1 = .*$",
        'b-chat-1 = { model = "chat-8b", version = "1", url = "http://10.0.0.7:8000" }',
        REFERENCE.read_text(),
        flags=re.MULTILINE,
    )
    names = emulated(parse(text.encode()))
    assert "b-chat-1" not in names
    ports = {key: 1 for name in names for key in (name, f"{name}.admin")}
    assert parse(resolve(text, ports=ports).encode()).sites["b"].instances["b-chat-1"].url == "http://10.0.0.7:8000"


def test_an_unknown_policy_leaves_the_file_alone(tmp_path: Path) -> None:
    """A typo in a policy's name took every service's fleet file away."""
    path = tmp_path / "fleet.toml"
    write_fleet(path, resolve(REFERENCE.read_text(), ports=_any_ports()))
    set_policy(path, placement="round-robin", sites="round-robin", admission="none")
    policy = parse(path.read_bytes()).policy
    assert (policy.placement, policy.sites, policy.admission) == ("round-robin", "round-robin", "none")
    before = path.read_bytes()
    with pytest.raises(FleetError):
        set_policy(path, placement="best")
    assert path.read_bytes() == before


def _any_ports() -> dict[str, int]:
    return {key: 1 for name in emulated(parse(REFERENCE.read_bytes())) for key in (name, f"{name}.admin")}


def test_a_fleet_without_an_entry_is_refused() -> None:
    """It would start, and no client could reach it."""
    with pytest.raises(LocalError, match="no entry site"):
        members(parse(REFERENCE.read_text().replace("entry = true\n", "").encode()))
