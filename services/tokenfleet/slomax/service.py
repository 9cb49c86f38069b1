"""SLOMax's shell: its core on the runtime."""

from tokenfleet.runtime.runner import Read, run_core
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.service import main as run_main
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.goodput import GoodputMeasured
from tokenfleet_schemas.lease import GatewayLeased
from tokenfleet_schemas.outcome import OutcomeFinished
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.room import RoomOffered
from tokenfleet_schemas.routes import stream_of, subject_filter

#: what SLOMax reads: folds need no more history than the longest hold and the longest answer
READS = (
    Read(filter=subject_filter(CapacityReported), stream=stream_of(CapacityReported), latest=True),
    Read(filter=subject_filter(RequestReceived), stream=stream_of(RequestReceived)),
    Read(filter=subject_filter("admission"), stream=stream_of("admission")),
    Read(filter=subject_filter("placement"), stream=stream_of("placement")),
    Read(filter=subject_filter(RoomOffered), stream=stream_of(RoomOffered), since_s=5),
    Read(filter=subject_filter(OutcomeFinished), stream=stream_of(OutcomeFinished)),
    Read(filter=subject_filter(GoodputMeasured), stream=stream_of(GoodputMeasured), since_s=60),
    Read(filter=subject_filter(GatewayLeased), stream=stream_of(GatewayLeased), since_s=60),
)


async def body(service: Service) -> None:
    """Run the core until the service stops."""
    await run_core(service, SLOMax(service.fleet, replica=service.replica), READS)


def main() -> int:
    """Entry point of `tokenfleet run slomax`; returns the exit code."""
    return run_main("slomax", body)
