"""What is committed under schemas/published is what the Structs say now."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tokenfleet_schemas import publish
from tokenfleet_schemas.routes import ROUTES
from tokenfleet_schemas.streams import STREAMS

PUBLISHED = Path(__file__).resolve().parents[2] / "schemas" / "published"


def test_the_published_contract_is_up_to_date() -> None:
    """Somebody changes a Struct and forgets `make contract`: subscribers would read yesterday's schema."""
    assert publish.drift(PUBLISHED) == []


def test_check_finds_a_changed_a_missing_and_a_stray_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drift check itself must not be the thing that drifts."""
    publish.write(tmp_path)
    assert publish.main(["--check", "--to", str(tmp_path)]) == 0
    (tmp_path / "v1" / "capacity.probed.schema.json").unlink()
    (tmp_path / "v1" / "ghost.seen.schema.json").write_text("{}")
    with (tmp_path / "asyncapi.json").open("a") as out:
        out.write(" ")
    assert publish.main(["--check", "--to", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "capacity.probed.schema.json: missing" in said
    assert "ghost.seen.schema.json: nothing publishes it" in said
    assert "asyncapi.json: out of date" in said
    assert publish.main(["--to", str(tmp_path)]) == 0
    assert publish.drift(tmp_path) == []


@pytest.mark.parametrize("route", ROUTES, ids=publish.message_name)
def test_each_schema_is_valid_open_and_says_what_it_means(route: Any) -> None:
    """An older validator must let an added field pass, and a person must learn what the message means."""
    schema = publish.json_schema(route.message)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:tokenfleet:v1:{route.family}.{route.fact}"
    assert schema["title"] == route.message.__name__
    assert len(schema["description"]) > 20
    assert schema["properties"]["type"] == {"enum": [f"tokenfleet.{route.family}.v1.{route.fact}"]}
    text = json.dumps(schema)
    assert '"additionalProperties": false' not in text
    assert "prefixItems" not in text  # AsyncAPI's tools know draft-07
    for part in schema.get("$defs", {}).values():
        assert part["description"]


def test_comments_of_fields_travel_into_the_schema() -> None:
    """The unit and the meaning of None stand in `#:` comments; subscribers without Python need them too."""
    ask = publish.json_schema(next(r.message for r in ROUTES if r.fact == "received"))["$defs"]["Ask"]
    assert "constraint" in ask["properties"]["output_budget_tokens"]["description"]
    assert "Nats-Msg-Id" in publish.json_schema(ROUTES[0].message)["properties"]["id"]["description"]


def asyncapi() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((PUBLISHED / "asyncapi.json").read_text())
    return document


def resolve(document: dict[str, Any], reference: str) -> Any:
    here: Any = document
    for token in reference.removeprefix("#/").split("/"):
        here = here[token]
    return here


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [value["$ref"]] if "$ref" in value else [r for v in value.values() for r in references(v)]
    return [r for v in value for r in references(v)] if isinstance(value, list) else []


def test_asyncapi_has_the_structure_that_3_0_0_demands() -> None:
    """Generators of foreign teams read this file; a dangling reference or wrong key stops them.

    The official JSON Schema of AsyncAPI 3.0.0 is in no Python package, so its rules that apply here are spelled out.
    """
    document = asyncapi()
    assert document["asyncapi"] == "3.0.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+", document["info"]["version"])
    assert document["info"]["version"] == publish.CONTRACT_VERSION
    own = {"asyncapi", "id", "info", "servers", "defaultContentType", "channels", "operations", "components"}
    assert all(key in own or re.fullmatch(r"x-[\w.-]+", key) for key in document)
    for reference in references(document):
        assert resolve(document, reference) is not None
    for server in document["servers"].values():
        assert {"host", "protocol"} <= server.keys()
    for name, channel in document["channels"].items():
        fields = {"address", "title", "summary", "description", "parameters", "messages", "servers", "tags"}
        assert all(key in fields or key.startswith("x-") for key in channel), name
        assert set(re.findall(r"{(\w+)}", channel["address"])) == set(channel["parameters"])
        assert all(
            parameter.keys() <= {"description", "enum", "default"} for parameter in channel["parameters"].values()
        )
        assert channel["messages"]
    for name, operation in document["operations"].items():
        assert operation["action"] in ("send", "receive"), name
        channel_reference = operation["channel"]["$ref"]
        assert re.fullmatch(r"#/channels/[^/]+", channel_reference)
        # of the operation's channel, by reference into it, not into components
        for message in operation["messages"]:
            assert message["$ref"].startswith(f"{channel_reference}/messages/")
    for kind, group in document["components"].items():
        assert kind in ("messages", "schemas")
        assert all(re.fullmatch(r"[\w.\-]+", key) for key in group)
    for message in document["components"]["messages"].values():
        allowed = {"name", "title", "summary", "contentType", "headers", "payload"}
        assert all(key in allowed or key.startswith("x-") for key in message)


def test_asyncapi_says_for_every_message_who_says_and_hears_it_and_what_stream_keeps_it() -> None:
    """A new service's author asks the document, not the source."""
    document = asyncapi()
    specs = {spec.name for spec in STREAMS}
    assert set(document["x-nats-streams"]) == specs
    for route in ROUTES:
        name = publish.message_name(route)
        channel = document["channels"][name]
        assert channel.get("x-nats-stream") == route.stream
        assert len(channel["address"].split(".")) == 7
        operations = {key for key in document["operations"] if key.endswith(f".{name}")}
        assert operations == {f"{who}.send.{name}" for who in route.producers} | {
            f"{who}.receive.{name}" for who in route.consumers
        }
        message = document["components"]["messages"][name]
        assert message["name"] == route.message.__struct_config__.tag
        packed = route.family == "kv"
        assert message["contentType"] == ("application/msgpack" if packed else "application/json")


def test_publishing_twice_gives_the_same_bytes() -> None:
    """Dictionary or set order in the output would make every second commit noisy."""
    assert publish.files() == publish.files()
    assert msgspec.json.decode(publish.files()["asyncapi.json"]) == asyncapi()
