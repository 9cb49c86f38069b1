"""The contract as files: one JSON Schema per message and one AsyncAPI 3 document, made from the Structs.

Decides how the contract looks to people and tools that do not read Python. It knows nothing that the Structs, their
`#:` comments, `routes` and `streams` do not say, so the files can always be made again: `--check` fails where they
differ from what is committed. Payloads stay open (no `additionalProperties: false`): a field may be added within a
version, and a validator must not refuse it.

Sources: JSON Schema 2020-12; AsyncAPI 3.0.0.
"""

import argparse
import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from tokenfleet_schemas import streams
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import ROUTES, Route

#: of the whole contract: minor with an added field or message, major never (a changed message is a new `v2` of its own)
CONTRACT_VERSION = "1.0.0"
WIRE_VERSION = "v1"
_ROOT = Path(__file__).resolve().parents[1]
_SERVICES = {
    "siteagent": "What is ready at a site: instances, load, network, KV content.",
    "slomax": "Whether a request is served, and when.",
    "fleetmind": "At which site; replica targets and reservations.",
    "tokenpilot": "On which instance of a site, and how much room each has.",
    "gateway": "What the client sent and saw.",
    "accountant": "Whether it complied; goodput.",
    "operator": "A person with the admin's rights, or what acts for one: `tokenfleet reserve`.",
    "subscriber": "Anybody who reads the public streams.",
}


def message_name(route: Route) -> str:
    """`<family>.<fact>`: the name of a message within a version."""
    return f"{route.family}.{route.fact}"


def json_schema(message: type[Event]) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one message, its parts under `$defs`."""
    (reference,), components = msgspec.json.schema_components([message], ref_template="#/$defs/{name}")
    own = str(reference["$ref"]).rpartition("/")[2]
    body = _described(components.pop(own), message)
    route = next(route for route in ROUTES if route.message is message)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tokenfleet:{WIRE_VERSION}:{message_name(route)}",
        **body,
    }
    if components:
        parts = _parts()
        schema["$defs"] = {name: _described(components[name], parts[name]) for name in sorted(components)}
    return schema


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3.0 document: a channel per subject, an operation per service that says or hears it."""
    (_, components) = msgspec.json.schema_components(
        [route.message for route in ROUTES], ref_template="#/components/schemas/{name}"
    )
    types = _parts() | {route.message.__name__: route.message for route in ROUTES}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "TokenFleet",
            "version": CONTRACT_VERSION,
            "description": "Events of the TokenFleet control plane. The message's `type` is the truth about its shape; "
            "the subject is its route. Ignore fields that you do not know.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "nats": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "NATS with JetStream; user `subscriber` may read capacity and goodput.",
            }
        },
        "channels": {message_name(route): _channel(route) for route in ROUTES},
        "operations": _operations(),
        "components": {
            "messages": {message_name(route): _message(route) for route in ROUTES},
            "schemas": {name: _described(components[name], types[name]) for name in sorted(components)},
        },
        "x-nats-streams": {spec.name: _stream(spec) for spec in streams.STREAMS},
    }


def files() -> dict[str, str]:
    """Every published file's path below `published/` → its text; the same for the same Structs."""
    found = {f"{WIRE_VERSION}/{message_name(route)}.schema.json": _text(json_schema(route.message)) for route in ROUTES}
    found["asyncapi.json"] = _text(asyncapi())
    return found


def drift(directory: Path) -> list[str]:
    """What differs between `directory` and the Structs, a line each; empty when nothing does."""
    wanted = files()
    findings = []
    for name in sorted(wanted.keys() | {str(p.relative_to(directory)) for p in directory.rglob("*.json")}):
        path = directory / name
        if name not in wanted:
            findings.append(f"{name}: nothing publishes it")
        elif not path.is_file():
            findings.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != wanted[name]:
            findings.append(f"{name}: out of date")
    return findings


def write(directory: Path) -> None:
    """Make `directory` hold exactly the published files."""
    wanted = files()
    for path in list(directory.rglob("*.json")):
        if str(path.relative_to(directory)) not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m tokenfleet_schemas.publish`: 0 done, 1 drift found, 2 no place to write to."""
    parser = argparse.ArgumentParser(prog="python -m tokenfleet_schemas.publish", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the files are out of date")
    parser.add_argument("--to", type=Path, help="directory (default: schemas/published of this checkout)")
    options = parser.parse_args(argv)
    directory: Path = options.to or _ROOT / "published"
    if options.to is None and not (_ROOT.parent / "pyproject.toml").is_file():
        print("publish: not run from a checkout; say --to DIR", file=sys.stderr)
        return 2
    if not options.check:
        write(directory)
        return 0
    findings = drift(directory)
    for finding in findings:
        print(f"{directory / finding}", file=sys.stderr)
    if findings:
        print("publish: run `make contract` and commit the result", file=sys.stderr)
    return 1 if findings else 0


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _parts() -> dict[str, type[msgspec.Struct]]:
    """Every Struct of the contract's modules by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for route in ROUTES:
        names = vars(sys.modules[route.message.__module__])
        found.update({n: v for n, v in names.items() if isinstance(v, type) and issubclass(v, msgspec.Struct)})
    return found


def _described(schema: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """A Struct's schema with the `#:` comments of its fields as descriptions."""
    comments = _comments(struct)
    properties = {}
    for name, field in schema.get("properties", {}).items():
        comment = comments.get(name)
        # draft-07 ignores what stands beside `$ref`: the description then goes around it
        if comment and "$ref" in field:
            field = {"allOf": [field], "description": comment}
        elif comment:
            field = {**field, "description": comment}
        properties[name] = field
    return {**schema, "properties": properties}


@cache
def _comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field → its `#:` comment, inherited ones too."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base.__module__.partition(".")[0] != __package__:
            continue
        lines = textwrap.dedent(inspect.getsource(base)).splitlines()
        (body,) = ast.parse("\n".join(lines)).body
        assert isinstance(body, ast.ClassDef)
        for statement in body.body:
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            words: list[str] = []
            above = statement.lineno - 2
            while above >= 0 and lines[above].strip().startswith("#:"):
                words.insert(0, lines[above].strip()[2:].strip())
                above -= 1
            if words:
                found[statement.target.id] = " ".join(words)
    return found


def _channel(route: Route) -> dict[str, Any]:
    parameters = {"site": "Where the fact is captured, as a subject token."}
    has_model = isinstance(route.model, attrgetter)
    if has_model:
        parameters["model"] = "The model's name, as a subject token."
    leaf = route.leaf_name if isinstance(route.leaf, attrgetter) else ""
    if leaf:
        parameters[leaf] = f"The {leaf.replace('_', ' ')}, as a subject token."
    model_token, leaf_token = "{model}" if has_model else "_", f"{{{leaf}}}" if leaf else "_"
    channel: dict[str, Any] = {
        "address": f"{route.prefix}.{{site}}.{model_token}.{leaf_token}",
        "description": _summary(route.message),
        "parameters": {name: {"description": text} for name, text in parameters.items()},
        "messages": {message_name(route): {"$ref": f"#/components/messages/{message_name(route)}"}},
    }
    if route.stream is not None:
        channel["x-nats-stream"] = route.stream
    return channel


def _message(route: Route) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": route.message.__struct_config__.tag,
        "title": route.message.__name__,
        "summary": _summary(route.message),
        "contentType": "application/msgpack" if route.family == "kv" else "application/json",
        "headers": {
            "type": "object",
            "properties": {"Nats-Msg-Id": {"type": "string", "description": "the event's `id`"}},
        },
        "payload": {"$ref": f"#/components/schemas/{route.message.__name__}"},
    }
    if route.durable:
        message["x-durable"] = True
    return message


def _operations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for service in _SERVICES:
        for action, word in (("send", "says"), ("receive", "hears")):
            for route in ROUTES:
                if service not in (route.producers if action == "send" else route.consumers):
                    continue
                name = message_name(route)
                found[f"{service}.{action}.{name}"] = {
                    "action": action,
                    "channel": {"$ref": f"#/channels/{name}"},
                    "title": f"{service} {word} {name}",
                    "tags": [{"name": service, "description": _SERVICES[service]}],
                    "messages": [{"$ref": f"#/channels/{name}/messages/{name}"}],
                }
    return found


def _stream(spec: streams.StreamSpec) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(spec).items() if name != "name"} | {
        "subjects": list(spec.subjects)
    }


def _summary(message: type[Event]) -> str:
    return inspect.cleandoc(message.__doc__ or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    raise SystemExit(main())
