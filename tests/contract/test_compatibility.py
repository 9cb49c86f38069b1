"""Within a version only a field with a default may be added: the checker sees every other change, and git is asked."""

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenfleet_schemas.compatibility import Incompatibility, compare, compare_all
from tokenfleet_schemas.publish import files

ROOT = Path(__file__).resolve().parents[2]

Schema = dict[str, Any]
OLD: Schema = {
    "$id": "urn:test:thing.happened",
    "type": "object",
    "properties": {
        "type": {"enum": ["test.thing.v1.happened"]},
        "id": {"type": "string"},
        "count": {"type": "integer", "default": 0},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "phase": {"enum": ["one", "two"]},
        "names": {"type": "array", "items": {"type": "string"}, "default": []},
        "terms": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
        "part": {"allOf": [{"$ref": "#/$defs/Part"}], "description": "a part"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}},
        "maybe": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Part"}], "default": None},
    },
    "required": ["type", "id", "phase", "part", "parts"],
    "$defs": {
        "Part": {
            "type": "object",
            "properties": {"tokens": {"type": "integer"}, "note": {"type": "string", "default": ""}},
            "required": ["tokens"],
        }
    },
}


def changed(change: Callable[[Schema], object]) -> Schema:
    new = copy.deepcopy(OLD)
    change(new)
    return new


def kinds(change: Callable[[Schema], object]) -> list[tuple[str, str]]:
    return [(found.kind, found.path) for found in compare(OLD, changed(change))]


def rename(new: Schema) -> None:
    new["properties"]["total"] = new["properties"].pop("count")


def test_the_same_schema_and_better_words_are_compatible() -> None:
    """Somebody corrects a docstring: no version."""
    assert compare(OLD, OLD) == []
    assert kinds(lambda s: s["properties"]["part"].update(description="the part")) == []
    assert kinds(lambda s: s["properties"].update(part={"$ref": "#/$defs/Part"})) == []


def test_a_field_with_a_default_keeps_the_version() -> None:
    """The one change that is allowed, in the message and in its parts."""
    assert kinds(lambda s: s["properties"].update(more={"type": "string", "default": ""})) == []
    assert kinds(lambda s: s["$defs"]["Part"]["properties"].update(more={"type": "string", "default": ""})) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s["properties"].pop("count"), [("removed_field", "count")]),
        (rename, [("removed_field", "count")]),
        (lambda s: s["properties"]["count"].update(type="string"), [("changed_type", "count")]),
        (lambda s: s["properties"]["names"]["items"].update(type="integer"), [("changed_type", "names[]")]),
        (
            lambda s: s["properties"]["terms"]["additionalProperties"].update(type="string"),
            [("changed_type", "terms{}")],
        ),
        (
            lambda s: s["properties"].update(id={"anyOf": [{"type": "string"}, {"type": "null"}]}),
            [("changed_type", "id")],
        ),
        (lambda s: s["properties"].update(limit={"type": "number", "default": None}), [("changed_type", "limit")]),
        (lambda s: s["properties"]["limit"]["anyOf"][0].update(type="string"), [("changed_type", "limit")]),
        (lambda s: s["properties"]["id"].update(maxLength=4), [("changed_type", "id")]),
        (lambda s: s["properties"].update(part={"type": "string"}), [("changed_type", "part")]),
        (
            lambda s: (s["properties"].update(more={"type": "string"}), s["required"].append("more")),
            [("required_field_added", "more")],
        ),
        (lambda s: s["required"].append("count"), [("became_required", "count")]),
        (lambda s: s["required"].remove("id"), [("became_optional", "id")]),
        (lambda s: s["properties"]["count"].update(default=1), [("changed_default", "count")]),
        (lambda s: s["properties"]["phase"]["enum"].remove("two"), [("narrowed_enum", "phase")]),
        (lambda s: s["properties"]["phase"]["enum"].append("three"), [("widened_enum", "phase")]),
        (
            lambda s: s["properties"]["type"].update(enum=["test.thing.v2.happened"]),
            [("narrowed_enum", "type"), ("widened_enum", "type")],
        ),
        (lambda s: s.update(additionalProperties=False), [("closed", "")]),
        (lambda s: s["$defs"]["Part"].update(additionalProperties=False), [("closed", "part")]),
        (lambda s: s["$defs"]["Part"]["properties"].pop("note"), [("removed_field", "part.note")]),
        (lambda s: s["$defs"]["Part"]["properties"]["tokens"].update(type="number"), [("changed_type", "part.tokens")]),
    ],
)
def test_every_other_change_needs_a_new_version(
    change: Callable[[Schema], object], expected: list[tuple[str, str]]
) -> None:
    """A service of last week reads the stream, and today's reads last week's messages: neither may stumble."""
    assert kinds(change) == expected


def test_a_message_that_is_no_longer_published_is_incompatible() -> None:
    """Deleting a Struct leaves its retained messages unreadable."""
    assert compare_all({"thing.happened": OLD}, {}) == [Incompatibility("removed_message", "thing.happened")]
    assert compare_all({}, {"thing.happened": OLD}) == []
    (found,) = compare_all({"thing.happened": OLD}, {"thing.happened": changed(rename)})
    assert str(found) == "thing.happened.count: removed field"


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def reference_commit() -> str | None:
    """The contract that others have: the last release, else where this branch left the main one, else HEAD."""
    release = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    return release or git("merge-base", "HEAD", "origin/main") or git("rev-parse", "--verify", "HEAD")


def published_at(commit: str) -> dict[str, Schema]:
    listing = git("ls-tree", "-r", "--name-only", commit, "schemas/published/v1/") or ""
    found = {}
    for path in listing.splitlines():
        text = git("show", f"{commit}:{path}")
        assert text is not None, path
        found[Path(path).name.removesuffix(".schema.json")] = json.loads(text)
    return found


def test_the_working_tree_keeps_the_promises_of_the_published_contract() -> None:
    """A field is renamed in a hurry: the subscribers of the last release must not learn it from their logs."""
    commit = reference_commit() if shutil.which("git") else None
    if commit is None:
        pytest.skip("not a git checkout: nothing to compare with")
    new = {
        Path(name).name.removesuffix(".schema.json"): json.loads(text)
        for name, text in files().items()
        if name.startswith("v1/")
    }
    findings = compare_all(published_at(commit), new)
    assert not findings, f"since {commit}:\n" + "\n".join(map(str, findings))


def test_an_added_field_of_a_real_struct_is_compatible_and_a_required_one_is_not() -> None:
    """The checker reads what msgspec really writes, not only what this file imagines."""

    class Before(msgspec.Struct, tag="t", tag_field="type"):
        name: str
        sizes: dict[str, float] = {}

    class After(msgspec.Struct, tag="t", tag_field="type"):
        name: str
        sizes: dict[str, float] = {}
        more: tuple[str, ...] = ()

    class Broken(msgspec.Struct, tag="t", tag_field="type"):
        name: str
        more: str
        sizes: dict[str, int] = {}

    def schema(struct: type[msgspec.Struct]) -> Schema:
        _, components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
        return dict(components[struct.__name__])

    assert compare(schema(Before), schema(After)) == []
    assert {(f.kind, f.path) for f in compare(schema(Before), schema(Broken))} == {
        ("changed_type", "sizes{}"),
        ("required_field_added", "more"),
    }
