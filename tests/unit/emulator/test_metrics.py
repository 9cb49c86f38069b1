"""The /metrics page against the names and labels that a real vLLM 0.32.0 showed."""

import os
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenfleet.emulator.metrics import Histogram, Meters, page
from tokenfleet.engine_model import Engine, profile

CAPTURE = Path(os.environ.get("TOKENFLEET_SHARED", "../shared")) / "engines" / "captures" / "metrics-under-load.txt"


def make_page() -> str:
    """A page with something in most of its numbers."""
    engine = Engine(profile("8b-h100"))
    meters = Meters()
    meters.success["stop"] = 3
    meters.ttft.observe(0.03)
    engine.submit("a", prompt_tokens=40, output_tokens=4, now_ms=0)
    engine.next_step(100)
    return page(
        engine.stats(), meters, model='a"b', block_tokens=16, started_unix_s=1796057852.5, kv_tokens=381_000
    ).decode()


def samples(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """(name, label names in order) of every sample line."""
    found = re.findall(r"^([a-z][a-z_:]*)(?:\{(.*)\})? \S+$", text, re.MULTILINE)
    return {(name, tuple(re.findall(r'(\w+)="', labels))) for name, labels in found}


def test_every_name_exists_in_the_real_page_with_the_same_labels() -> None:
    """A scraper written against the emulator has to work against the engine."""
    if not CAPTURE.exists():
        pytest.skip(f"no capture of a real engine at {CAPTURE}")
    real = samples(CAPTURE.read_text())
    ours = samples(make_page())
    config = {item for item in ours if item[0] == "vllm:cache_config_info"}
    assert ours - config <= real
    assert len(ours) > 30
    (wide,) = (labels for name, labels in real if name == "vllm:cache_config_info")
    (narrow,) = (labels for _, labels in config)
    assert set(narrow) <= set(wide)


def test_a_prometheus_parser_reads_it() -> None:
    """Types, escapes and histograms: the page must be a valid exposition, not only look like one."""
    families = {family.name: family for family in text_string_to_metric_families(make_page())}
    running = families["vllm:num_requests_running"].samples[0]
    assert (running.labels, running.value) == ({"engine": "0", "model_name": 'a"b'}, 1.0)
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == pytest.approx(3 / 23812)
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    reasons = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert reasons["stop"] == 3.0


def test_histograms_cumulate() -> None:
    """A value on a bound belongs to its bucket, as `le` says."""
    histogram = Histogram("1.0 2.0")
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, 3)
    lines = list(histogram.lines("h", ('e="0"', 'm="x"')))
    assert [float(line.split()[-1]) for line in lines] == [2, 6, 7, 7, 18.0]


def test_a_page_costs_less_than_a_millisecond() -> None:
    """Ten engines scraped twenty times a second must not show."""
    make_page()
    best = min(_timed() for _ in range(20))
    assert best < 0.001


def _timed() -> float:
    start = time.perf_counter()
    make_page()
    return time.perf_counter() - start
