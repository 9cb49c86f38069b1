"""What engines cache is known by their KV events, in the whole fleet: foreseen hits are the hits that come."""

import os
import signal

import aiohttp
import pytest
from tests.e2e.running import Running, eventually

pytestmark = pytest.mark.timeout(200)


async def test_foreseen_hits_come_true_also_right_after_a_kill(fleet: Running) -> None:
    """A killed TokenPilot forgot every prefix, and each conversation was computed once more somewhere else."""

    async def exact() -> bool:
        try:
            gauges = (await fleet.metrics("tokenpilot-b")).get("tokenfleet_prefix_exact", {})
        except aiohttp.ClientError:
            return False  # it is not back yet
        return bool(gauges) and all(gauges.values())

    prompts = [f"{n} tells a long story. " * 150 for n in ("Ada", "Bea", "Cyd")]
    async with fleet.session() as session:
        for prompt in prompts:
            assert (await fleet.ask(session, prompt=prompt)).completed
        await eventually(exact, within_s=40, what="every instance of site b is known exactly")
        assert await fleet.total("siteagent-b", "tokenfleet_kv_digests") > 50  # of 64 tokens; one prompt has 70
        assert await fleet.total("siteagent-b", "tokenfleet_kv_events_silent") == 0

        async def at_home() -> bool:
            answer = await fleet.ask(session)
            return (await fleet.final(answer.request_id))["served_site"] == "b"

        for killed in (False, True):
            if killed:
                os.kill(fleet.pid("tokenpilot-b"), signal.SIGKILL)
                await eventually(exact, within_s=20, what="the next TokenPilot has asked for all of it")
                await eventually(at_home, within_s=30, what="requests are served at home again")
            for prompt in prompts:
                answer = await fleet.ask(session, prompt=prompt)
                assert answer.completed
                row = await fleet.final(answer.request_id)
                assert row["cached_tokens"] > 1000
                assert abs(row["prefix_hit_tokens_predicted"] - row["cached_tokens"]) <= 64
    assert await fleet.total("tokenpilot-b", "tokenfleet_hash_mismatch_total") == 0
