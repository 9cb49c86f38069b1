"""Every message has an example that is really one."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tokenfleet_schemas.codec import decode, decode_packed, encode, encode_packed
from tokenfleet_schemas.publish import json_schema, message_name
from tokenfleet_schemas.routes import BY_MESSAGE, ROUTES, subject_of

EXAMPLES = Path(__file__).resolve().parents[2] / "schemas" / "examples" / "v1"
FILES = sorted(EXAMPLES.glob("*.json"))


def test_every_message_has_an_example() -> None:
    """A message is added without one: its subscribers would have to guess."""
    shown = {".".join(path.name.split(".")[:2]) for path in FILES}
    assert shown == {message_name(route) for route in ROUTES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_decodes_encodes_to_itself_and_validates(path: Path) -> None:
    """The three ways to read the contract (Struct, JSON, JSON Schema) agree on it."""
    raw: dict[str, Any] = json.loads(path.read_bytes())
    event = decode(path.read_bytes())
    assert path.name.startswith(message_name(BY_MESSAGE[type(event)]) + ".")
    assert json.loads(encode(event)) == raw
    assert decode(encode(event)) == event
    assert decode_packed(encode_packed(event)) == event
    jsonschema.validate(raw, json_schema(type(event)), cls=jsonschema.Draft202012Validator)
    assert len(subject_of(event).split(".")) == 7
    assert event.id
    assert event.site


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_with_an_added_field_still_validates_and_decodes(path: Path) -> None:
    """Next month's sender says more; today's reader and validator let it pass."""
    raw = json.loads(path.read_bytes()) | {"added_later": {"deep": [1, 2]}}
    event = decode(msgspec.json.encode(raw))
    jsonschema.validate(raw, json_schema(type(event)), cls=jsonschema.Draft202012Validator)
    assert event == decode(path.read_bytes())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_struct_and_schema_refuse_the_same_missing_field(path: Path) -> None:
    """What the schema calls required is what the decoder needs."""
    raw = json.loads(path.read_bytes())
    schema = json_schema(type(decode(path.read_bytes())))
    for name in schema["required"]:
        without = {key: value for key, value in raw.items() if key != name}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(without, schema, cls=jsonschema.Draft202012Validator)
        with pytest.raises(ValueError, match=name):
            decode(msgspec.json.encode(without))
