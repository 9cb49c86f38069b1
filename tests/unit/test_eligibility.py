"""The one filter of all roads: who may and can serve a request."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.harness import START_MS, Engine, report, small_fleet
from tests.simulation.messages import leased, make_ask

from tokenfleet.eligibility import (
    FRESH_MS,
    CapacityView,
    allowed_ready_sites,
    hop_timeout_ms,
    instance_out,
    no_site_reason,
    ready_instances,
    retry_after_s,
    zone_bound,
)
from tokenfleet.presence import Presence
from tokenfleet_schemas.request import Ask

FLEET = small_fleet()


def view_of(*names: str, at_ms: float = START_MS, **changes: object) -> CapacityView:
    view = CapacityView()
    for name in names:
        view.fold(msgspec.structs.replace(report(FLEET, name, Engine(10_000), 1, at_ms), **changes), at_ms)
    return view


def test_home_sites_come_first_then_the_others() -> None:
    """Everything is ready: the entry's homes in their order."""
    sites, considered = allowed_ready_sites(FLEET, view_of("b-0", "c-0"), make_ask(), START_MS)
    assert sites == ("b", "c")
    assert [(one.name, one.out) for one in considered] == [("b", ""), ("c", "")]


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        ({"ready": False}, "not_ready"),
        ({"draining": True}, "draining"),
        ({"version": "2"}, "other_version"),
        ({"version": ""}, "other_version"),
        ({"routable_from": ("us",)}, "not_routable"),
        ({"routable_from": ()}, "not_routable"),
        ({"zone": "us"}, "zone_mismatch"),
        ({"instance": "c-0"}, "declared_elsewhere"),
    ],
)
def test_an_instance_that_cannot_serve_puts_its_site_out_with_the_reason(changes: dict[str, object], out: str) -> None:
    """S01, S07: unknown is never ready; a report under another site's name is not believed (F01)."""
    sites, considered = allowed_ready_sites(FLEET, view_of("b-0", **changes), make_ask(), START_MS)
    assert sites == ()
    assert {one.name: one.out for one in considered} == {"b": out, "c": "no_instance"}


def test_a_report_that_is_too_old_says_nothing() -> None:
    """S06: judged by our clock on arrival; a redelivery of the same report does not make it fresh."""
    view = view_of("b-0")
    again = report(FLEET, "b-0", Engine(10_000), 1, START_MS)
    assert not view.fold(again, START_MS + 9_000)
    assert allowed_ready_sites(FLEET, view, make_ask(), START_MS + 10_000)[0] == ("b",)
    assert allowed_ready_sites(FLEET, view, make_ask(), START_MS + 10_001)[0] == ()


def test_excluded_instances_and_missing_adapters_put_a_site_out() -> None:
    """P17: an adapter that is not loaded is never answered by the base model."""
    view = view_of("b-0")
    assert allowed_ready_sites(FLEET, view, make_ask(), START_MS, {"b-0"})[0] == ()
    assert allowed_ready_sites(FLEET, view, make_ask(adapter="tuned"), START_MS)[0] == ()
    assert allowed_ready_sites(FLEET, view_of("b-0", adapters=("tuned",)), make_ask(adapter="tuned"), START_MS)[0] == (
        "b",
    )


@pytest.mark.parametrize(
    ("names", "ask", "reason"),
    [
        (("c-0",), make_ask(tenant="local"), "residency_no_capacity"),
        ((), make_ask(tenant="local"), "model_not_ready"),
        ((), make_ask(), "model_not_ready"),
        (("b-0",), make_ask(tenant="nobody"), "not_permitted"),
    ],
)
def test_the_reason_tells_never_from_not_now(names: tuple[str, ...], ask: Ask, reason: str) -> None:
    """F01: the EU site is down and the US site is ready: 503 for want of capacity inside the border, no fallback."""
    view = view_of(*names)
    sites, considered = allowed_ready_sites(FLEET, view, ask, START_MS)
    assert sites == ()
    assert no_site_reason(FLEET, view, ask, START_MS, considered)[0] == reason


def test_a_failed_only_instance_is_no_capacity() -> None:
    """Every ready engine has failed this request: asking again soon may help."""
    view = view_of("b-0")
    _, considered = allowed_ready_sites(FLEET, view, make_ask(), START_MS, ("b-0",))
    assert no_site_reason(FLEET, view, make_ask(), START_MS, considered)[0] == "no_capacity"


def test_residency_bounds_are_known_from_the_declaration() -> None:
    """A tenant bound to a zone hears so when its patience ends; a free one does not."""
    assert zone_bound(FLEET, "local", "m", "1")
    assert not zone_bound(FLEET, "acme", "m", "1")


def test_hop_timeouts_follow_the_distance() -> None:
    """250 ms + 2 RTT; unknown distances count 200 ms."""
    assert hop_timeout_ms(FLEET, "a", "b") == 260
    assert hop_timeout_ms(FLEET, "a", "c") == 410
    assert hop_timeout_ms(FLEET, "a", "elsewhere") == 650


@given(reset_ms=st.floats(0, 120_000), rid=st.text(min_size=1, max_size=8))
def test_retry_after_tracks_the_reset_within_a_second(reset_ms: float, rid: str) -> None:
    """G11: an integer ≥ 1 within ±1 s of the true reset, spread over clients."""
    found = retry_after_s(rid, reset_ms)
    assert found == int(found)
    assert found >= 1
    assert found == 1 or abs(found - reset_ms / 1000) <= 1


def test_retry_after_is_spread_over_clients() -> None:
    """Refused clients must not come back in one wave."""
    assert len({retry_after_s(f"r{n}", 2_500) for n in range(50)}) > 1


class TestPresence:
    """Requests that outlive their gateway."""

    def test_two_leases_that_omit_a_request_end_it(self) -> None:
        """A08: kill -9 of a handler left reservations for ever; one omission may be a lease that was on its way."""
        presence = Presence()
        presence.open("r1", "gateway-a", "1", 0)
        assert presence.lease(leased(1, []), 10) == []
        assert presence.lease(leased(1, []), 20) == []  # redelivered: proves nothing new
        assert presence.lease(leased(2, ["r1"]), 2_000) == []
        assert presence.lease(leased(3, []), 4_000) == []
        assert presence.lease(leased(4, []), 6_000) == ["r1"]

    def test_a_silent_gateway_loses_its_requests_unless_we_are_deaf(self) -> None:
        """Silence counts only while the listener hears others (a bus outage once expired everything at once)."""
        presence = Presence()
        presence.hear(1_000)
        presence.open("r1", "gateway-a", "1", 1_000)
        assert presence.silent(8_000) == []  # nobody was heard
        assert presence.hear(8_000)  # that ends a deaf spell: silence starts anew
        for at_ms in range(9_000, 14_000, 1_000):
            assert not presence.hear(at_ms)
            assert presence.silent(at_ms) == []
        presence.hear(14_002)
        assert presence.silent(14_002) == ["r1"]

    def test_a_new_incarnation_ends_what_the_old_had_open(self) -> None:
        """The gateway was restarted: its streams are broken."""
        presence = Presence()
        presence.lease(leased(7, ["r1"]), 0)
        presence.open("r1", "gateway-a", "1", 0)
        presence.open("r2", "gateway-a", "2", 0)
        assert presence.lease(leased(1, ["r2"], gateway_incarnation="2"), 100) == ["r1"]
        assert presence.gateways["gateway-a"].open.keys() >= {"r2"}


_REPORT = st.fixed_dictionaries(
    {
        "ready": st.booleans(),
        "draining": st.booleans(),
        "version": st.sampled_from(["1", "2", ""]),
        "adapters": st.sampled_from([(), ("law",)]),
        "routable_from": st.sampled_from([("*",), ("us",)]),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["report", "renew", "forget", "nothing"]),
            st.sampled_from(["b-0", "b-1", "b-2"]),
            st.sampled_from([0.0, 400.0, FRESH_MS - 500.0, FRESH_MS + 1.0]),
            _REPORT,
            st.sampled_from([(), ("b-0",), ("b-0", "b-1", "b-2")]),
            st.sampled_from(["", "law"]),
        ),
        max_size=12,
    )
)
def test_a_roster_says_what_asking_every_instance_says(
    steps: list[tuple[str, str, float, dict[str, object], tuple[str, ...], str]],
) -> None:
    """Rosters are kept between requests for speed: a stale one would send requests to an instance that is gone."""
    view, now_ms = CapacityView(), START_MS
    for number, (what, name, passed_ms, changes, excluded, adapter) in enumerate(steps):
        now_ms += passed_ms
        if what == "report":
            made = msgspec.structs.replace(report(FLEET, "b-0", Engine(10_000), number, now_ms), **changes)
            view.fold(msgspec.structs.replace(made, instance=name, id=f"{name}:{number}"), now_ms)
        elif what == "renew":
            view.renew(now_ms)
        elif what == "forget":
            view.forget(now_ms - FRESH_MS)
        ask = msgspec.structs.replace(make_ask(), adapter=adapter)
        one_by_one = [
            heard
            for _, heard in sorted(view.instances("b").items(), key=lambda item: item[0])
            if not instance_out(FLEET, heard, ask, now_ms, excluded)
        ]
        assert ready_instances(FLEET, view, ask, "b", now_ms, excluded) == one_by_one
        sites, considered = allowed_ready_sites(FLEET, view, ask, now_ms, excluded)
        assert ("b" in sites) == bool(one_by_one)
        outs = {instance_out(FLEET, heard, ask, now_ms, excluded) for heard in view.instances("b").values()}
        assert next(one.out for one in considered if one.name == "b") in (outs or {"no_instance"})


def test_a_checkpoint_leaves_rosters_out() -> None:
    """They are derived: a checkpoint of the view is its reports, and works again after it is read."""
    view = view_of("b-0")
    before = msgspec.msgpack.encode(view)
    assert allowed_ready_sites(FLEET, view, make_ask(), START_MS)[0] == ("b",)
    assert msgspec.msgpack.encode(view) == before
    again = msgspec.msgpack.decode(before, type=CapacityView)
    assert allowed_ready_sites(FLEET, again, make_ask(), START_MS)[0] == ("b",)
