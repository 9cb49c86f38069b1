"""The loop closed, live: an engine is throttled under load, and what was measured of it changes what is decided."""

import statistics
import time

import pytest
from tests.e2e.running import Load, Running, eventually

from tokenfleet.fleet import parse
from tokenfleet.local.fleetfile import REFERENCE

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
    When that place is throttled as well and requests are held, the class that suffers is guaranteed more. (The same
    with the feedback frozen: tests/simulation/test_loop.py.)"""
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
