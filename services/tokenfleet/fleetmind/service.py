"""FleetMind's shell: its core on the runtime, and its solver in a thread."""

import asyncio

from tokenfleet.effects import Effect
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.fleetmind.longcycle import MakePlan, PlanMade
from tokenfleet.runtime.runner import Read, Runner
from tokenfleet.runtime.service import Service
from tokenfleet.runtime.service import main as run_main
from tokenfleet.runtime.tasks import cancel_and_wait
from tokenfleet_schemas import codec
from tokenfleet_schemas.kv import KvSummarised
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
    # plans and promises hold until they are changed, however long ago they were made
    Read(filter=subject_filter("plan"), stream=stream_of("plan"), latest=True, since_s=None),
    Read(filter=subject_filter("reservation"), stream=stream_of("reservation"), latest=True, since_s=None),
)


async def body(service: Service) -> None:
    """Run the core until the service stops."""
    solving: set[asyncio.Task[None]] = set()

    async def solve(problem: MakePlan) -> None:
        try:
            made = await asyncio.to_thread(problem.solve)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            service.log.exception("planning failed", extra={"plan": problem.number})
            made = PlanMade(id=f"plan:made:{problem.number}", number=problem.number, failure=repr(error))
        runner.feed(made)

    def perform(effect: Effect) -> None:
        if not isinstance(effect, MakePlan):
            raise TypeError(f"nobody performs {type(effect).__name__}")
        task = asyncio.ensure_future(solve(effect))
        solving.add(task)
        task.add_done_callback(solving.discard)

    runner = Runner(service, FleetMind(service.fleet, replica=service.replica), READS, perform=perform)

    def take(_subject: str, _reply: str, data: bytes, _status: dict[str, str] | None) -> None:
        """Plain messages are in no stream; a summary that is missed is followed by another."""
        if not runner.caught_up.is_set():
            return
        try:
            runner.feed(codec.decode_packed(data))
        except codec.ContractError as error:
            service.log.warning("not a summary of KV content", extra={"error": str(error)})

    await service.bus.nc.listen(subject_filter(KvSummarised), take)
    try:
        await runner.run()
    finally:
        await cancel_and_wait(list(solving))


def main() -> int:
    """Entry point of `tokenfleet run fleetmind`; returns the exit code."""
    return run_main("fleetmind", body)
