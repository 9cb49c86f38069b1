"""The benchmark's own honesty: what it calls met, what its driver counts, and that its engine looks like one."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.load import Client
from benchmarks.overhead import FLEET, MARK, MODEL, body_of, judge, quantile

from tokenfleet.fleet import parse
from tokenfleet.siteagent import engines

ROOT = Path(__file__).parents[2]


def road(cpu_ms: float, p50_ms: float, p99_ms: float) -> dict[str, Any]:
    """What `measure` says of one road at one rate."""
    return {"cpu_ms": cpu_ms, "p50_ms": p50_ms, "first_p50_ms": p50_ms, "p99_ms": p99_ms, "failed": 0}


GOOD: dict[str, Any] = {
    "rates": {"20": {"direct": road(0, 1, 2), "bare": road(3, 3, 6), "fleet": road(6, 5, 22)}},
    "capacity": {"requests_per_s": 200.0, "failed": 0},
}


def missed(result: dict[str, Any]) -> list[str]:
    """Goals that are not met."""
    return [what for what, _value, _sign, _goal, met in judge(result) if not met]


def test_what_is_exactly_at_the_goals_meets_them() -> None:
    """Twice the bare road, 20 ms, 200 requests/s."""
    assert missed(GOOD) == []


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("rates", "20", "fleet", "cpu_ms"), 6.1, "CPU per request"),
        (("rates", "20", "fleet", "p50_ms"), 5.1, "whole answer"),
        (("rates", "20", "fleet", "first_p50_ms"), 5.1, "first token"),
        (("rates", "20", "fleet", "p99_ms"), 22.1, "added p99"),
        (("rates", "20", "bare", "failed"), 1, "without an answer"),
        (("capacity", "requests_per_s"), 199.0, "requests/s through one gateway"),
        (("capacity", "failed"), 1, "closed loop"),
    ],
)
def test_each_goal_can_be_missed(place: tuple[str, ...], value: float, words: str) -> None:
    """A regression in one figure must not hide behind the others."""
    result = copy.deepcopy(GOOD)
    at = result
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    found = missed(result)
    assert len(found) == 1
    assert words in found[0]


def test_quantiles_are_by_rank() -> None:
    """And nothing at all has none."""
    values = [float(n) for n in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (51.0, 100.0, 7.0)
    assert quantile([], 0.5) != quantile([], 0.5)


def test_its_fleet_file_is_one() -> None:
    """A new rule of fleet files must not be found by the next who runs the benchmark."""
    fleet = parse(FLEET.format(url="http://127.0.0.1:9").encode())
    assert set(fleet.sites["b"].instances) == {"b-1", "b-2"}
    assert fleet.models[MODEL].tokenizer == "bytes"


@pytest.fixture
def engine_url() -> Iterator[str]:
    """The engine that takes no time, as a process."""
    words = [sys.executable, "-m", "benchmarks.engine", MODEL, "5"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_the_driver_times_every_answer_and_counts_what_fails(engine_url: str) -> None:
    """Open and closed loop; a first token comes before the end; a wrong route is a failure and no answer."""
    body = body_of(300)
    client = Client(f"{engine_url}/v1/chat/completions", {}, body, MARK)
    found = await client.open_loop(200, 0.3, seed=1)
    assert found.failed == 0
    assert len(found.whole_ms) == len(found.first_ms) == len(found.lag_ms) > 20
    assert all(0 < first <= whole for first, whole in zip(found.first_ms, found.whole_ms, strict=True))
    assert len((await client.closed_loop(4, 0.2)).whole_ms) > 4
    client.close()
    lost = Client(f"{engine_url}/nowhere", {}, body, MARK)
    found = await lost.closed_loop(1, 0.05)
    lost.close()
    assert (found.failed > 0, found.whole_ms) == (True, [])


async def test_the_engine_says_what_a_site_agent_asks(engine_url: str) -> None:
    """Ready, of that model, idle, with a known capacity."""
    import aiohttp

    async with aiohttp.ClientSession(engine_url) as session:
        pages = {}
        for path in ("/health", "/v1/models", "/metrics", "/version"):
            async with session.get(path) as answer:
                assert answer.status == 200
                pages[path] = await answer.read()
    assert [one.name for one in engines.models(pages["/v1/models"])] == [MODEL]
    seen = engines.metrics("vllm", pages["/metrics"])
    assert (seen.running, seen.waiting, seen.kv_tokens_total) == (0, 0, 1_000_000)
    assert engines.version(pages["/version"]) == "0.32.0"
