"""How many sequences keep the promised pace: learned, bounded by the engine, never a guess, and lifted again."""

import msgspec
import pytest
from tests.unit.tokenpilot.driver import Pilot

from tokenfleet.tokenpilot.tempo import ENOUGH, LATE, Promised, Tempo
from tokenfleet_schemas.placement import PlacementAssigned, PlacementHeld
from tokenfleet_schemas.room import RoomOffered

#: an engine whose step takes 12 ms, 0.07 more a sequence, 0.0001 a KV token, 0.07 a prompt token
PRIOR = (12.0, 0.07, 1e-4, 0.07)


def pace_ms(sequences: float) -> float:
    """Beside answers of 200 tokens to prompts of 1,000, of which 800 are cached: each adds 0.26 ms."""
    return 12.0 + 0.26 * sequences


def taught(*, level: float = 1.0, sequences: float = 100.0, jitter: float = 0.0, count: int = 200) -> Tempo:
    tempo = Tempo()
    for n in range(count):
        came_ms = level * pace_ms(sequences) * (1.0 + (jitter if n % 2 else -jitter))
        tempo.learn(PRIOR, sequences, 200.0, 200.0, 1_200.0, came_ms)
        tempo.judge(came_ms, 60.0, 200.0)
    return tempo


def promised(**tokens: float) -> Promised:
    return Promised({int(name.removeprefix("ms")): float(many) for name, many in tokens.items()})


def test_as_many_run_as_keep_the_pace() -> None:
    """An engine that takes 256 ran 256 in an overload: at 79 ms a token not one of them had the promised 60."""
    most = taught().most(PRIOR, promised(ms60=100), 256, 1e6)
    assert most is not None
    assert 50.0 < pace_ms(most) <= 60.0


def test_where_the_engine_is_the_limit_there_is_no_other() -> None:
    """Eight sequences keep any pace; and KV for fifty is no more than that."""
    tempo = taught()
    assert tempo.most(PRIOR, promised(ms60=100), 8, 1e6) is None
    assert tempo.most(PRIOR, promised(ms60=100), 256, 50 * 1_200.0) is None


def test_few_sequences_are_never_the_cause() -> None:
    """A machine that is slow altogether: with a limit of two it would be slow all the same, and nearly empty."""
    slow = taught(level=6.0, sequences=8.0)
    assert slow.late > LATE
    assert slow.limit(None, PRIOR, promised(ms60=100), 8, 1e6) is None
    assert slow.limit(None, PRIOR, promised(ms60=100), 16, 1e6) is None
    limit = slow.limit(None, PRIOR, promised(ms60=100), 256, 1e6)
    assert limit is None or limit >= 16


def test_nothing_is_held_back_for_what_is_not_known() -> None:
    """A new instance, or a pool of which nobody was promised a pace, runs what it takes."""
    assert taught(count=ENOUGH - 1).most(PRIOR, promised(ms60=100), 256, 1e6) is None
    assert taught().most(PRIOR, Promised(), 256, 1e6) is None
    assert taught().most(PRIOR, promised(ms0=100), 256, 1e6) is None


def test_a_promise_that_cannot_be_kept_holds_nobody_back() -> None:
    """Not even a single sequence comes at 10 ms a token: the others' promise counts, or none."""
    tempo = taught()
    assert tempo.most(PRIOR, promised(ms10=100), 256, 1e6) is None
    assert tempo.most(PRIOR, promised(ms10=100, ms60=100), 256, 1e6) == tempo.most(PRIOR, promised(ms60=1), 256, 1e6)


def test_a_few_strict_ones_do_not_cost_the_others_their_places() -> None:
    """Of a hundred tokens two are promised 30 ms: at the pace that keeps them less than half is made."""
    tempo = taught()
    few = tempo.most(PRIOR, promised(ms30=2, ms60=98), 256, 1e6)
    many = tempo.most(PRIOR, promised(ms30=98, ms60=2), 256, 1e6)
    assert few is not None
    assert many is not None
    assert 50.0 < pace_ms(few) <= 60.0
    assert pace_ms(many) <= 30.0


@pytest.mark.parametrize("slower", [{"level": 2.0}, {"jitter": 0.2}])
def test_level_and_spread_are_learned(slower: dict[str, float]) -> None:
    """Hardware at half the speed that was said keeps the pace of fewer; so does one that is sometimes late."""
    exact = taught().most(PRIOR, promised(ms60=100), 256, 1e6)
    other = taught(**slower).most(PRIOR, promised(ms60=100), 256, 1e6)
    assert exact is not None
    assert other is not None
    assert other < exact


def test_a_limit_is_set_for_broken_promises_only_and_lifted_while_they_are_kept() -> None:
    """Physics alone held agents back that had all they were promised; and a limit that nothing lifts is for ever."""
    well = taught(sequences=100.0)
    assert well.late < 0.01
    assert well.limit(None, PRIOR, promised(ms60=100), 256, 1e6) is None
    sick = taught(sequences=250.0)
    assert sick.late > LATE
    limit = sick.limit(None, PRIOR, promised(ms60=100), 256, 1e6)
    assert limit is not None
    assert pace_ms(limit) <= 60.0
    # while it is late a limit is lowered only
    assert sick.limit(50.0, PRIOR, promised(ms60=100), 256, 1e6) == 50.0
    steps = 0
    while limit is not None:
        before, limit = limit, well.limit(limit, PRIOR, promised(ms60=100), 256, 1e6)
        assert limit is None or before < limit <= before * 1.04
        steps += 1
    assert 10 < steps < 100


def test_a_short_answer_says_less() -> None:
    """Two tokens beside somebody's prefill come late at any load."""
    tempo = taught()
    for _ in range(300):
        tempo.judge(500.0, 60.0, 2.0)
    assert tempo.late < 0.05
    for _ in range(300):
        tempo.judge(500.0, 60.0, 400.0)
    assert tempo.late > LATE


def test_a_burst_of_late_answers_sets_no_limit() -> None:
    """Agents' long prompts came together, thirty answers were late, and engines that kept their promises before and
    after were limited for minutes: their queues were a minute long."""
    tempo = taught(sequences=100.0)
    for _ in range(60):
        tempo.judge(500.0, 60.0, 400.0)
    assert tempo.limit(None, PRIOR, promised(ms60=100), 256, 1e6) is None
    for _ in range(60):
        tempo.judge(30.0, 60.0, 400.0)
    assert tempo.limit(150.0, PRIOR, promised(ms60=100), 256, 1e6) == pytest.approx(154.5)


def test_old_demand_is_forgotten() -> None:
    """Interactive traffic ended hours ago: its promise holds nobody back any more, and takes no memory."""
    demand = Promised()
    for _ in range(500):
        demand.hear(60.0, 100.0)
    for _ in range(3_000):
        demand.hear(None, 100.0)
    assert demand.tokens.keys() == {0}
    assert demand.kept(1_000.0, 1.0, 0.1) == 1.0


def test_beyond_it_an_instance_has_no_room() -> None:
    """The third of two is held for want of a sequence, and room is said when one has ended."""
    pilot = Pilot(instances=1, policy='placement = "predicted-latency"')
    pilot.core.state.load("b-0").paced = 2.7
    pilot.report("b-0")
    said = [event for name in ("one", "two", "three") for event in pilot.request(name, input_tokens=10)]
    first, second, held = said[:3]
    assert isinstance(first, PlacementAssigned)
    assert isinstance(second, PlacementAssigned)
    assert isinstance(held, PlacementHeld)
    assert (held.request_id, held.lacks) == ("three", "sequences")
    pilot.now_ms += 100
    pilot.start(first)
    pilot.start(second)
    pilot.now_ms += 100
    offers = [event for event in pilot.finish(first) if isinstance(event, RoomOffered)]
    assert [offer.sequences for offer in offers] == [1]


def test_it_is_part_of_a_checkpoint() -> None:
    """A new owner goes on with what was learned."""
    tempo = taught(sequences=250.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tempo), type=Tempo) == tempo
    demand = promised(ms60=3, ms0=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(demand), type=Promised) == demand
