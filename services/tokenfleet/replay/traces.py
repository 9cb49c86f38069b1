"""Trace files: what arrives when, how long it is, and which prefixes it shares.

Decides how a `llm-trace-slice/1` file is read (line 1 a header object, then one request a line), and where inside a
coarse clock tick its arrivals lie. Refuses to know what the prompts say or who answers them. Pure but for `read`,
which opens one file.

Source of the format: the trace slices' own README (fields `t, in, out, blocks, session, tenant, model, app, type,
think`); ours adds the optional `class`, `task` and `deadline_ms`, so that a generated workload can be saved.
"""

import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tokenfleet.replay.errors import TraceError

FORMAT = "llm-trace-slice/1"
DEFAULT_BLOCK_TOKENS = 512
#: stamps finer than this need no spreading: a replay's own jitter is of the same size
FINEST_TICK_S = 0.05
#: a common divisor above this is chance, not a clock
COARSEST_TICK_S = 60.0
#: a stamp this far off its tick still belongs to it
CLOCK_JITTER_S = 0.002
#: fewer distinct stamps than this do not show a clock's tick
STAMPS_THAT_SHOW_A_TICK = 8


class Row(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "t_s": "t",
        "input_tokens": "in",
        "output_tokens": "out",
        "kind": "type",
        "think_s": "think",
        "cls": "class",
    },
    omit_defaults=True,
):
    """One request of a trace."""

    #: arrival, seconds from the start of the trace
    t_s: float
    input_tokens: int
    #: what the trace says was answered; an engine is never told this as `max_tokens`
    output_tokens: int
    #: ids of consecutive prefix blocks; an equal id means an equal whole prefix
    blocks: tuple[int, ...] = ()
    session: int | str | None = None
    tenant: int | str | None = None
    model: str | None = None
    app: str | None = None
    kind: str | None = None
    #: client delay before the request, seconds (closed-loop traces)
    think_s: float | None = None
    cls: str | None = None
    task: str | None = None
    #: the whole answer is wanted within this, counted from sending
    deadline_ms: float | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace ready to be replayed: rows sorted by arrival."""

    name: str
    rows: tuple[Row, ...]
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    #: the clock tick that was found in the stamps and spread over; 0 when there was none
    tick_s: float = 0.0

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.rows[-1].t_s - self.rows[0].t_s if self.rows else 0.0


class _Header(msgspec.Struct, frozen=True):
    format: str
    name: str = ""
    block_size: int | None = None


def read(path: Path, *, limit: int | None = None, speed: float = 1.0) -> Trace:
    """Read a `.jsonl` or `.jsonl.gz` trace; see `parse`. Raises `TraceError`, also when the file cannot be read."""
    source = path.name
    try:
        data = path.read_bytes()
        if path.suffix == ".gz" or data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(str(path), None, reason) from error
    return parse(data, source=source, limit=limit, speed=speed)


def parse(data: bytes, *, source: str = "trace", limit: int | None = None, speed: float = 1.0) -> Trace:
    """Parse a trace, spread its arrivals inside the clock's tick, cut it and speed it up.

    The tick is looked for in the whole file, before `limit` cuts it: a cut must not move the arrivals. `speed` 2
    halves every gap. Raises `TraceError` with the line number for anything that is not the format.
    """
    if limit is not None and limit < 1:
        raise TraceError(source, None, f"limit must be at least 1, not {limit}")
    if not (math.isfinite(speed) and speed > 0):
        raise TraceError(source, None, f"speed must be above 0, not {speed}")
    lines = data.splitlines()
    if not lines:
        raise TraceError(source, 1, "empty: line 1 must be the header object")
    header = _header(lines[0], source)
    block_tokens = header.block_size or DEFAULT_BLOCK_TOKENS
    decoder = msgspec.json.Decoder(Row)
    rows: list[Row] = []
    latest_s = 0.0
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(source, number, str(error)) from error
        wrong = _fault(row, latest_s, block_tokens)
        if wrong:
            raise TraceError(source, number, wrong)
        latest_s = row.t_s
        rows.append(row)
    if not rows:
        raise TraceError(source, len(lines), "no request follows the header")
    tick_s = detect_tick_s([row.t_s for row in rows])
    if tick_s:
        rows = spread(rows, tick_s)
    kept = rows[:limit]
    if speed != 1.0:
        kept = [msgspec.structs.replace(row, t_s=row.t_s / speed) for row in kept]
    return Trace(name=header.name or source, rows=tuple(kept), block_tokens=block_tokens, tick_s=tick_s)


def encode(trace: Trace) -> bytes:
    """The trace as a `.jsonl` file of the same format (a generated workload can be kept and replayed elsewhere)."""
    header = {"format": FORMAT, "name": trace.name, "block_size": trace.block_tokens}
    return b"\n".join([msgspec.json.encode(header), *(msgspec.json.encode(row) for row in trace.rows), b""])


def detect_tick_s(stamps_s: Sequence[float]) -> float:
    """The clock tick of arrival stamps in seconds; 0 when they are fine enough to be replayed as they are.

    The tick is the greatest common divisor of the stamps, taken in hundredths of a second because real clocks
    jitter around their tick (Mooncake's 3 s stamps come 1 ms early or late). It counts only where several requests
    share a stamp, and where enough stamps were seen to tell a clock from chance.
    """
    distinct = sorted(set(stamps_s))
    if len(distinct) < STAMPS_THAT_SHOW_A_TICK or len(distinct) == len(stamps_s):
        return 0.0
    tick = 0
    for stamp in distinct:
        hundredths = (stamp - distinct[0]) * 100
        whole = round(hundredths)
        if abs(hundredths - whole) > CLOCK_JITTER_S * 100:
            return 0.0
        tick = math.gcd(tick, whole)
    return tick / 100 if FINEST_TICK_S <= tick / 100 <= COARSEST_TICK_S else 0.0


def spread(rows: Sequence[Row], tick_s: float) -> list[Row]:
    """Put the k requests of one stamp at even distances inside its tick, in file order.

    Deterministic on purpose: replayed raw, coarse stamps send bursts that never happened and decide the result.
    """
    counts: dict[float, int] = {}
    for row in rows:
        counts[row.t_s] = counts.get(row.t_s, 0) + 1
    placed: dict[float, int] = {}
    moved: list[Row] = []
    for row in rows:
        nth = placed.get(row.t_s, 0)
        placed[row.t_s] = nth + 1
        offset_s = tick_s * nth / counts[row.t_s]
        moved.append(msgspec.structs.replace(row, t_s=row.t_s + offset_s) if nth else row)
    return moved


def merge(traces: Iterable[Trace], *, name: str = "merged") -> Trace:
    """Several traces as one, by arrival. Block and session ids are local to a trace, so they are kept apart.

    Raises `TraceError` for traces of different block sizes: their ids could not mean the same thing.
    """
    parts = list(traces)
    if not parts:
        raise TraceError(name, None, "nothing to merge")
    sizes = {part.block_tokens for part in parts}
    if len(sizes) > 1:
        raise TraceError(name, None, f"block sizes differ: {sorted(sizes)}")
    rows: list[Row] = []
    shift = 0
    for part in parts:
        highest = max((max(row.blocks) for row in part.rows if row.blocks), default=-1)
        for row in part.rows:
            session = None if row.session is None else f"{part.name}:{row.session}"
            blocks = tuple(block + shift for block in row.blocks)
            rows.append(msgspec.structs.replace(row, blocks=blocks, session=session))
        shift += highest + 1
    rows.sort(key=lambda row: row.t_s)
    return Trace(name=name, rows=tuple(rows), block_tokens=sizes.pop(), tick_s=max(p.tick_s for p in parts))


def _header(line: bytes, source: str) -> _Header:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except msgspec.DecodeError as error:
        raise TraceError(source, 1, f"not a header object: {error}") from error
    if header.format != FORMAT:
        raise TraceError(source, 1, f"format is {header.format!r}; this reads {FORMAT!r}")
    if header.block_size is not None and header.block_size < 1:
        raise TraceError(source, 1, f"block_size must be positive, not {header.block_size}")
    return header


def _fault(row: Row, latest_s: float, block_tokens: int) -> str:
    """What is wrong with a row; empty when nothing is."""
    if not math.isfinite(row.t_s) or row.t_s < 0:
        return f"t must be a number of seconds from 0, not {row.t_s}"
    if row.t_s < latest_s:
        return f"t {row.t_s} is before the line above it ({latest_s}): lines are sorted by t"
    if row.input_tokens < 1:
        return f"in must be at least 1, not {row.input_tokens}"
    if row.output_tokens < 0:
        return f"out must not be negative, not {row.output_tokens}"
    most = -(-row.input_tokens // block_tokens)
    if len(row.blocks) > most:
        return f"{len(row.blocks)} blocks of {block_tokens} tokens exceed in={row.input_tokens}"
    if any(block < 0 for block in row.blocks):
        return "block ids must not be negative"
    return ""
