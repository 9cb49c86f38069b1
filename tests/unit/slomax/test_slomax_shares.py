"""Capacity feedback: the accountant's windows move the classes' shares, slowly, within bounds, and never on silence."""

import itertools
from collections.abc import Iterable

from tests.simulation.messages import Bench, held, make_ask
from tests.unit.slomax.test_slomax_core import bench_of, fleet_with

from tokenfleet.fleet import Fleet
from tokenfleet.slomax import fairness, shares
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.admission import AdmissionShared
from tokenfleet_schemas.goodput import GoodputMeasured, Percentiles

_revisions = itertools.count(1)
NOTHING = Percentiles(count=0)


def window(bench: Bench, name: str, offered: int, compliant: int, **changes: object) -> GoodputMeasured:
    """The accountant's ten seconds of one class at site b."""
    values = {
        "id": f"goodput:{name}:{next(_revisions)}",
        "site": "b",
        "service_class": name,
        "tenant": "acme",
        "model": "m",
        "window_s": 10,
        "window_end_unix_ms": int(bench.now_ms),
        "revision": 0,
        "offered": offered,
        "completed": offered,
        "compliant": compliant,
        "refused": 0,
        "cancelled": 0,
        "failed": 0,
        "repeated": 0,
        "output_tokens": 0,
        "compliant_tokens": 0,
        "wasted_tokens": {},
        "output_tokens_per_s": 0.0,
        "goodput_tokens_per_s": 0.0,
        "ttft_ms": NOTHING,
        "tpot_ms": NOTHING,
    }
    return GoodputMeasured(**{**values, **changes})  # type: ignore[arg-type]  # a test's table of mixed values


def run(bench: Bench, seconds: int, seen: Iterable[tuple[str, int, int]] = ()) -> list[AdmissionShared]:
    """So many seconds, with these windows every second; what was said of the shares at site b."""
    before = len(bench.said)
    for _ in range(seconds):
        bench.feed(*(window(bench, *one) for one in seen))
        bench.run(1_000, lease=["r1"])
    return [event for event in bench.of(AdmissionShared, bench.said[before:]) if event.site == "b"]


def share(bench: Bench, name: str) -> float:
    return fairness.shares_of(bench.core.fleet, bench.core.state.pools[("b", "m", "1")])[name]


def ready(fleet: Fleet | None = None) -> Bench:
    bench = bench_of(fleet)
    bench.feed(held(make_ask(), patience_left_ms=250_000.0))
    return bench


class TestSteps:
    """What moves shares."""

    def test_a_class_that_falls_behind_gains_from_one_that_does_not(self) -> None:
        """Documents missed their deadlines beside a chat that had more than it needed; the cause is said."""
        bench = ready()
        before = share(bench, "document")
        said = run(bench, 6, [("chat", 100, 100), ("document", 40, 10)])
        assert share(bench, "document") > before * 1.15
        assert share(bench, "chat") < 4 / 7
        causes = {one.service_class: one.cause for one in said[-1].shares}
        assert causes["document"] == "raised"
        assert causes["chat"] == "lowered"
        assert abs(sum(one.share for one in said[-1].shares) - 1.0) < 1e-9
        assert [n.labels for n in bench.notes if n.name == "slomax_share"][-2:] != []

    def test_one_step_is_small_and_five_seconds_apart(self) -> None:
        """A window of ten bad seconds is no reason to turn the fleet over."""
        bench = ready()
        run(bench, 6, [("document", 1000, 0), ("chat", 1000, 1000)])
        assert share(bench, "document") / share(bench, "chat") < 0.5 * 1.2**2  # two steps of at most a sixth
        said = run(bench, 20, [("document", 1000, 0), ("chat", 1000, 1000)])
        assert len(said) == 4

    def test_bounds_hold_for_ever(self) -> None:
        """Half an hour of total failure of one class: the others keep their floors, nobody gets everything."""
        bench = ready()
        run(bench, 600, [("document", 1000, 0), ("chat", 1000, 1000), ("batch", 1000, 1000)])
        assert share(bench, "document") <= shares.CEILING
        for name in ("chat", "batch"):
            assert share(bench, name) >= fairness.floor_of(bench.fleet, name) - 1e-9

    def test_silence_is_no_step(self) -> None:
        """No traffic, or an accountant that died: shares stay where they are, they do not run off on old news."""
        bench = ready()
        run(bench, 6, [("document", 40, 0)])
        moved = share(bench, "document")
        run(bench, 30)
        still = share(bench, "document")
        run(bench, 60)
        assert share(bench, "document") == still
        assert still < moved * 1.35, "the last window counts until it is stale, no longer"
        run(bench, 10, [("document", 0, 0), ("chat", 0, 0)])
        assert share(bench, "document") == still

    def test_few_requests_make_a_small_step(self) -> None:
        """One late request in a quiet night looked like a compliance of 0 %."""
        one, many = ready(), ready()
        run(one, 6, [("document", 1, 0)])
        run(many, 6, [("document", 100, 0)])
        assert share(one, "document") - 2 / 7 < 0.3 * (share(many, "document") - 2 / 7)

    def test_a_window_said_again_with_a_lower_revision_changes_nothing(self) -> None:
        """Redelivery and late windows: the newest end and revision count."""
        bench = ready()
        new = window(bench, "document", 40, 40, revision=2)
        old = window(bench, "document", 40, 0, revision=1, window_end_unix_ms=new.window_end_unix_ms)
        bench.feed(new, old)
        assert shares.compliance(bench.core.state, ("b", "m", "1"), bench.now_ms) == {"document": (40, 40)}

    def test_what_no_site_ever_had_counts_for_every_site(self) -> None:
        """Refused before it was placed: by served site alone the worst misses were invisible."""
        bench = ready()
        bench.feed(window(bench, "chat", 10, 0, site=""), window(bench, "chat", 30, 30))
        assert shares.compliance(bench.core.state, ("b", "m", "1"), bench.now_ms) == {"chat": (40, 30)}
        assert shares.compliance(bench.core.state, ("c", "m", "1"), bench.now_ms) == {"chat": (10, 0)}

    def test_a_step_change_of_load_makes_at_most_two_reversals(self) -> None:
        """Compliance follows the share with delay: the loop must not swing."""
        bench = ready()
        run(bench, 30, [("chat", 100, 95), ("document", 100, 95)])
        history = [share(bench, "document")]
        for _ in range(36):
            need = 0.45  # the new load: documents comply fully once they have this much
            good = round(100 * min(1.0, share(bench, "document") / need))
            chat = round(100 * min(1.0, share(bench, "chat") / 0.45))
            run(bench, 5, [("chat", 100, chat), ("document", 100, good)])
            history.append(share(bench, "document"))
        turns, extreme, rising = 0, history[0], True
        for value in history[1:]:
            if (value > extreme) == rising and value != extreme:
                extreme = value
            elif abs(value - extreme) > 0.02:
                turns, extreme, rising = turns + 1, value, not rising
        assert turns <= 2, history
        assert max(history) - history[-1] < 0.05

    def test_frozen_for_an_ablation(self) -> None:
        """`feedback = off` is the static split of every comparison."""
        bench = ready(fleet_with('\n[policy]\nfeedback="off"\n'))
        run(bench, 20, [("document", 100, 0), ("chat", 100, 100)])
        assert share(bench, "document") == 2 / 7


class TestSuccession:
    """Shares survive their owner."""

    def test_a_successor_goes_on_from_the_last_shares(self) -> None:
        """A takeover threw the learned split away and started the swing anew."""
        owner, standby = ready(), bench_of(office=False)
        said = run(owner, 11, [("document", 100, 0), ("chat", 100, 100)])
        for event in said:
            assert standby.feed(event) == []
        assert share(standby, "document") == share(owner, "document") > 2 / 7

    def test_a_checkpoint_keeps_shares_and_windows(self) -> None:
        """A restart resumes from both."""
        bench = ready()
        run(bench, 6, [("document", 100, 0)])
        again = SLOMax(bench.fleet, replica="slomax-2")
        again.restore(bench.core.snapshot())
        assert again.state.seen == bench.core.state.seen
        assert again.gauges()["share"] == bench.core.gauges()["share"]


def test_bounded_shares_sum_to_one() -> None:
    """Floors and ceiling at once, one class alone, all at their floors."""
    assert shares.bounded({"a": 3.0}, {"a": 0.05}, 0.8) == {"a": 1.0}
    found = shares.bounded({"a": 1000.0, "b": 1.0, "c": 0.001}, {"a": 0.05, "b": 0.05, "c": 0.05}, 0.8)
    assert abs(sum(found.values()) - 1.0) < 1e-9
    assert found["a"] <= 0.8 + 1e-9
    assert found["c"] >= 0.05
