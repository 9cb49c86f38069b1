"""Which kind of work a request is, and which service class serves it: one rule for every gateway and every replay.

Decides from sizes and declarations only: a declared class (the caller checks that the key may use it), else a declared
task, else what the request looks like: an agent's call carries tools or their results, a long context is a document,
work with a far deadline that nobody watches is batch, the rest is chat. Which class a task is served in is the fleet
file's (`[classification]`), and a tenant's before that (`task_classes`). Trust comes from the key: a task never opens a
class that the key may not use. Pure; refuses to know text.
"""

from collections.abc import Collection

import msgspec

from tokenfleet.fleet import Fleet

TASKS = ("chat", "document", "agent", "batch")


class Classified(msgspec.Struct, frozen=True):
    """What a request is taken for. `how`: `declared_class`, `declared_task`, `inferred` or `default`."""

    service_class: str
    task: str
    how: str


def infer_task(
    fleet: Fleet,
    *,
    input_tokens: int,
    output_budget_tokens: int | None = None,
    stream: bool = True,
    tools: bool = False,
    deadline_ms: float | None = None,
) -> str:
    """One of `TASKS` for a request that declares none. Limits are the fleet file's, tokens and ms."""
    rules = fleet.classification
    if tools:
        return "agent"
    watched = stream or deadline_ms is None or deadline_ms < rules.batch_deadline_ms
    bulk = rules.batch_output_tokens and not stream and (output_budget_tokens or 0) >= rules.batch_output_tokens
    if not watched or bulk:
        return "batch"
    return "document" if input_tokens >= rules.long_input_tokens else "chat"


def classify(
    fleet: Fleet,
    tenant: str,
    permitted: Collection[str],
    *,
    declared_class: str = "",
    declared_task: str = "",
    input_tokens: int,
    output_budget_tokens: int | None = None,
    stream: bool = True,
    tools: bool = False,
    deadline_ms: float | None = None,
) -> Classified:
    """Class and task of a request of this tenant, whose key may use the `permitted` classes.

    A declared class is returned as it is. The class is empty only if the key may use none.
    """
    inferred = infer_task(
        fleet,
        input_tokens=input_tokens,
        output_budget_tokens=output_budget_tokens,
        stream=stream,
        tools=tools,
        deadline_ms=deadline_ms,
    )
    task = declared_task or inferred
    if declared_class:
        return Classified(declared_class, task, "declared_class")
    who = fleet.tenants.get(tenant)
    for word in dict.fromkeys((task, inferred)):  # a task that nobody mapped is served as what it looks like
        for table in (who.task_classes if who is not None else {}, fleet.classification.classes):
            name = table.get(word)
            if name in permitted and name is not None:
                return Classified(name, task, "declared_task" if word == declared_task else "inferred")
    for name in (who.default_class if who is not None else "", fleet.info.default_class, *permitted):
        if name in permitted:
            return Classified(name, task, "default")
    return Classified("", task, "default")
