"""A process's settings: environment variables `TOKENFLEET_*`, everything else is in the fleet file."""

import os
import secrets
from collections.abc import Mapping

import msgspec

#: prefixes that belong to others: engine credentials (gateway) and the test suite
_FOREIGN = ("TOKENFLEET_CREDENTIAL_", "TOKENFLEET_TEST_")
#: single variables of others: the key that `replay` sends, where traces are
_OTHERS = frozenset({"TOKENFLEET_KEY", "TOKENFLEET_SHARED", "TOKENFLEET_TRACES"})
_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(ValueError):
    """An environment variable is unknown or has an impossible value."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One field per variable: `nats_url` is `TOKENFLEET_NATS_URL`."""

    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password: str = ""
    #: `postgresql://user:password@host:port/database`; the accountant, the gateway and `db`, `keys`, `goodput`
    postgres_url: str = ""
    #: path of the fleet file
    fleet: str = "fleet.toml"
    #: site of this process
    site: str = ""
    #: name of this replica, unique over the fleet; made up when empty
    replica: str = ""
    #: address to listen on
    host: str = "127.0.0.1"
    #: the gateway's port for clients; 0 picks a free one
    api_port: int = 0
    #: port of /healthz, /readyz and /metrics; 0 picks a free one
    metrics_port: int = 0
    #: the fleet's secret: keys of digest chains, tenants' cache salts, hashes of API keys
    secret: str = ""
    log_level: str = "info"
    #: keep what this process's core is told and says in a file here (`tokenfleet.runtime.recording`); empty: do not
    record_dir: str = ""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read the environment; raises `SettingsError` naming the variable."""
        environ = os.environ if environ is None else environ
        values: dict[str, str] = {}
        for name, value in environ.items():
            if not name.startswith("TOKENFLEET_") or name.startswith(_FOREIGN) or name in _OTHERS:
                continue
            field = name.removeprefix("TOKENFLEET_").lower()
            if field not in cls.__struct_fields__:
                known = ", ".join(f"TOKENFLEET_{f.upper()}" for f in cls.__struct_fields__)
                raise SettingsError(f"{name}: no such setting; known are {known}")
            values[field] = value
        try:
            settings = msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(f"environment: {error}") from None
        if settings.log_level not in _LEVELS:
            raise SettingsError(f"TOKENFLEET_LOG_LEVEL: one of {', '.join(_LEVELS)}")
        for port in (settings.api_port, settings.metrics_port):
            if not 0 <= port <= 65535:
                raise SettingsError(f"not a port: {port}")
        return settings

    def replica_of(self, service: str) -> str:
        """The configured replica name, or a fresh one: `<service>-<site>-<8 random hex digits>`."""
        return self.replica or "-".join(part for part in (service, self.site, secrets.token_hex(4)) if part)
