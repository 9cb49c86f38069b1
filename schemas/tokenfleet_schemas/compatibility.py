"""Whether a changed schema is still the same version of a message.

Decides by one rule, the contract's own: within a version a field with a default may be added; everything else is a new
Struct with a new version. A stream keeps messages for days and services are upgraded one by one, so both directions
must hold: a new reader meets old messages and an old reader meets new ones. That is why a *wider* enum and a newly
nullable field are refused too. Compares published JSON Schemas; knows nothing of Structs or files.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

Schema = Mapping[str, Any]

Kind = Literal[
    "removed_message",
    "removed_field",
    "required_field_added",
    "became_required",
    "became_optional",
    "changed_type",
    "changed_default",
    "narrowed_enum",
    "widened_enum",
    "closed",
]
#: words of a schema that carry no shape
_PROSE = frozenset({"title", "description", "$id", "$schema", "$defs", "examples"})


class Incompatibility(msgspec.Struct, frozen=True):
    """One change that needs a new version; `path` is dotted from the message, `[]` for items of a list."""

    kind: Kind
    path: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind.replace('_', ' ')}" + (f" ({self.detail})" if self.detail else "")


def compare(old: Schema, new: Schema) -> list[Incompatibility]:
    """Every change from `old` to `new` that the same version does not allow; a rename shows as removed (and added)."""
    return list(_compare(old, new, _Scope(old, new), ""))


def compare_all(old: Mapping[str, Schema], new: Mapping[str, Schema]) -> list[Incompatibility]:
    """The same over a whole version: message name → schema. New messages are welcome, missing ones are not."""
    found = []
    for name, schema in sorted(old.items()):
        if name not in new:
            found.append(Incompatibility("removed_message", name))
        else:
            changes = compare(schema, new[name])
            found += [Incompatibility(c.kind, f"{name}.{c.path}" if c.path else name, c.detail) for c in changes]
    return found


class _Scope:
    """Definitions of both documents, and the pairs already being compared (parts may nest)."""

    def __init__(self, old: Schema, new: Schema) -> None:
        self.old: Schema = old.get("$defs", {})
        self.new: Schema = new.get("$defs", {})
        self.entered: set[tuple[str, str]] = set()


def _resolve(schema: Schema, definitions: Schema) -> tuple[Schema, str]:
    """Follow `$ref` and the single-element `allOf` that carries a description; → (schema, name of the part)."""
    name = ""
    while True:
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            schema = definitions[name] | {k: v for k, v in schema.items() if k == "default"}
        elif len(schema.get("allOf", ())) == 1:
            schema = dict(schema["allOf"][0]) | {k: v for k, v in schema.items() if k == "default"}
        else:
            return schema, name


def _compare(old: Schema, new: Schema, scope: _Scope, path: str) -> Iterator[Incompatibility]:
    old, old_name = _resolve(old, scope.old)
    new, new_name = _resolve(new, scope.new)
    if old.get("default") != new.get("default") or ("default" in old) != ("default" in new):
        yield Incompatibility("changed_default", path, f"{_word(old, 'default')} to {_word(new, 'default')}")
    if old_name:
        if (old_name, new_name) in scope.entered:
            return
        scope.entered.add((old_name, new_name))
    if "enum" in old and "enum" in new:
        yield from _compare_enums(old["enum"], new["enum"], path)
    elif "properties" in old and "properties" in new:
        yield from _compare_fields(old, new, scope, path)
    elif "anyOf" in old and "anyOf" in new and len(old["anyOf"]) == len(new["anyOf"]):
        for one, other in zip(_sorted(old["anyOf"]), _sorted(new["anyOf"]), strict=True):
            yield from _compare(one, other, scope, path)
    elif old.get("type") == new.get("type") == "array" and isinstance(old.get("items"), Mapping):
        yield from _compare(old["items"], new.get("items", {}), scope, f"{path}[]")
    elif old.get("type") == new.get("type") == "object" and isinstance(old.get("additionalProperties"), Mapping):
        yield from _compare(old["additionalProperties"], new.get("additionalProperties", {}), scope, f"{path}{{}}")
    elif _shape(old) != _shape(new):
        yield Incompatibility("changed_type", path, f"{_shape(old)} to {_shape(new)}")
        return
    rest_old, rest_new = (_shape(s, without=("properties", "required", "items", "anyOf", "enum")) for s in (old, new))
    if rest_old != rest_new and ("anyOf" in old) == ("anyOf" in new):
        if new.get("additionalProperties") is False:
            yield Incompatibility("closed", path, "refuses fields it does not know")
        elif not isinstance(old.get("additionalProperties"), Mapping):
            yield Incompatibility("changed_type", path, f"{rest_old} to {rest_new}")


def _compare_enums(old: list[Any], new: list[Any], path: str) -> Iterator[Incompatibility]:
    gone, come = [v for v in old if v not in new], [v for v in new if v not in old]
    if gone:
        yield Incompatibility("narrowed_enum", path, f"without {', '.join(map(str, gone))}")
    if come:
        yield Incompatibility("widened_enum", path, f"with {', '.join(map(str, come))}: older readers refuse it")


def _compare_fields(old: Schema, new: Schema, scope: _Scope, path: str) -> Iterator[Incompatibility]:
    before, after = old["properties"], new["properties"]
    was, now = set(old.get("required", ())), set(new.get("required", ()))
    for name, schema in before.items():
        inner = f"{path}.{name}".lstrip(".")
        if name not in after:
            yield Incompatibility("removed_field", inner)
            continue
        if name in now - was:
            yield Incompatibility("became_required", inner, "older messages may lack it")
        elif name in was - now:
            yield Incompatibility("became_optional", inner, "older readers need it")
        # gaining or losing its default is what the two above say
        ignore_default = (name in was) != (name in now)
        one = {k: v for k, v in schema.items() if not (ignore_default and k == "default")}
        other = {k: v for k, v in after[name].items() if not (ignore_default and k == "default")}
        yield from _compare(one, other, scope, inner)
    for name in after:
        if name not in before and name in now:
            yield Incompatibility("required_field_added", f"{path}.{name}".lstrip("."), "older messages lack it")


def _shape(schema: Schema, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {k: v for k, v in sorted(schema.items()) if k not in _PROSE and k != "default" and k not in without}


def _sorted(choices: list[Schema]) -> list[Schema]:
    return sorted(choices, key=lambda choice: (str(choice.get("type", "")), str(choice.get("$ref", ""))))


def _word(schema: Schema, key: str) -> str:
    return repr(schema[key]) if key in schema else "none"
