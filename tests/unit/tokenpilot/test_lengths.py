"""Output lengths: learned per tenant, task and model, never taken from the budget."""

import random

import pytest

from tokenfleet.tokenpilot.lengths import LengthBook, Lengths


def test_quantiles_follow_what_came() -> None:
    """The budget was taken for the length: max_tokens = 4096 on every request emptied the fleet."""
    dice, one = random.Random(1), Lengths()
    for _ in range(2000):
        one.learn(int(dice.lognormvariate(5.5, 0.8)))
    assert one.quantile(0.5) == pytest.approx(245, rel=0.2)
    assert one.quantile(0.9) == pytest.approx(682, rel=0.25)
    for _ in range(1000):
        one.learn(20)
    assert one.quantile(0.5) == pytest.approx(20, rel=0.25), "it follows a change"
    assert one.mean_tokens == pytest.approx(20, rel=0.05)


def test_a_new_tenant_has_the_tasks_lengths_then_its_own() -> None:
    """A new tenant's first requests were booked with a constant and preempted each other."""
    book = LengthBook()
    assert book.find("acme", "chat", "m") is None
    for _ in range(20):
        book.learn("acme", "chat", "m", 100)
        book.learn("acme", "batch", "m", 2000)
    assert book.find("new", "chat", "m").mean_tokens == pytest.approx(100)  # type: ignore[union-attr]  # known
    assert 100 < book.find("new", "tool", "m").mean_tokens < 2000  # type: ignore[union-attr]  # the model's
    for _ in range(20):
        book.learn("new", "chat", "m", 30)
    assert book.find("new", "chat", "m").mean_tokens == pytest.approx(30)  # type: ignore[union-attr]  # its own


def test_keys_are_bounded() -> None:
    """Tasks are the client's words: a client that invents one per request must not fill the memory."""
    book = LengthBook(keys_max=100)
    for n in range(5000):
        book.learn("acme", f"task{n}", "m", 10)
    assert len(book.of) <= 100
    assert book.find("acme", "new", "m") is not None, "the model's own is used all the time and stays"
