"""Promises of capacity: never more than there is, in whatever order they are asked for, revoked and asked for again."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.harness import small_fleet

from tokenfleet.fleetmind.planning.reservations import (
    FORGET_MS,
    Book,
    Reservation,
    closed_share,
    model_gpus,
    most,
    site_gpus,
)

FLEET = small_fleet({"b": 4, "c": 2})


def promise(name: str, gpus: float, begin: float = 0.0, end: float = 100.0, **changes: str) -> Reservation:
    values = {"site": "b", "model": "m", "tenant": "acme", "service_class": ""} | changes
    return Reservation(name=name, gpu_seconds_per_s=gpus, from_ms=begin, until_ms=end, **values)


def test_what_fits_is_granted_and_what_does_not_is_refused_with_the_reason() -> None:
    """Two teams were both promised the same four GPUs for the same night."""
    book = Book()
    assert book.ask(FLEET, promise("one", 3.0), 0.0) == ""
    assert book.ask(FLEET, promise("two", 1.5), 0.0) == "over_budget"
    assert book.ask(FLEET, promise("two", 1.0), 0.0) == ""
    assert book.ask(FLEET, promise("three", 4.0, 100.0, 200.0), 0.0) == ""


def test_a_promise_may_be_changed_where_the_new_one_fits_without_the_old() -> None:
    """Growing from three to four is not three and four; a change that does not fit leaves the old one."""
    book = Book()
    book.ask(FLEET, promise("one", 3.0), 0.0)
    assert book.ask(FLEET, promise("one", 4.0), 0.0) == ""
    assert book.ask(FLEET, promise("one", 5.0), 0.0) == "over_budget"
    assert book.given["one"].gpu_seconds_per_s == 4.0


def test_every_wrong_question_has_its_reason() -> None:
    """Residency too: a tenant cannot reserve where its data may not go."""
    book = Book()
    asked = {
        "unknown_site": promise("x", 1.0, site="z"),
        "unknown_model": promise("x", 1.0, model="z"),
        "nobody": promise("x", 1.0, tenant=""),
        "unknown_class": promise("x", 1.0, service_class="z"),
        "unknown_tenant": promise("x", 1.0, tenant="z"),
        "residency": promise("x", 1.0, tenant="local", site="c"),
        "not_positive": promise("x", 0.0),
        "window": promise("x", 1.0, 50.0, 50.0),
    }
    assert {why: book.ask(FLEET, one, 0.0) for why, one in asked.items()} == {why: why for why in asked}
    assert book.ask(FLEET, promise("x", 1.0, 0.0, 10.0), 20.0) == "window"
    assert book.ask(FLEET, promise("x", float("nan")), 0.0) == "not_positive"
    assert not book.given


def test_a_promise_ends_by_itself() -> None:
    """Nobody cancels what is over."""
    book = Book()
    book.ask(FLEET, promise("one", 4.0, 0.0, 100.0), 0.0)
    assert [one.name for one in book.at(99.0)] == ["one"]
    assert book.at(100.0) == []
    assert book.ask(FLEET, promise("two", 4.0, 100.0, 200.0), 99.0) == ""
    assert [one.name for one in book.sweep(100.0 + FORGET_MS)] == ["one"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "cancel"]),
            st.integers(0, 7),
            st.floats(0.1, 5.0),
            st.integers(0, 20),
            st.integers(1, 10),
            st.sampled_from(["b", "c"]),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_grants_never_exceed_the_budget_under_any_interleaving(
    steps: list[tuple[str, int, float, int, int, str]],
) -> None:
    """Askers and cancellers in any order: at every moment of every window the promises fit into the GPUs."""
    book = Book()
    for what, name, gpus, begin, length, site in steps:
        if what == "cancel":
            book.given.pop(str(name), None)
        else:
            book.ask(FLEET, promise(str(name), gpus, begin, begin + length, site=site), 0.0)
        for where in ("b", "c"):
            mine = [one for one in book.given.values() if one.site == where]
            for moment in range(31):
                total = sum(one.gpu_seconds_per_s for one in mine if one.holds(moment))
                assert total <= min(site_gpus(FLEET, where), model_gpus(FLEET, where, "m")) + 1e-6


def test_windows_that_touch_do_not_add_up() -> None:
    """Half open: one ends where the other begins."""
    assert most([promise("a", 3.0, 0.0, 10.0), promise("b", 3.0, 10.0, 20.0)], 0.0, 20.0) == 3.0


class TestClosedShare:
    HELD = (promise("night", 2.0, tenant="acme"),)

    def share(self, tenant: str, used: float = 0.0, *, active: bool = True) -> float:
        return closed_share(
            self.HELD, used={"night": used}, active={"night"} if active else set(), gpus=4.0, tenant=tenant,
            service_class="chat",
        )  # fmt: skip

    def test_others_leave_room_for_a_holder_that_is_there(self) -> None:
        """Half of the pool is promised: others have the other half, and what the holder uses counts."""
        assert self.share("other") == 0.5
        assert self.share("other", used=1.5) == 0.125
        assert self.share("other", used=3.0) == 0.0

    def test_an_idle_holder_lends_everything(self) -> None:
        """Borrowed while idle: reserved GPUs that nobody uses serve whoever comes."""
        assert self.share("other", active=False) == 0.0

    def test_the_holder_itself_is_not_held_off(self) -> None:
        """It is its room."""
        assert self.share("acme") == 0.0
