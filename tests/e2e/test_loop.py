"""The loop closed, live: an engine is throttled under load, and what was measured of it changes what is decided."""

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.running import Load, Running, eventually, running

from tokenfleet.fleet import parse
from tokenfleet.local.fleetfile import REFERENCE, set_policy
from tokenfleet.local.ports import free_ports

CLASSES = parse(REFERENCE.read_bytes()).classes
pytestmark = pytest.mark.timeout(300)
#: the home instance of chat-8b@1
HOME = "b-chat-1"
#: and the other one in the bank's zone
AWAY = "c-chat-1"
#: guaranteed share of `interactive` as configured
CONFIGURED = CLASSES["interactive"].share / sum(cls.share for cls in CLASSES.values())
WHAT = {"tenant": "bank", "cls": "interactive", "tokens": 60}


async def _served(fleet: Running, since_s: float) -> tuple[float, float | None, int]:
    """Of the answers that the ledger has since a moment: share served away from home, TPOT predicted of the home
    instance (median of the last five), and how many completed there."""
    rows = await fleet.sql(
        "SELECT served_site, instance, predicted_tpot_ms FROM attempts"
        " WHERE received_at >= to_timestamp($1) AND outcome = 'completed' ORDER BY finished_at",
        since_s,
    )
    home = [r["predicted_tpot_ms"] for r in rows if r["instance"] == HOME and r["predicted_tpot_ms"] is not None]
    away = sum(row["served_site"] != "b" for row in rows) / max(1, len(rows))
    return away, statistics.median(home[-5:]) if home else None, len(home)


async def _share(fleet: Running) -> float | None:
    """What `interactive` is guaranteed of the home pool; none: nothing was ever held there."""
    found = (await fleet.metrics("slomax")).get("tokenfleet_share", {})
    wanted = {("site", "b"), ("model", "chat-8b"), ("version", "1"), ("service_class", "interactive")}
    return next((value for labels, value in found.items() if wanted <= set(labels)), None)


async def test_a_throttled_engine_moves_predictions_diversion_and_shares(fleet: Running) -> None:
    """The home engine runs at a sixth of its speed from one moment on: it is predicted to, and work goes elsewhere.
    When that place is throttled as well and requests are held, the class that suffers is guaranteed more."""
    began_s = time.time()
    async with Load(fleet, rate_per_s=6.0, **WHAT) as load:  # type: ignore[arg-type]

        async def known() -> bool:
            return (await _served(fleet, began_s))[2] >= 10

        await eventually(known, within_s=15, what="answers of the home engine in the ledger")
        away_before, predicted_before_ms, _ = await _served(fleet, began_s)
        share_before = await _share(fleet) or CONFIGURED
        assert predicted_before_ms is not None
        async with fleet.faulty([HOME], "slow", factor=6.0):
            slow_s = time.time()

            async def followed() -> bool:
                away, predicted_ms, _ = await _served(fleet, slow_s)
                return predicted_ms is not None and predicted_ms > 3 * predicted_before_ms and away > away_before

            await eventually(followed, within_s=30, what="predictions and diversion")
            async with fleet.faulty([AWAY], "slow", factor=6.0):

                async def raised() -> bool:
                    return (await _share(fleet) or 0.0) > share_before

                await eventually(raised, within_s=30, what="shares")
            # what is held must not outlive the test
            await load.stop()


#: the home site's engines: three are slow until the shift, the other three from then on
FIRST, THEN = ("b-chat-0", "b-chat-1", "b-chat-2"), ("b-chat-3", "b-chat-4", "b-chat-5")
ENGINE = """{ model = "chat-8b", version = "1", url = "http://127.0.0.1:0", profile = "8b-a100", token_budget = 512,
 max_sequences = 8, kv_tokens = 24000 }""".replace("\n", "")
HOME_ENGINES = "\n".join(f"{name} = {ENGINE}" for name in (*FIRST, *THEN))
SHIFTING = f"""
[fleet]
name = "shifting"
default_class = "interactive"
[models.chat-8b]
versions = ["1"]
default_version = "1"
max_model_len = 16384
tokenizer = "bytes"
chat_template = "chatml"
[sites.a]
zone = "eu"
entry = true
homes = {{ chat-8b = ["b", "c"] }}
[sites.b]
zone = "eu"
[sites.b.instances]
{HOME_ENGINES}
[sites.c]
zone = "eu"
[sites.c.instances]
c-chat-0 = {ENGINE}
[network.rtt_ms]
a-b = 5
a-c = 30
b-c = 28
[classes.interactive]
ttft_ms = 500
tpot_ms = 60
tier = 0
patience_ms = 5000
[tenants.bank]
zones = ["eu"]
classes = ["interactive"]
"""


class Half(msgspec.Struct):
    """What the ledger says of the requests received in one half of a run."""

    offered: int
    compliant: int
    #: medians over answers of the engines that are slow in the second half, ms; None: there were none
    predicted_tpot_ms: float | None
    tpot_ms: float | None

    @property
    def compliance(self) -> float:
        return self.compliant / self.offered


def _half(rows: list[dict[str, Any]]) -> Half:
    turned = [row for row in rows if row["instance"] in THEN and row["tpot_ms"] and row["predicted_tpot_ms"]]
    return Half(
        offered=len(rows),
        compliant=sum(row["compliant"] for row in rows),
        predicted_tpot_ms=statistics.median(row["predicted_tpot_ms"] for row in turned) if turned else None,
        tpot_ms=statistics.median(row["tpot_ms"] for row in turned) if turned else None,
    )


async def _shifting(where: Path, *, frozen: bool, half_s: float = 45.0) -> tuple[Half, Half]:
    """Both halves of a run in which the fleet turns in the middle, and what it learned before is wrong from then on."""
    where.mkdir()
    wanted = where / "fleet.toml"
    wanted.write_text(SHIFTING)
    with running(where / "state", "--fleet", str(wanted), "--port", str(free_ports(1)[0])) as fleet:
        for instance in FIRST:
            await fleet.fault(instance, "slow", factor=6.0)
        async with Load(fleet, rate_per_s=5.0, tenant="bank", cls="interactive", tokens=60) as load:
            await asyncio.sleep(half_s)
            if frozen:
                set_policy(fleet.data_dir / "fleet.toml", feedback="frozen")
                await asyncio.sleep(3.0)
            for instance in FIRST:
                await fleet.fault(instance, "none")
            for instance in THEN:
                await fleet.fault(instance, "slow", factor=6.0)
            shift_s = time.time()
            await asyncio.sleep(half_s)
            await load.stop()

        async def written() -> list[dict[str, Any]]:
            rows = await fleet.sql(
                "SELECT compliant, instance, predicted_tpot_ms, tpot_ms, extract(epoch FROM received_at) AS at_s"
                " FROM attempts WHERE final"
            )
            return rows if len(rows) >= len(load.answers) else []

        rows = await eventually(written, within_s=60, what="every request in the ledger")
        return _half([row for row in rows if row["at_s"] < shift_s]), _half([r for r in rows if r["at_s"] >= shift_s])


@pytest.mark.soak
@pytest.mark.timeout(1500)
async def test_feedback_frozen_at_a_shift_costs_compliance(tmp_path: Path) -> None:
    """The same run twice: half of the home engines are slow, the fleet learns which, then these are well and the others
    are slow. What goes on learning keeps its promises at least five points more often than what is frozen at what was
    right for the first half; the 95% interval of the difference is all above zero."""
    alive_first, alive = await _shifting(tmp_path / "alive", frozen=False)
    frozen_first, frozen = await _shifting(tmp_path / "frozen", frozen=True)
    print(f"alive: {alive_first.compliance:.3f}, then {alive}")
    print(f"frozen: {frozen_first.compliance:.3f}, then {frozen}")
    # nothing differs before the shift
    assert abs(alive_first.compliance - frozen_first.compliance) < 0.15
    difference = alive.compliance - frozen.compliance
    error = sum(half.compliance * (1 - half.compliance) / half.offered for half in (alive, frozen)) ** 0.5
    assert difference >= 0.05
    assert difference - 1.96 * error > 0
    # because who is frozen goes on believing the engines that turned slow
    assert frozen.predicted_tpot_ms is not None
    assert frozen.tpot_ms is not None
    assert frozen.predicted_tpot_ms < 0.5 * frozen.tpot_ms
