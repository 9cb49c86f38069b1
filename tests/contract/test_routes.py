"""Subjects: seven tokens, spelled in one place, a stream for each, and versions that cannot be mistaken."""

import base64
import importlib
import json
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenfleet_schemas
from tokenfleet_schemas import streams
from tokenfleet_schemas.capacity import CapacityProbed, CapacityReported
from tokenfleet_schemas.codec import ContractError, decode, decode_packed, encode
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged
from tokenfleet_schemas.placement import PlacementAssigned
from tokenfleet_schemas.publish import message_name
from tokenfleet_schemas.request import RequestReceived
from tokenfleet_schemas.routes import BY_MESSAGE, ROUTES, Route, stream_of, subject_filter, subject_of
from tokenfleet_schemas.tokens import slug

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "schemas" / "examples" / "v1"
SERVICES = {"siteagent", "slomax", "fleetmind", "tokenpilot", "gateway", "accountant"}


def example(name: str) -> Event:
    return decode((EXAMPLES / f"{name}.json").read_bytes())


def matches(pattern: str, subject: str) -> bool:
    """NATS' own rule: `*` is one token, `>` one or more at the end."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and all(w in ("*", t) for w, t in zip(wanted[:-1], tokens, strict=False))
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def test_every_message_of_the_contract_is_routed() -> None:
    """A Struct without a route can be built but never sent."""
    for module in pkgutil.iter_modules(tokenfleet_schemas.__path__):
        importlib.import_module(f"tokenfleet_schemas.{module.name}")
    found, pending = set[type[Event]](), list(Event.__subclasses__())
    while pending:
        message = pending.pop()
        pending += message.__subclasses__()
        if message.__module__.startswith("tokenfleet_schemas."):
            found.add(message)
    assert found == set(BY_MESSAGE)
    assert len(ROUTES) == len(BY_MESSAGE)


@pytest.mark.parametrize("route", ROUTES, ids=message_name)
def test_tags_name_family_version_and_fact(route: Route) -> None:
    """The type in the body is the truth; subject and class name say the same."""
    assert route.message.__struct_config__.tag == f"tokenfleet.{route.family}.v1.{route.fact}"
    assert route.message.__struct_config__.tag_field == "type"
    assert route.fact.endswith(("ed", "held", "lent", "withdrawn"))  # a past participle
    assert set(route.producers) <= SERVICES | {"operator"}
    assert set(route.consumers) <= SERVICES | {"subscriber", "operator"}
    assert route.producers
    assert route.consumers


@pytest.mark.parametrize("route", ROUTES, ids=message_name)
def test_each_subject_is_captured_by_its_one_stream(route: Route) -> None:
    """Overlapping streams are refused by the server; a subject without a stream is lost."""
    subject = subject_of(example(message_name(route)))
    capturing = [s.name for s in streams.STREAMS if any(matches(pattern, subject) for pattern in s.subjects)]
    assert capturing == ([route.stream] if route.stream else [])
    assert (route.stream is None) == (route.family == "kv")
    assert not (route.durable and route.stream is None)
    if route.stream:
        assert stream_of(route.message) == stream_of(route.family) == route.stream
        v2 = subject.replace(".v1.", ".v2.", 1)
        assert any(matches(p, v2) for s in streams.STREAMS for p in s.subjects)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_a_subject_has_seven_tokens_and_matches_its_filters(path: Path) -> None:
    """Permissions and consumers count tokens: a model named `org/model.v2` must not add any."""
    event = decode(path.read_bytes())
    route, subject = BY_MESSAGE[type(event)], subject_of(event)
    tokens = subject.split(".")
    assert len(tokens) == 7
    assert all(re.fullmatch(r"[a-z0-9_-]+", token) for token in tokens)
    assert tokens[4] == slug(event.site)
    for pattern in (
        subject_filter(type(event)),
        subject_filter(route.family),
        subject_filter(type(event), site=event.site),
        subject_filter(type(event), site=event.site, model=route.model(event), leaf=route.leaf(event)),
    ):
        assert len(pattern.split(".")) == 7
        assert matches(pattern, subject)
    assert not matches(subject_filter(type(event), site="elsewhere"), subject)


def test_filters_spell_names_as_subjects_do() -> None:
    """A filter for a model with a slash and capitals finds its messages."""
    assert subject_filter(PlacementAssigned, leaf="Gateway.A") == "tf.v1.placement.assigned.*.*.gateway-a"
    assert subject_filter("capacity", site="b") == "tf.v1.capacity.*.b.*.*"
    assert subject_filter(CapacityReported, model="org/Model-7B.v2") == "tf.v1.capacity.reported.*.org-model-7b-v2.*"
    with pytest.raises(KeyError):
        stream_of(KvChanged)
    with pytest.raises(KeyError):
        stream_of("kv")


@given(st.text(max_size=300))
def test_any_name_becomes_one_harmless_token(name: str) -> None:
    """A tenant called `>` or `a.b` must not widen a subscription or shift tokens."""
    token = slug(name)
    assert re.fullmatch(r"[a-z0-9_-]+", token)
    assert slug(token) == token
    assert slug("") == "_"


def test_unknown_fields_pass_and_other_versions_do_not() -> None:
    """During an upgrade v1 gains a field, and v2 runs beside it: a v1 reader takes the first and refuses the second."""
    raw = json.loads((EXAMPLES / "capacity.probed.json").read_bytes())
    assert decode(json.dumps(raw | {"jitter_ms": 3}).encode()) == example("capacity.probed")
    v2 = raw | {"type": "tokenfleet.capacity.v2.probed"}
    with pytest.raises(ContractError, match="v2"):
        decode(json.dumps(v2).encode())
    untyped = {key: value for key, value in raw.items() if key != "type"}
    with pytest.raises(ContractError):
        decode(json.dumps(untyped).encode())


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"null", b"{", b'{"type":"tokenfleet.capacity.v1.probed"}'])
def test_what_is_no_message_is_a_contract_error(data: bytes) -> None:
    """Somebody publishes rubbish on our subject: one typed error, whatever the bytes."""
    with pytest.raises(ContractError):
        decode(data)
    with pytest.raises(ContractError):
        decode_packed(data)


def test_a_message_too_deep_to_read_is_a_contract_error() -> None:
    """One message of a hundred thousand brackets must not end whoever reads the stream, again after every restart."""
    with pytest.raises(ContractError):
        decode(b'{"type":"tokenfleet.capacity.v1.probed","x":' + b'{"a":' * 100_000)
    with pytest.raises(ContractError):
        decode_packed(b"\x82\xa4type\xbetokenfleet.capacity.v1.probed\xa1x" + b"\x91" * 100_000)


def test_no_other_module_spells_a_subject() -> None:
    """A subject typed by hand somewhere misses the next change of the scheme (and its permissions)."""
    allowed = {"routes.py", "streams.py"}
    spelled = re.compile(r"""\btf\.(v\d|\*|>|\{)|["']tf\.?["']""")
    found = [
        str(path.relative_to(ROOT))
        for source in ("services", "schemas", "migrations", "benchmarks")
        for path in (ROOT / source).rglob("*.py")
        if not (path.parent.name == "tokenfleet_schemas" and path.name in allowed)
        and spelled.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_request_with_the_longest_prefix_fits_a_message() -> None:
    """2,048 digests of 8 bytes in base64: under 24 kB, far below the server's limit."""
    event = example("request.received")
    assert isinstance(event, RequestReceived)
    long = msgspec.structs.replace(event.ask, prefix=base64.b64encode(bytes(8 * 2048)).decode(), input_tokens=1_000_000)
    assert len(encode(msgspec.structs.replace(event, ask=long))) <= 24_000


def test_leaf_of_a_probe_is_the_other_site() -> None:
    """The network between b and c, seen from b, replaces only itself in the last-value stream."""
    event = example("capacity.probed")
    assert isinstance(event, CapacityProbed)
    assert subject_of(event) == f"tf.v1.capacity.probed.{event.site}._.{event.other_site}"
