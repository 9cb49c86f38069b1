"""Trace files: read whole or refused by line; arrivals as they were, not as a coarse clock stamped them."""

import gzip
import json
import os
from pathlib import Path

import pytest

from tokenfleet.replay import traces
from tokenfleet.replay.errors import TraceError
from tokenfleet.replay.traces import Row, Trace

HEADER = {"format": "llm-trace-slice/1", "name": "small", "block_size": 512}
SHARED = Path(os.environ.get("TOKENFLEET_SHARED", Path(__file__).parents[4] / "shared"))


def trace_bytes(*rows: dict[str, object] | str, header: object = HEADER) -> bytes:
    lines = [json.dumps(header)]
    lines += [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return "\n".join(lines).encode() + b"\n"


def row(t: float, **more: object) -> dict[str, object]:
    return {"t": t, "in": 600, "out": 5, **more}


def test_a_row_carries_every_field_of_the_format() -> None:
    """Fields that public traces carry under short names arrive under ours; unknown ones (`img`, `api`) pass by."""
    read = traces.parse(
        trace_bytes(
            {
                "t": 1.5, "in": 1024, "out": 7, "blocks": [3, 9], "session": 4, "tenant": "t-1",
                "model": "m", "app": "tools", "type": "chat", "think": None, "api": 2.0, "img": 100,
            }
        )
    )  # fmt: skip
    assert read.rows == (
        Row(
            t_s=1.5, input_tokens=1024, output_tokens=7, blocks=(3, 9), session=4, tenant="t-1",
            model="m", app="tools", kind="chat",
        ),
    )  # fmt: skip
    assert read.name == "small"
    assert read.block_tokens == 512


@pytest.mark.parametrize(
    ("data", "line", "says"),
    [
        (b"", 1, "header"),
        (b"not json\n", 1, "header"),
        (trace_bytes(row(0), header={"format": "other/9"}), 1, "other/9"),
        (trace_bytes(), 1, "no request"),
        (trace_bytes(row(0), "{broken"), 3, ""),
        (trace_bytes(row(0), {"t": 1, "in": 5}), 3, "out"),
        (trace_bytes(row(0), row(2), row(1)), 4, "sorted"),
        (trace_bytes(row(-1)), 2, "from 0"),
        (trace_bytes({"t": 0, "in": 0, "out": 1}), 2, "at least 1"),
        (trace_bytes({"t": 0, "in": 5, "out": -1}), 2, "negative"),
        (trace_bytes(row(0, blocks=[1, 2, 3])), 2, "blocks"),
        (trace_bytes(row(0, blocks=[-1])), 2, "block ids"),
        (trace_bytes({"t": 0, "in": "5", "out": 1}), 2, "int"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(data: bytes, line: int, says: str) -> None:
    """Somebody edited a 10,000-line file by hand: the message must name the line, not just the sin."""
    with pytest.raises(TraceError) as caught:
        traces.parse(data, source="x.jsonl")
    assert caught.value.line == line
    assert says in caught.value.what
    assert str(caught.value).startswith(f"x.jsonl:{line}: ")


def test_a_truncated_gzip_is_a_trace_error(tmp_path: Path) -> None:
    """A download broke off: that is a wrong input, not a crash."""
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(trace_bytes(row(0)) * 50)[:-20])
    with pytest.raises(TraceError, match="cut"):
        traces.read(path)
    with pytest.raises(TraceError, match="No such file"):
        traces.read(tmp_path / "absent.jsonl")


def test_coarse_stamps_are_spread_evenly_inside_their_tick() -> None:
    """A clock of 3 s makes ten requests look like one burst every 3 s; replayed raw it fakes a 3x worse tail."""
    stamped = [row(3.0 * tick) for tick in range(10) for _ in range(3)]
    read = traces.parse(trace_bytes(*stamped))
    assert read.tick_s == 3.0
    assert [r.t_s for r in read.rows[:6]] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert read.span_s == pytest.approx(29.0)


def test_fine_stamps_stay_as_they_are() -> None:
    """Stamps of a tenth of a millisecond are the arrivals; two equal ones among them are a coincidence."""
    stamps = [0.0, 0.0, *(0.0131 * n for n in range(1, 40))]
    read = traces.parse(trace_bytes(*(row(round(t, 4)) for t in stamps)))
    assert read.tick_s == 0.0
    assert [r.t_s for r in read.rows] == pytest.approx([round(t, 4) for t in stamps])


def test_one_batch_at_zero_is_not_a_tick() -> None:
    """A batch job's rows all arrive at t = 0: there is no clock to undo."""
    assert traces.parse(trace_bytes(*(row(0) for _ in range(50)))).tick_s == 0.0


def test_the_limit_cuts_after_the_tick_was_found() -> None:
    """`--limit 5` must replay the first five arrivals of the whole trace, not five at one instant."""
    stamped = [row(3.0 * tick) for tick in range(10) for _ in range(5)]
    cut = traces.parse(trace_bytes(*stamped), limit=5, speed=2.0)
    assert [r.t_s for r in cut.rows] == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.2])


def test_merging_keeps_block_and_session_ids_apart() -> None:
    """Ids are local to a file: block 0 of two traces must not become a shared prefix that nobody had."""
    one = Trace(name="a", rows=(Row(t_s=1, input_tokens=600, output_tokens=1, blocks=(0,), session=1),))
    two = Trace(name="b", rows=(Row(t_s=0, input_tokens=600, output_tokens=1, blocks=(0,), session=1),))
    merged = traces.merge([one, two])
    assert [r.t_s for r in merged.rows] == [0, 1]
    assert len({r.blocks for r in merged.rows}) == 2
    assert len({r.session for r in merged.rows}) == 2


def test_an_encoded_trace_reads_back() -> None:
    """A generated workload that was saved is the same workload, classes and deadlines included."""
    trace = Trace(
        name="kept",
        rows=(
            Row(t_s=0.0, input_tokens=600, output_tokens=1, cls="chat", task="talk", deadline_ms=500.0),
            Row(t_s=0.4, input_tokens=700, output_tokens=2, blocks=(1,), tenant="x"),
        ),
    )
    assert traces.parse(traces.encode(trace)) == trace


@pytest.mark.parametrize(
    ("name", "requests", "tick_s"),
    [("mooncake-conversation", 5719, 3.0), ("azure2023-conv", 10108, 0.0), ("coding-agent", 3590, 0.0),
     ("arxiv-batch", 3000, 0.0), ("servegen-mix", 12020, 0.0)],
)  # fmt: skip
def test_the_published_slices_read_whole(name: str, requests: int, tick_s: float) -> None:
    """The real slices, with their real clocks: Mooncake's 3 s tick is found, nobody else's is imagined."""
    path = SHARED / "traces" / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no trace slices at {SHARED} (set TOKENFLEET_SHARED)")
    trace = traces.read(path)
    assert len(trace.rows) == requests
    assert trace.tick_s == tick_s
    arrivals = [r.t_s for r in trace.rows]
    assert arrivals == sorted(arrivals)
    if tick_s:
        # About ten requests a tick: spread, no two neighbours stand on one stamp any more.
        assert len(set(arrivals)) == requests
