"""From trace to requests: nothing is sent that the verdict could not judge."""

import pytest

from tokenfleet import fleet as fleets
from tokenfleet.replay.plan import Choices, PlanError, budget, missing_keys, parse_steps, plan
from tokenfleet.replay.traces import Row, Trace

FLEET = fleets.parse(
    b"""
[fleet]
name = "small"
default_class = "chat"
[sites.b]
zone = "eu"
[models.m]
versions = ["1", "2"]
default_version = "1"
max_model_len = 8192
[models.n]
versions = ["1"]
default_version = "1"
max_model_len = 8192
[classes.chat]
[classes.document]
[classes.batch]
"""
)


def planned(*rows: Row, choices: Choices | None = None) -> list[tuple[str, str, str]]:
    """(class, model, tenant) of every planned request."""
    made = plan(Trace(name="t", rows=rows), FLEET, choices or Choices())
    return [(p.cls, p.model, p.tenant) for p in made]


def row(**fields: object) -> Row:
    base: dict[str, object] = {"t_s": 0.0, "input_tokens": 100, "output_tokens": 5}
    return Row(**(base | fields))  # type: ignore[arg-type]  # a test's defaults, overridden by name


def test_a_public_trace_gets_classes_by_length_and_the_fleets_first_model() -> None:
    """Nobody else's trace names our classes or models; the default rule is documented and total."""
    assert planned(row(), row(input_tokens=4097), row(kind="batch"), row(model="m-large", tenant=3)) == [
        ("chat", "m", "default"),
        ("document", "m", "default"),
        ("batch", "m", "default"),
        ("chat", "m", "3"),
    ]


def test_what_a_row_says_wins_over_the_rules_and_the_user_wins_over_the_row() -> None:
    """A generated workload carries its own class, exact version and tenant; `--class` and `--model` override."""
    own = row(cls="batch", model="m@2", tenant="law")
    assert planned(own) == [("batch", "m@2", "law")]
    assert planned(own, choices=Choices(cls="chat", model="n", tenant="x")) == [("chat", "n", "x")]
    mapped = Choices(model_map={"gpt": "n"})
    assert planned(row(model="gpt"), choices=mapped) == [("chat", "n", "default")]


@pytest.mark.parametrize(
    ("fields", "choices", "says"),
    [
        ({"cls": "chta"}, Choices(), "row 1: class 'chta'"),
        ({"model": "x"}, Choices(model_map={"x": "y"}), "model 'y'"),
        ({}, Choices(default_model="zz"), "model 'zz'"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused(fields: dict[str, object], choices: Choices, says: str) -> None:
    """Better no run than one whose requests all answer 404."""
    with pytest.raises(PlanError, match=says):
        planned(row(**fields), choices=choices)


@pytest.mark.parametrize("text", ["", "chat<=10", "chat,document", "a<=9,b<=3,c", "a<=x,b", "a<=5,a<=5,b"])
def test_a_class_rule_that_leaves_rows_out_is_refused(text: str) -> None:
    """`chat<=4096` alone says nothing about longer rows."""
    with pytest.raises(PlanError):
        parse_steps(text)


def test_the_budget_tells_a_scheduler_no_length() -> None:
    """The trace's `out` as `max_tokens`, or a power of two beside it, hands the policy an oracle nobody else has."""
    rows = [
        row(output_tokens=out, task=task) for out, task in ((1, "chat"), (900, "chat"), (30, "agent"), (3, "agent"))
    ]
    made = plan(Trace(name="t", rows=tuple(rows)), FLEET, Choices())
    assert [one.max_tokens for one in made] == [1024, 1024, 32, 32]
    assert [budget(10, 0, longest, None) for longest in (0, 15, 16, 100, 255, 256)] == [16, 16, 32, 128, 256, 512]


def test_a_budget_fits_the_context_and_the_answer() -> None:
    """Engines answer 400 to a prompt and a budget that are too long together."""
    assert budget(8000, 100, 100, 8192) == 128
    assert budget(8000, 180, 900, 8192) == 192
    assert budget(8000, 300, 900, 8192) == 300


def test_tenants_without_a_key_are_named_before_anything_is_sent() -> None:
    """A run in which one tenant gets 401 throughout measures nothing."""
    made = plan(Trace(name="t", rows=(row(tenant="a"), row(tenant="b"))), FLEET, Choices())
    assert missing_keys(made, {"a": "k"}, "") == ["b"]
    assert missing_keys(made, {"a": "k"}, "k0") == []
