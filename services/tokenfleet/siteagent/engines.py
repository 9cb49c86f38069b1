"""What engines say, in one form: adapters for vLLM and SGLang, from the bytes of their HTTP answers.

Decides which of an engine's many names means what. A value is taken from the first name that the page has: where two
versions' names stand side by side they mean the same and are never added. A name that is missing leaves None, never 0.
Refuses to know how the bytes were fetched and what follows from them.

Sources: vLLM `vllm/v1/metrics/loggers.py` and `docs/usage/metrics.md` (`gpu_cache_usage_perc` became
`kv_cache_usage_perc`, `gpu_prefix_cache_*` became `prefix_cache_*`), pages of vLLM 0.32.0; SGLang
`srt/observability/metrics_collector.py`, pages of SGLang 0.5.23 (its `generation_tokens_total` counts at a request's
end, `realtime_tokens_total` as they come).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tokenfleet.siteagent.state import Metrics, Served

Engine = Literal["vllm", "sglang"]
Labels = Mapping[str, str]

#: samples of several ranks of one replica say the same thing; replicas (`engine`, `dp_rank`) add up
_RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})


class EngineError(ValueError):
    """An engine's answer is not what its kind of engine sends."""


class Page:
    """The samples of a /metrics page that anybody here asks for."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        """Raises `EngineError` where a line that matters cannot be read."""
        starts = tuple(f"{name}{sign}" for name in names for sign in "{ ")
        # the parser is thorough and slow, and a page is mostly histograms
        lines = "\n".join(line for line in text.split("\n") if line.startswith(starts)) + "\n"
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        try:
            for family in text_string_to_metric_families(lines):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
        except ValueError as error:
            raise EngineError(f"/metrics: {error}") from None

    def labels(self, name: str) -> list[Labels]:
        """Labels of every sample of a name."""
        return [labels for labels, _ in self._samples.get(name, ())]

    def values(self, name: str, **match: str) -> list[float]:
        """One value per series whose labels match; ranks of one replica count once."""
        found: dict[tuple[tuple[str, str], ...], float] = {}
        for labels, value in self._samples.get(name, ()):
            if value != value or any(labels.get(key) != wanted for key, wanted in match.items()):
                continue
            series = tuple(sorted((key, label) for key, label in labels.items() if key not in _RANKS))
            found[series] = max(value, found.get(series, value))
        return list(found.values())

    def total(self, *names: str, **match: str) -> int | None:
        """Sum over replicas of the first name that is there."""
        for name in names:
            if values := self.values(name, **match):
                return int(sum(values))
        return None

    def mean(self, *names: str) -> float | None:
        """Mean over replicas of the first name that is there."""
        for name in names:
            if values := self.values(name):
                return sum(values) / len(values)
        return None


_VLLM = (
    "process_start_time_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:iteration_tokens_total_count",
    "vllm:engine_sleep_state",
)


def _vllm(text: str) -> Metrics:
    page = Page(text, _VLLM)
    computed = page.total("vllm:prompt_tokens_by_source_total", source="local_compute")
    if computed is None:
        computed = page.total("vllm:prompt_tokens_total")
        cached = page.total(
            "vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"
        )
        # hits are counted when a request is scheduled, prompts when it is prefilled
        computed = None if computed is None else max(0, computed - (cached or 0))
    usage = page.mean("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    return Metrics(
        running=page.total("vllm:num_requests_running"),
        waiting=page.total("vllm:num_requests_waiting"),
        kv_usage=usage,
        kv_tokens_total=_vllm_kv_tokens(page),
        prompt_tokens_total=computed,
        generation_tokens_total=page.total("vllm:generation_tokens_total"),
        preemptions_total=page.total("vllm:num_preemptions_total"),
        finished_total=page.total("vllm:request_success_total"),
        started_unix_s=page.mean("process_start_time_seconds"),
        steps_total=page.total("vllm:iteration_tokens_total_count"),
        asleep=page.values("vllm:engine_sleep_state", sleep_state="awake") == [0.0],
    )


def _vllm_kv_tokens(page: Page) -> int | None:
    """Blocks × block size over all replicas; None where one does not say (`None` while it is still starting)."""
    total = 0
    for labels in page.labels("vllm:cache_config_info"):
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if not (blocks.isdigit() and size.isdigit()):
            return None
        total += int(blocks) * int(size)
    return total or None


_SGLANG = (
    "process_start_time_seconds",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:full_token_usage",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
    "sglang:realtime_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:num_retracted_requests_total",
    "sglang:num_requests_total",
)


def _sglang(text: str) -> Metrics:
    page = Page(text, _SGLANG)
    computed = page.total("sglang:realtime_tokens_total", mode="prefill_compute")
    if computed is None:
        computed = page.total("sglang:prompt_tokens_total")
        cached = page.total("sglang:cached_tokens_total")
        computed = None if computed is None else max(0, computed - (cached or 0))
    generated = page.total("sglang:realtime_tokens_total", mode="decode")
    return Metrics(
        running=page.total("sglang:num_running_reqs"),
        waiting=page.total("sglang:num_queue_reqs"),
        kv_usage=page.mean("sglang:token_usage", "sglang:full_token_usage"),
        kv_tokens_total=page.total("sglang:max_total_num_tokens"),
        prompt_tokens_total=computed,
        generation_tokens_total=page.total("sglang:generation_tokens_total") if generated is None else generated,
        preemptions_total=page.total("sglang:num_retracted_requests_total"),
        finished_total=page.total("sglang:num_requests_total"),
        started_unix_s=page.mean("process_start_time_seconds"),
    )


_ADAPTERS: dict[str, Callable[[str], Metrics]] = {"vllm": _vllm, "sglang": _sglang}
#: where an engine says its version
VERSION_PATHS: dict[str, str] = {"vllm": "/version", "sglang": "/server_info"}


def metrics(engine: Engine, body: bytes) -> Metrics:
    """A /metrics page in one form; raises `EngineError` if it is none. A page without known names is all unknown."""
    return _ADAPTERS[engine](body.decode("utf-8", "replace"))


class _ModelEntry(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_ModelEntry]


class _Version(msgspec.Struct):
    version: str = ""


def models(body: bytes) -> tuple[Served, ...]:
    """The entries of /v1/models; raises `EngineError`."""
    try:
        page = msgspec.json.decode(body, type=_Models)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"/v1/models: {error}") from None
    return tuple(
        Served(name=entry.id, root=entry.root or "", parent=entry.parent or "", max_model_len=entry.max_model_len)
        for entry in page.data
    )


def version(body: bytes) -> str:
    """The engine's version, from the page that `VERSION_PATHS` names; empty where it does not say."""
    try:
        return msgspec.json.decode(body, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # for people only: an engine of any version is used by what it does
