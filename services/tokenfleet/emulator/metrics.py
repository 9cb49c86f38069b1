"""The /metrics page of an emulated engine, in vLLM 0.32's names and labels. Decides nothing; renders what it is given.

Written by hand rather than by a client library: a page costs a few dozen microseconds, and a site agent may ask every
engine for it many times a second.
"""

from bisect import bisect_left
from collections.abc import Iterable

from tokenfleet.engine_model import EngineStats

_TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
_ITL = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
_REQUEST = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
#: ends of requests that a real engine distinguishes
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket, cumulated only when rendered."""

    __slots__ = ("_bounds", "_counts", "_names", "sum")

    def __init__(self, bounds: str) -> None:
        self._names = [*bounds.split(), "+Inf"]
        self._bounds = [float(bound) for bound in bounds.split()]
        self._counts = [0] * len(self._names)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, several times if so many had it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: tuple[str, str]) -> Iterable[str]:
        """Bucket, count and sum lines; `le` stands between the two labels, as in the alphabet."""
        engine, model = labels
        total = 0
        for bound, count in zip(self._names, self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{engine},le="{bound}",{model}}} {total}.0'
        yield f"{name}_count{{{engine},{model}}} {total}.0"
        yield f"{name}_sum{{{engine},{model}}} {self.sum!r}"


class Meters:
    """What the shell measures of one incarnation of an engine, beyond the engine's own statistics."""

    __slots__ = ("e2e", "inter_token", "queue", "rejections", "success", "ttft")

    def __init__(self) -> None:
        self.success = dict.fromkeys(REASONS, 0)
        self.rejections = 0
        self.ttft = Histogram(_TTFT)
        self.inter_token = Histogram(_ITL)
        self.e2e = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)


def page(
    stats: EngineStats,
    meters: Meters,
    *,
    model: str,
    block_tokens: int,
    started_unix_s: float,
    kv_tokens: int,
) -> bytes:
    """The whole page as of `stats`."""
    engine = 'engine="0"'
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    name = f'model_name="{escaped}"'
    both = f"{engine},{name}"
    hits = stats.prefix_hits_tokens_total
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_unix_s!r}",
    ]

    def add(metric: str, kind: str, *samples: tuple[str, float]) -> None:
        suffix = "_total" if kind == "counter" else ""
        lines.append(f"# TYPE vllm:{metric}{suffix} {kind}")
        for labels, value in samples:
            lines.append(f"vllm:{metric}{suffix}{{{labels}}} {float(value)!r}")
        if kind == "counter":
            lines.append(f"# TYPE vllm:{metric}_created gauge")
            lines.extend(f"vllm:{metric}_created{{{labels}}} {started_unix_s!r}" for labels, _ in samples)

    add("num_requests_running", "gauge", (both, stats.running))
    add("num_requests_waiting", "gauge", (both, stats.waiting))
    add(
        "num_requests_waiting_by_reason",
        "gauge",
        (f'{both},reason="capacity"', stats.waiting),
        (f'{both},reason="deferred"', 0),
    )
    add(
        "engine_sleep_state",
        "gauge",
        (f'{both},sleep_state="awake"', 1),
        (f'{both},sleep_state="weights_offloaded"', 0),
        (f'{both},sleep_state="discard_all"', 0),
    )
    add("kv_cache_usage_perc", "gauge", (both, stats.blocks_used / stats.blocks_total))
    add("prefix_cache_queries", "counter", (both, stats.prefix_queries_tokens_total))
    add("prefix_cache_hits", "counter", (both, hits))
    add("num_preemptions", "counter", (both, stats.preemptions_total))
    add("prompt_tokens", "counter", (both, stats.prompt_tokens_total))
    add("prompt_tokens_cached", "counter", (both, hits))
    add(
        "prompt_tokens_cached_by_source",
        "counter",
        (f'{both},source="device"', hits),
        (f'{both},source="host"', 0),
    )
    add("generation_tokens", "counter", (both, stats.generation_tokens_total))
    add(
        "request_success",
        "counter",
        *((f'{engine},finished_reason="{reason}",{name}', meters.success[reason]) for reason in REASONS),
    )
    add(
        "admission_rejections",
        "counter",
        (f'{name},reason="max_num_queued_reqs"', meters.rejections),
        (f'{name},reason="max_num_queued_tokens"', 0),
    )
    for metric, histogram in (
        ("time_to_first_token_seconds", meters.ttft),
        ("inter_token_latency_seconds", meters.inter_token),
        ("e2e_request_latency_seconds", meters.e2e),
        ("request_queue_time_seconds", meters.queue),
    ):
        lines.append(f"# TYPE vllm:{metric} histogram")
        lines.extend(histogram.lines(f"vllm:{metric}", (engine, name)))
    lines.append("# TYPE vllm:cache_config_info gauge")
    lines.append(
        f'vllm:cache_config_info{{block_size="{block_tokens}",cache_dtype="auto",enable_prefix_caching="True",{engine},'
        f'kv_cache_size_tokens="{kv_tokens}",num_cpu_blocks="None",num_gpu_blocks="{stats.blocks_total}",'
        f'prefix_caching_hash_algo="blake2b"}} 1.0'
    )
    lines.append("")
    return "\n".join(lines).encode()
