"""The virtual clock: what is planned in a row happens when, and in the order in which, it would out of the heap."""

import random

from tokenfleet.simulator.loop import Loop, Row


def _happened(seed: int, *, rows: bool) -> list[tuple[float, int]]:
    """Three sources plan at random, two of them (mostly) in order; some of what happens plans more."""
    dice = random.Random(seed)
    loop = Loop(0.0)
    sources: list[Loop | Row] = [loop.row(), loop.row(), loop] if rows else [loop, loop, loop]
    found: list[tuple[float, int]] = []
    counter = 0

    def happen(number: int, more: bool) -> None:
        found.append((loop.now_ms, number))
        if more:
            plan(loop.now_ms + dice.choice([-1.0, 0.0, 5.0]))

    def plan(at_ms: float) -> None:
        nonlocal counter
        counter += 1
        sources[dice.randrange(3)].at(at_ms, happen, counter, dice.random() < 0.4)

    for step in range(200):
        plan(float(step // 4))
        plan(float(dice.randrange(60)))
    while loop.ended < counter:
        loop.run_until(loop.now_ms + 7.0)
    return found


def test_a_row_keeps_the_order_of_the_heap() -> None:
    """Six hundred thousand arrivals and time-outs in the heap made each event of a run dear; their order must stay."""
    for seed in range(20):
        assert _happened(seed, rows=True) == _happened(seed, rows=False)


def test_only_the_next_of_a_row_waits_in_the_heap() -> None:
    """Whatever is planned in order, the heap stays small."""
    loop = Loop(0.0)
    row = loop.row()
    for at in range(1000):
        row.at(float(at), int)
    assert len(loop._heap) == 1
    loop.run_until(998.0)
    assert (loop.ended, len(loop._heap)) == (999, 1)
