"""From a trace to requests: which model, class, tenant and token budget each row is sent with.

Decides what a row leaves open (a public trace names no class of this fleet, and its models are other people's) and
refuses whatever would make the run's verdict doubtful: an unknown class, a tenant without a key. Pure.

Class of a row that names none: a row of type `batch` is of class `batch` if there is one, any other goes by input
length through a rule such as `chat<=4096,document` (the last class takes the rest).
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from tokenfleet.fleet import Fleet
from tokenfleet.replay.errors import ReplayError
from tokenfleet.replay.traces import Row, Trace

_RULE = re.compile(r"^(?P<cls>[^<=,]+)(?:<=(?P<most>\d+))?$")
#: the smallest budget that a client would plausibly ask for
_SMALLEST_BUDGET = 16


class PlanError(ReplayError):
    """The trace and the target do not fit together."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The class of rows up to an input length."""

    cls: str
    input_tokens_max: int | None


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One request to be sent, all but its prompt."""

    index: int
    row: Row
    #: from the run's start
    at_s: float
    tenant: str
    model: str
    cls: str
    task: str
    deadline_ms: float | None
    max_tokens: int


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said about rows that leave something open."""

    #: model for every row, or empty: the row's own if the fleet has it, else `default_model`
    model: str = ""
    default_model: str = ""
    #: trace model → fleet model
    model_map: dict[str, str] = {}
    #: class for every row, or empty
    cls: str = ""
    steps: tuple[Step, ...] = ()
    #: tenant for every row, or empty: the row's own, else `default_tenant`
    tenant: str = ""
    default_tenant: str = "default"


def parse_steps(text: str) -> tuple[Step, ...]:
    """`chat<=4096,document` → steps by rising input length. Raises `PlanError` for a rule that leaves rows out."""
    steps: list[Step] = []
    for part in text.split(","):
        found = _RULE.match(part.strip())
        if found is None:
            raise PlanError(f"class rule {text!r}: {part!r} is not CLASS or CLASS<=TOKENS")
        most = found["most"]
        steps.append(Step(cls=found["cls"].strip(), input_tokens_max=int(most) if most else None))
    bounds = [step.input_tokens_max for step in steps]
    if bounds[-1] is not None or any(bound is None for bound in bounds[:-1]):
        raise PlanError(f"class rule {text!r}: the last class, and only it, is without a bound")
    known = [bound for bound in bounds if bound is not None]
    if known != sorted(set(known)):
        raise PlanError(f"class rule {text!r}: bounds must rise")
    return tuple(steps)


def default_steps(fleet: Fleet) -> tuple[Step, ...]:
    """The rule without `--class-rule`: `chat<=4096,document` where the fleet has both, else its default class."""
    if {"chat", "document"} <= set(fleet.classes):
        return parse_steps("chat<=4096,document")
    return (Step(cls=fleet.info.default_class, input_tokens_max=None),)


def plan(trace: Trace, fleet: Fleet, choices: Choices) -> list[Planned]:
    """Every row as a request, in arrival order, the first at second 0 of the trace's own clock.

    Raises `PlanError` naming the first row that asks for a class or model that the fleet does not have.
    """
    steps = choices.steps or default_steps(fleet)
    known_classes = set(fleet.classes)
    fallback_model = choices.default_model or next(iter(fleet.models))
    longest: dict[str, int] = {}
    for row in trace.rows:
        longest[_task(row)] = max(longest.get(_task(row), 0), row.output_tokens)
    planned: list[Planned] = []
    for index, row in enumerate(trace.rows):
        cls = choices.cls or row.cls or _class_by_rule(row, steps, known_classes)
        if cls not in known_classes:
            raise PlanError(f"row {index + 1}: class {cls!r} is not in the fleet file")
        model = choices.model or _model(row, fleet, choices.model_map, fallback_model)
        resolved = fleet.resolve_model(model)
        if resolved is None and not choices.model:
            raise PlanError(f"row {index + 1}: model {model!r} is not in the fleet file")
        room = None if resolved is None else fleet.models[resolved[0]].max_model_len
        tenant = choices.tenant or (str(row.tenant) if row.tenant is not None else "")
        planned.append(
            Planned(
                index=index,
                row=row,
                at_s=row.t_s,
                tenant=tenant or choices.default_tenant,
                model=model,
                cls=cls,
                task=_task(row),
                deadline_ms=row.deadline_ms,
                max_tokens=budget(row.input_tokens, row.output_tokens, longest[_task(row)], room),
            )
        )
    return planned


def _task(row: Row) -> str:
    return row.task or row.kind or ""


def budget(input_tokens: int, output_tokens: int, longest_tokens: int, room_tokens: int | None) -> int:
    """The `max_tokens` a client that does not know its answer's length would ask for.

    The next power of two above the longest answer of its task in the trace: one limit for an application, which tells
    a scheduler nothing of this answer's length. Cut where prompt and budget would not fit into the model's context,
    and never below the answer that the trace has.
    """
    wanted = max(_SMALLEST_BUDGET, 1 << longest_tokens.bit_length())
    if room_tokens is None:
        return wanted
    return max(min(wanted, room_tokens - input_tokens), output_tokens, 1)


def missing_keys(planned: Sequence[Planned], keys: Mapping[str, str], default: str) -> list[str]:
    """Tenants of the plan for which there is no key."""
    return [] if default else sorted({p.tenant for p in planned} - set(keys))


def _class_by_rule(row: Row, steps: Sequence[Step], known: set[str]) -> str:
    if row.kind == "batch" and "batch" in known:
        return "batch"
    for step in steps:
        if step.input_tokens_max is None or row.input_tokens <= step.input_tokens_max:
            return step.cls
    raise PlanError(f"no class for an input of {row.input_tokens} tokens")


def _model(row: Row, fleet: Fleet, mapping: Mapping[str, str], fallback: str) -> str:
    if row.model is None:
        return fallback
    if row.model in mapping:
        return mapping[row.model]
    return row.model if fleet.resolve_model(row.model) is not None else fallback
