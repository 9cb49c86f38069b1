"""FleetMind's shell: its core on the runtime."""

from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.runtime.runner import Read, run_core
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.service import main as run_main
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.routes import stream_of, subject_filter

#: what FleetMind reads: folds need no more history than the longest hold and the longest answer
READS = (
    Read(filter=subject_filter("capacity"), stream=stream_of("capacity"), latest=True),
    Read(filter=subject_filter("admission"), stream=stream_of("admission")),
    Read(filter=subject_filter("placement"), stream=stream_of("placement")),
    Read(filter=subject_filter(OutcomeFinished), stream=stream_of(OutcomeFinished)),
    Read(filter=subject_filter(GatewayLeased), stream=stream_of(GatewayLeased), since_s=60),
)


async def body(service: Service) -> None:
    """Run the core until the service stops."""
    await run_core(service, FleetMind(service.fleet, replica=service.replica), READS)


def main() -> int:
    """Entry point of `tokenfleet run fleetmind`; returns the exit code."""
    return run_main("fleetmind", body)
