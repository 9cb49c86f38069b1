"""Which class serves a request: by declaration, by task, by what it looks like; never more than its key may use."""

from typing import Any

import pytest
from tests.simulation.harness import SMALL

from tokenfleet import fleet as fleets
from tokenfleet.classification import Classified, classify, infer_task
from tokenfleet.fleet import Fleet, FleetError

RULES = """
[classification]
classes = { chat = "chat", document = "document", batch = "batch" }
long_input_tokens = 4000
batch_deadline_ms = 60000
batch_output_tokens = 8000
[tenants.lab]
zones = ["*"]
classes = ["chat", "document", "batch"]
default_class = "document"
task_classes = { agent = "batch", labelling = "batch" }
[tenants.lab.overrides.chat]
ttft_ms = 250
patience_ms = 3000
"""


def fleet_of(text: str = RULES) -> Fleet:
    return fleets.parse((SMALL.format(instances="") + text).encode())


ALL = ("chat", "document", "batch")


@pytest.mark.parametrize(
    ("looks", "task"),
    [
        ({"input_tokens": 100}, "chat"),
        ({"input_tokens": 4000}, "document"),
        ({"input_tokens": 9000, "tools": True}, "agent"),
        ({"input_tokens": 100, "stream": False, "deadline_ms": 3_600_000.0}, "batch"),
        ({"input_tokens": 100, "stream": True, "deadline_ms": 3_600_000.0}, "chat"),
        ({"input_tokens": 100, "stream": False, "deadline_ms": 5_000.0}, "chat"),
        ({"input_tokens": 100, "stream": False, "output_budget_tokens": 8000}, "batch"),
        ({"input_tokens": 100, "stream": True, "output_budget_tokens": 8000}, "chat"),
    ],
)
def test_what_nobody_declared_is_inferred(looks: dict[str, Any], task: str) -> None:
    """A document of 100,000 tokens without a word about itself was served as a chat and stalled the chats."""
    assert infer_task(fleet_of(), **looks) == task


@pytest.mark.parametrize(
    ("tenant", "permitted", "said", "found"),
    [
        ("acme", ALL, {"declared_class": "batch", "declared_task": "x"}, Classified("batch", "x", "declared_class")),
        ("acme", ALL, {"declared_task": "document"}, Classified("document", "document", "declared_task")),
        ("acme", ALL, {"input_tokens": 5000}, Classified("document", "document", "inferred")),
        ("acme", ALL, {"declared_task": "poetry", "input_tokens": 5000}, Classified("document", "poetry", "inferred")),
        ("lab", ALL, {"declared_task": "labelling"}, Classified("batch", "labelling", "declared_task")),
        ("lab", ALL, {"tools": True}, Classified("batch", "agent", "inferred")),
        ("acme", ALL, {"tools": True}, Classified("chat", "agent", "default")),
        ("lab", ("chat",), {"declared_task": "labelling"}, Classified("chat", "labelling", "inferred")),
        ("lab", ("document", "batch"), {}, Classified("document", "chat", "default")),
        ("local", ("chat",), {"input_tokens": 90_000}, Classified("chat", "document", "default")),
        ("nobody", (), {}, Classified("", "chat", "default")),
    ],
)
def test_a_task_never_opens_a_class_that_the_key_may_not_use(
    tenant: str, permitted: tuple[str, ...], said: dict[str, Any], found: Classified
) -> None:
    """A10, X01: trust comes from the key; a client's word chooses among what the key may use, and nothing else."""
    assert classify(fleet_of(), tenant, permitted, **{"input_tokens": 100, **said}) == found


def test_without_rules_the_default_class_serves_all() -> None:
    """A fleet file of before says nothing of tasks: nothing changes for its clients."""
    assert classify(fleet_of(""), "acme", ALL, input_tokens=100_000) == Classified("chat", "document", "default")


def test_a_tenant_may_be_promised_something_else() -> None:
    """One contract had a tighter first token: it needed a class of its own, and a pool's order fell apart."""
    fleet = fleet_of()
    own, all_others = fleet.objectives("lab", "chat"), fleet.objectives("acme", "chat")
    assert (own.ttft_ms, own.tpot_ms, own.patience_ms, own.tier) == (250, 100, 3000, 0)
    assert (all_others.ttft_ms, all_others.patience_ms) == (1000, 10_000)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ('[classification]\nclasses = { chat = "nope" }\n', "unknown class 'nope'"),
        ('[tenants.x]\nzones=["*"]\nclasses=["chat"]\ntask_classes = { agent = "batch" }\n', "not one of its classes"),
        ('[tenants.x]\nzones=["*"]\nclasses=["chat"]\n[tenants.x.overrides.batch]\nttft_ms=1\n', "not one of its"),
        ('[tenants.x]\nzones=["*"]\nclasses=["chat"]\n[tenants.x.overrides.chat]\nttft_ms=0\n', "out of range"),
        ('[tenants.x]\nzones=["*"]\nclasses=["chat"]\nweight=0\n', "no tenant may starve"),
        ("[classification]\nlong_input_tokens = 0\n", "must be positive"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused_at_load(wrong: str, says: str) -> None:
    """A typo in a reload during an incident: the old file stays active, the finding names the key."""
    with pytest.raises(FleetError, match=says):
        fleet_of(wrong)
