"""What arrives in a run: the scenario's traces or generated workload as requests of this fleet, drawn by the seed.

Decides a request's entry, its prefix as the fleet's digests and as an engine's block names. The same seed gives the
same arrivals to every policy. Where a trace's stamps come from a coarse clock, the seed draws each arrival's place
inside its tick: replayed raw, such stamps send bursts that never happened. Stamps of a fine clock stay as they are.
"""

import math
import random
from base64 import b64encode
from itertools import chain
from zlib import crc32

import msgspec
import numpy as np

from tokenfleet import prefix
from tokenfleet.fleet import Fleet
from tokenfleet.replay import workload
from tokenfleet.replay.errors import ReplayError
from tokenfleet.replay.plan import Choices, Planned, parse_steps, plan
from tokenfleet.replay.traces import Row, Trace, merge
from tokenfleet.simulator.errors import ScenarioError
from tokenfleet.simulator.scenario import Scenario, Source

#: bits of a digest that number a block; those above are the tenant's salt
BLOCK_BITS = 44


class Arrival(msgspec.Struct, kw_only=True):
    """One request to come."""

    index: int
    #: from the run's start; of a closed session's later requests set when the answer before is there
    at_ms: float
    entry: str
    tenant: str
    service_class: str
    task: str
    #: as asked for, `NAME` or `NAME@VERSION`
    model: str
    input_tokens: int
    #: what the engine will generate; no policy is told
    output_tokens: int
    stated_output_tokens: int
    output_budget_tokens: int
    deadline_ms: float | None
    blocks: tuple[int, ...]
    block_tokens: int
    #: tenants of different salts share no prefix
    salt: int
    #: index of the session's next request and the pause before it, ms, where the loop is closed
    then: int | None = None
    pause_ms: float = 0.0
    #: sent when the one before it is answered
    follows: bool = False
    #: of its trace; empty: stands alone
    session: str = ""
    #: empty: made of seed and index. Ties break by it, so a live run's can be had again
    request_id: str = ""

    def digests(self) -> tuple[str, int]:
        """The prompt's prefix as a gateway sends it: packed chain and stride."""
        per = self.block_tokens // prefix.CHUNK_TOKENS
        count = min(self.input_tokens // prefix.CHUNK_TOKENS, len(self.blocks) * per)
        top = self.salt << BLOCK_BITS
        firsts = np.array(self.blocks, np.uint64) * np.uint64(per) + np.uint64(top)
        digests = (firsts[:, None] + np.arange(per, dtype=np.uint64)).ravel()[:count]
        if count <= prefix.MAX_DIGESTS:
            return b64encode(digests.tobytes()).decode(), 1
        return prefix.pack(digests.tobytes())

    def block_names(self, engine_block_tokens: int) -> list[int]:
        """The names of the prompt's full KV blocks, as an engine would hash them."""
        per = self.block_tokens // engine_block_tokens
        top = self.salt << BLOCK_BITS
        count = self.input_tokens // engine_block_tokens
        runs = (range(top + block * per, top + (block + 1) * per) for block in self.blocks)
        return list(chain.from_iterable(runs))[:count]


def draw(scenario: Scenario, seed: int) -> list[Arrival]:
    """The arrivals of a seed in order. Raises `ScenarioError` where a trace does not fit the fleet."""
    found: list[tuple[float, int, Planned, Source, int]] = []
    shift = 0
    for number, (source, given) in enumerate(zip(scenario.sources, scenario.traces, strict=True)):
        trace = _trace(scenario, source, given, seed)
        if trace.block_tokens % prefix.CHUNK_TOKENS:
            raise ScenarioError(scenario.info.name, [f"{source.trace}: blocks of {trace.block_tokens} tokens"])
        try:
            planned = plan(_keep_apart(trace, number, shift), scenario.fleet, _choices(source))
        except ReplayError as error:
            raise ScenarioError(scenario.info.name, [f"{source.trace}: {error}"]) from None
        until_s = source.until_s or math.inf
        found += [
            (one.at_s, number, one, source, trace.block_tokens)
            for one in planned
            if source.from_s <= one.at_s < until_s
        ]
        shift += 1 + max((max(row.blocks) for row in trace.rows if row.blocks), default=-1)
    if scenario.info.duration_s:
        found = [one for one in found if one[0] < scenario.info.duration_s]
    found.sort(key=lambda one: (one[0], one[1], one[2].index))
    if not found:
        raise ScenarioError(scenario.info.name, ["nothing arrives"])
    unknown = sorted({one[2].tenant for one in found} - set(scenario.fleet.tenants))
    if unknown:
        raise ScenarioError(scenario.info.name, [f"tenants that the fleet does not have: {', '.join(unknown[:5])}"])
    salts = _salts(scenario.fleet)
    entries = [name for name, site in scenario.fleet.sites.items() if site.entry]
    arrivals = [
        _arrival(index, one, source, block_tokens, salts, entries)
        for index, (_, _, one, source, block_tokens) in enumerate(found)
    ]
    _close_loops(arrivals, [(one[2].row, one[3]) for one in found])
    return arrivals


def _trace(scenario: Scenario, source: Source, given: Trace | None, seed: int) -> Trace:
    if given is None:
        streams = tuple(one for one in workload.STREAMS if not source.tasks or one.task in source.tasks)
        return workload.generate(
            seed=seed, duration_s=scenario.info.duration_s, rate_per_s=source.rate_per_s, streams=streams
        )
    if not given.tick_s:
        return given
    tick_s = given.tick_s / source.speed
    dice = random.Random(f"{seed} {given.name}")
    rows = []
    for row in given.rows:
        # Rows are spread evenly inside their ticks already: the tick is found again, the place in it is drawn.
        began_s = given.rows[0].t_s + (row.t_s - given.rows[0].t_s + 1e-6) // tick_s * tick_s
        rows.append(msgspec.structs.replace(row, t_s=began_s + dice.random() * tick_s))
    rows.sort(key=lambda row: row.t_s)
    return msgspec.structs.replace(given, rows=tuple(rows))


def _keep_apart(trace: Trace, number: int, shift: int) -> Trace:
    """Ids of blocks and sessions are local to a trace."""
    if not number:
        return trace
    apart = merge([msgspec.structs.replace(trace, name=f"{number}-{trace.name}")])
    rows = [msgspec.structs.replace(row, blocks=tuple(block + shift for block in row.blocks)) for row in apart.rows]
    return msgspec.structs.replace(apart, rows=tuple(rows))


def _choices(source: Source) -> Choices:
    return Choices(
        model=source.model,
        model_map=source.model_map,
        cls=source.service_class,
        steps=parse_steps(source.class_rule) if source.class_rule else (),
        tenant=source.tenant,
        default_tenant=source.default_tenant,
    )


def _salts(fleet: Fleet) -> dict[str, int]:
    return {name: 0 if tenant.share_prefix else 1 + n for n, (name, tenant) in enumerate(fleet.tenants.items())}


def _arrival(
    index: int, one: Planned, source: Source, block_tokens: int, salts: dict[str, int], entries: list[str]
) -> Arrival:
    row = one.row
    who = f"{one.tenant} {row.session if row.session is not None else index}"
    return Arrival(
        index=index,
        at_ms=one.at_s * 1000.0,
        entry=source.entry or entries[crc32(who.encode()) % len(entries)],
        tenant=one.tenant,
        service_class=one.cls,
        task=one.task,
        model=one.model,
        input_tokens=row.input_tokens,
        output_tokens=max(1, row.output_tokens),
        stated_output_tokens=row.output_tokens,
        output_budget_tokens=max(one.max_tokens, row.output_tokens, 1),
        deadline_ms=one.deadline_ms,
        blocks=row.blocks,
        block_tokens=block_tokens,
        salt=salts[one.tenant],
        session="" if row.session is None else f"{source.entry} {row.session}",
    )


def _close_loops(arrivals: list[Arrival], rows: list[tuple[Row, Source]]) -> None:
    last: dict[int | str, Arrival] = {}
    for arrival, (row, source) in zip(arrivals, rows, strict=True):
        if not source.closed_loop or row.session is None:
            continue
        before = last.get(row.session)
        if before is not None:
            before.then = arrival.index
            before.pause_ms = 1000.0 * (row.think_s or 0.0)
            arrival.follows = True
        last[row.session] = arrival
