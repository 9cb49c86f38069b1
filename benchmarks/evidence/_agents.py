"""Workloads of coding agents: long sessions of many turns, each prompt its predecessor's with something added.

Decides only what arrives: sessions begin at stepped rates, and within one the next turn is sent its pause after the
answer (closed loop). `generated` draws lengths from a few distributions; `recorded` takes sessions of the trace
`coding-agent`, again and again, each time with content of its own, so that a fleet of any size can be loaded without
running a session faster than it was. What tools define is common to sessions of an app.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

from benchmarks.evidence._simulated import trace_dir
from tokenfleet.replay.traces import Row, Trace, read

BLOCK_TOKENS = 512
#: ids of one session lie in a range of their own
_ROOM = 1 << 12
#: turns of a session that are replayed, and the longest pause before one, s
TURNS_MAX, PAUSE_MAX_S = 20, 20.0


def generated(seed: int, rates: Sequence[float], stage_s: float) -> Trace:
    """Sessions of eight apps, at so many per second in each stage."""
    dice = random.Random(f"agents {seed}")
    rows: list[Row] = []
    for number, begins_s in enumerate(_begins(dice, rates, stage_s), start=1):
        app = dice.randrange(8)
        tokens = 25_000 + int(min(40_000.0, dice.lognormvariate(math.log(2_000), 1.0)))
        at_s = begins_s
        for turn in range(min(TURNS_MAX, 1 + int(dice.expovariate(1 / 12.0)))):
            pause_s = min(PAUSE_MAX_S, dice.lognormvariate(math.log(5.0), 0.6))
            output = max(1, int(min(3_000.0, dice.lognormvariate(math.log(220), 0.8))))
            at_s += pause_s if turn else 0.0
            rows.append(_row(number, app, at_s, tokens, output, 24_000, pause_s))
            tokens += output + int(min(20_000.0, dice.lognormvariate(math.log(500), 1.1)))
            at_s += 4.0
            if tokens > 120_000:
                break
    return _trace("agents", rows)


def recorded(seed: int, rates: Sequence[float], stage_s: float) -> Trace:
    """Beginnings of recorded sessions, drawn with replacement."""
    sessions, common = _sessions()
    dice = random.Random(f"recorded {seed}")
    rows: list[Row] = []
    for number, begins_s in enumerate(_begins(dice, rates, stage_s), start=1):
        which = dice.randrange(len(sessions))
        at_s = begins_s
        for turn, row in enumerate(sessions[which][:TURNS_MAX]):
            pause_s = min(PAUSE_MAX_S, row.think_s or 0.0)
            at_s += pause_s if turn else 0.0
            rows.append(_row(number, which, at_s, row.input_tokens, row.output_tokens, common[which], pause_s))
            at_s += 4.0
    return _trace("recorded-agents", rows)


@lru_cache(maxsize=1)
def _sessions() -> tuple[list[list[Row]], list[int]]:
    """Sessions in order of turns, and how many tokens each shares with others at its beginning."""
    place = trace_dir()
    assert place is not None, "a part that names its traces is skipped where they are missing"
    by_session: dict[int | str, list[Row]] = defaultdict(list)
    owners: dict[int, set[int | str]] = defaultdict(set)
    for row in read(place / "coding-agent.jsonl.gz").rows:
        if row.session is not None:
            by_session[row.session].append(row)
            for block in row.blocks:
                owners[block].add(row.session)
    sessions = [by_session[name] for name in sorted(by_session, key=str)]
    common = [BLOCK_TOKENS * sum(len(owners[block]) > 1 for block in rows[0].blocks) for rows in sessions]
    return sessions, common


def _begins(dice: random.Random, rates: Sequence[float], stage_s: float) -> Iterator[float]:
    """Poisson arrivals of sessions, stage by stage."""
    for stage, rate in enumerate(rates):
        at_s = stage * stage_s + dice.expovariate(rate)
        while at_s < (stage + 1) * stage_s:
            yield at_s
            at_s += dice.expovariate(rate)


def _row(number: int, app: int, at_s: float, tokens: int, output: int, common: int, pause_s: float) -> Row:
    """One turn; its first `common` tokens are those of the app, the rest is the session's alone."""
    count, shared = tokens // BLOCK_TOKENS, common // BLOCK_TOKENS
    blocks = [app * _ROOM + n for n in range(min(count, shared))]
    blocks += [(1_000 + number) * _ROOM + n for n in range(shared, count)]
    return Row(
        t_s=at_s,
        input_tokens=tokens,
        output_tokens=max(1, output),
        blocks=tuple(blocks),
        session=f"s{number}",
        think_s=pause_s,
    )


def _trace(name: str, rows: list[Row]) -> Trace:
    return Trace(name=name, rows=tuple(sorted(rows, key=lambda row: row.t_s)), block_tokens=BLOCK_TOKENS)
