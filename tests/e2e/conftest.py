"""One whole fleet for all end-to-end tests, and what must hold after each of them.

`fleet` is `tokenfleet up` with the reference fleet, started once and warmed up; whoever uses it is followed by
`Running.invariants`, so that a test which leaves something open fails itself and not its neighbour.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.running import Running, running

from tokenfleet.local.ports import free_ports

HERE = Path(__file__).parent
_fleets = ExitStack()


@pytest.fixture(scope="session")
def whole_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The running fleet, warmed up: every engine has answered, and what its processes hold then is their baseline."""
    # a port of its own: another fleet on this machine would take the usual one while our gateway is dead
    state = tmp_path_factory.mktemp("fleet") / "state"
    found = _fleets.enter_context(running(state, "--port", str(free_ports(1)[0])))
    with asyncio.Runner() as runner:
        runner.run(_warm_up(found))
    yield found
    _fleets.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The fleet ends with the last test here: a session's fixture would cost all other tests its share of the CPU."""
    if nextitem is None or HERE not in nextitem.path.parents:
        _fleets.close()


async def _warm_up(found: Running) -> None:
    async with found.session() as session:
        for model in ("chat-8b", "chat-8b@2", "doc-32b"):
            for stream in (True, False):
                answers = await asyncio.gather(
                    *(found.ask(session, model=model, stream=stream, tokens=12) for _ in range(4))
                )
                assert all(one.completed for one in answers), answers
    await found.invariants(within_s=30.0)
    found.baseline = await found.weights()


@pytest.fixture
async def fleet(whole_fleet: Running) -> AsyncIterator[Running]:
    """The running fleet; afterwards nothing of the test is left in it."""
    yield whole_fleet
    for instance in whole_fleet.ready["emulators"]:
        await whole_fleet.fault(instance, "none")
    await whole_fleet.invariants(within_s=25.0)
