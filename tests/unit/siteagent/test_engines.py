"""S01: whatever an engine's version calls its metrics, the record is the same, and what is missing is unknown."""

import os
from pathlib import Path

import pytest

from tokenfleet.siteagent import engines
from tokenfleet.siteagent.engines import EngineError
from tokenfleet.siteagent.state import Metrics, Served

SHARED = Path(os.environ.get("TOKENFLEET_SHARED", Path(__file__).resolve().parents[4] / "shared"))
CAPTURES = SHARED / "engines" / "captures"

#: vLLM 0.4: the KV gauge has its first name, counters no `engine` label, no prefix cache
VLLM_OLD = b"""
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 5.0
vllm:num_requests_swapped{model_name="m"} 0.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:cpu_cache_usage_perc{model_name="m"} 0.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0
vllm:num_preemptions_total{model_name="m"} 3.0
vllm:prompt_tokens_total{model_name="m"} 900.0
vllm:generation_tokens_total{model_name="m"} 70.0
process_start_time_seconds 1.7e+09
"""
#: vLLM 0.8: V1 with the `gpu_` names of the prefix cache
VLLM_MIDDLE = (
    VLLM_OLD.replace(b"900.0", b"1000.0")
    + b"""
vllm:gpu_prefix_cache_queries_total{model_name="m"} 1000.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 100.0
"""
)
#: vLLM 0.10: old and new name side by side during the deprecation
VLLM_BOTH = (
    VLLM_MIDDLE.replace(b"vllm:gpu_cache", b'vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.25\nvllm:gpu_cache')
    + b"""
vllm:prefix_cache_hits_total{model_name="m"} 100.0
"""
)
#: vLLM 0.20: only the new names
VLLM_NEW = b"""
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 900.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
process_start_time_seconds 1.7e+09
"""
#: two data-parallel replicas behind one address
VLLM_REPLICAS = b"""
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.3
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.2
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="500"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 500.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 400.0
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
process_start_time_seconds 1.7e+09
"""
SAME = Metrics(
    running=5,
    waiting=2,
    kv_usage=0.25,
    kv_tokens_total=16_000,
    prompt_tokens_total=900,
    generation_tokens_total=70,
    preemptions_total=3,
    started_unix_s=1.7e9,
)
#: SGLang 0.4: no live token counters, several ranks that say the same
SGLANG_OLD = b"""
sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 16000.0
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:cached_tokens_total{model_name="m"} 100.0
sglang:generation_tokens_total{model_name="m"} 70.0
"""
SGLANG_NEW = b"""
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.25
sglang:full_token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.3
sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 16000.0
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",model_name="m"} 900.0
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_cache",model_name="m"} 100.0
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="m"} 70.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 25.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 52.0
"""


@pytest.mark.parametrize("page", [VLLM_OLD, VLLM_MIDDLE, VLLM_BOTH, VLLM_NEW, VLLM_REPLICAS])
def test_five_versions_of_vllm_say_the_same(page: bytes) -> None:
    """gpu_cache_usage_perc became kv_cache_usage_perc; schedulers kept the old name and saw no pressure."""
    assert engines.metrics("vllm", page) == SAME


@pytest.mark.parametrize("page", [SGLANG_OLD, SGLANG_NEW])
def test_two_versions_of_sglang_say_the_same(page: bytes) -> None:
    """Tokens are counted as they come where the version can, and ranks of one replica do not add up."""
    found = engines.metrics("sglang", page)
    assert (found.running, found.waiting, found.kv_usage, found.kv_tokens_total) == (5, 2, 0.25, 16_000)
    assert (found.prompt_tokens_total, found.generation_tokens_total) == (900, 70)
    assert found.preemptions_total is None
    assert found.started_unix_s is None


def test_what_a_page_does_not_say_is_unknown_and_not_zero() -> None:
    """Neither name is there: a KV cache taken for empty would win every placement."""
    page = b"\n".join(line for line in VLLM_NEW.splitlines() if b"kv_cache" not in line)
    found = engines.metrics("vllm", page)
    assert found.kv_usage is None
    assert found.unknown() == ("kv_usage",)
    assert engines.metrics("vllm", b"") == Metrics()
    assert engines.metrics("vllm", b"").unknown() == ("running", "waiting", "kv_usage")
    assert engines.metrics("sglang", VLLM_NEW).unknown() == ("running", "waiting", "kv_usage")


def test_values_that_are_no_values_are_unknown() -> None:
    """An engine that is still starting says NaN and `None`."""
    page = b"""
vllm:num_requests_running{engine="0"} NaN
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
vllm:kv_cache_usage_perc{engine="0"} NaN
"""
    found = engines.metrics("vllm", page)
    assert (found.running, found.kv_tokens_total, found.kv_usage) == (None, None, None)


def test_a_longer_name_is_another_metric() -> None:
    """`num_requests_waiting_by_reason` repeats what `num_requests_waiting` counts."""
    page = VLLM_NEW + b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\n'
    assert engines.metrics("vllm", page).waiting == 2


def test_a_page_that_cannot_be_read_is_an_error() -> None:
    """Half a page came: rather no sample than half of one."""
    with pytest.raises(EngineError):
        engines.metrics("vllm", b'vllm:num_requests_running{engine="0"} five\n')
    with pytest.raises(EngineError):
        engines.models(b"<html>")
    with pytest.raises(EngineError):
        engines.models(b'{"object":"list"}')


def test_an_engine_put_to_sleep_says_so() -> None:
    """Its /health stays 200 and requests hang."""
    asleep = b"""
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0
"""
    assert engines.metrics("vllm", asleep).asleep
    assert not engines.metrics("vllm", asleep.replace(b'"awake"} 0.0', b'"awake"} 1.0')).asleep


def capture(name: str) -> bytes:
    """The body of what a real engine sent."""
    path = CAPTURES / name
    if not path.is_file():
        pytest.skip(f"no captures of real engines at {CAPTURES}")
    data = path.read_bytes()
    return data.partition(b"\n\n")[2] or data.partition(b"\r\n\r\n")[2] if data.startswith(b"HTTP/") else data


def test_a_real_vllm_under_load() -> None:
    """vLLM 0.32.0 with 8 running and 16 waiting requests."""
    found = engines.metrics("vllm", capture("metrics-under-load.txt"))
    assert (found.running, found.waiting, found.kv_tokens_total) == (8, 16, 512 * 32)
    assert found.kv_usage == pytest.approx(0.58317, abs=1e-5)
    assert (found.prompt_tokens_total, found.generation_tokens_total, found.preemptions_total) == (81_929, 8_794, 0)
    assert found.started_unix_s == pytest.approx(1_796_058_015.35)
    assert found.unknown() == ()
    assert not found.asleep


def test_a_real_vllm_idle_and_fresh() -> None:
    """Idle is 0 and said, not unknown; the cache counts as empty though it is full of reusable blocks."""
    idle = engines.metrics("vllm", capture("metrics-idle-after-load.txt"))
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
    fresh = engines.metrics("vllm", capture("metrics-fresh.txt"))
    assert (fresh.running, fresh.prompt_tokens_total, fresh.generation_tokens_total) == (0, 0, 0)
    assert fresh.kv_tokens_total == 131_072 * 32


def test_a_real_sglang_under_load() -> None:
    """SGLang 0.5.23: live counters, no start time."""
    found = engines.metrics("sglang", capture("sglang/metrics-under-load.txt"))
    assert found.kv_tokens_total == 16_384
    assert (found.prompt_tokens_total, found.generation_tokens_total) == (2_667, 91)
    assert found.unknown() == ()
    assert found.started_unix_s is None


def test_real_engines_say_what_they_are() -> None:
    """The models page of both, and the version where each of them says it."""
    assert engines.models(capture("get-v1_models.txt")) == (Served(name="tiny", root="MODEL_DIR", max_model_len=4096),)
    assert engines.version(capture("get-version.txt")) == "0.32.0"
    assert engines.models(capture("sglang/get-v1_models.txt")) == (
        Served(name="tiny", root="tiny", max_model_len=4096),
    )
    assert engines.version(capture("sglang/get-server_info.txt")) == "0.5.23"
    assert engines.version(b"not json") == ""
