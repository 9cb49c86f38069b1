"""TokenPilot's shell: its core on the runtime, reading only its own site."""

import sys

from tokenfleet.fleet import Fleet
from tokenfleet.runtime.runner import Read, Runner
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.service import main as run_main
from tokenfleet.runtime.settings import SettingsError
from tokenfleet.tokenpilot.core import TokenPilot
from tokenfleet_schemas import codec
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.kv import KvChanged
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
from tokenfleet_schemas.room import RoomDeclined
from tokenfleet_schemas.routes import stream_of, subject_filter
from tokenfleet_schemas.tokens import NONE, slug


class SiteError(SettingsError):
    """TOKENFLEET_SITE names no site of the fleet file, or one without instances: there is nothing to place on."""


def reads(service: Service) -> tuple[Read, ...]:
    """What the TokenPilot of this process's site reads.

    Outcomes are captured at their entry site, so they are chosen by instance; those of requests that were never
    dispatched name none, and end holds.
    """
    site = service.settings.site

    def accept(subject: str) -> bool:
        leaf = subject.rpartition(".")[2]
        return leaf == NONE or leaf in _leaves(service, site)

    return (
        Read(
            filter=subject_filter(CapacityReported, site=site),
            stream=stream_of(CapacityReported),
            latest=True,
        ),
        Read(filter=subject_filter("placement", site=site), stream=stream_of("placement")),
        Read(filter=subject_filter(RoomDeclined, site=site), stream=stream_of(RoomDeclined), since_s=5),
        Read(filter=subject_filter(OutcomeStarted), stream=stream_of(OutcomeStarted), accept=accept),
        Read(filter=subject_filter(OutcomeFinished), stream=stream_of(OutcomeFinished), accept=accept),
        Read(filter=subject_filter(GatewayLeased), stream=stream_of(GatewayLeased), since_s=60),
    )


def _leaves(service: Service, site: str) -> frozenset[str]:
    """Subject tokens of the site's instances, after a reload those of the new fleet file."""
    fleet = service.fleet
    known = _LEAVES.get(site)
    if known is None or known[0] is not fleet:
        known = _LEAVES[site] = (fleet, frozenset(slug(name) for name in fleet.sites[site].instances))
    return known[1]


_LEAVES: dict[str, tuple[Fleet, frozenset[str]]] = {}


async def body(service: Service) -> None:
    """Run the core until the service stops; raises `SiteError`."""
    site = service.settings.site
    if site not in service.fleet.sites or not service.fleet.sites[site].instances:
        raise SiteError(f"TOKENFLEET_SITE={site!r}: no site with instances in {service.settings.fleet}")
    core = TokenPilot(service.fleet, site, replica=service.replica)
    core.exact.asks = True
    runner = Runner(service, core, reads(service))

    def take(_subject: str, _reply: str, data: bytes, _status: dict[str, str] | None) -> None:
        """Plain messages are in no stream: what comes before the fold has caught up is asked for again."""
        if not runner.caught_up.is_set():
            return
        try:
            runner.feed(codec.decode_packed(data))
        except codec.ContractError as error:
            service.log.warning("not a message of KV content", extra={"error": str(error)})

    await service.bus.nc.listen(subject_filter(KvChanged, site=site), take)
    await runner.run()


def main() -> int:
    """Entry point of `tokenfleet run tokenpilot`; returns the exit code."""
    try:
        return run_main("tokenpilot", body)
    except SiteError as error:
        print(f"tokenfleet tokenpilot: {error}", file=sys.stderr)
        return 2
