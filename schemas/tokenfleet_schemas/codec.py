"""Bytes ↔ messages. JSON on the streams, msgpack for the KV family."""

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from tokenfleet_schemas.event import Event
from tokenfleet_schemas.routes import BY_MESSAGE, ROUTES


class ContractError(ValueError):
    """The bytes are no message of this contract version."""


_ANY: Any = reduce(or_, (route.message for route in ROUTES))
_decoder = msgspec.json.Decoder(_ANY)
_encoder = msgspec.json.Encoder()
_packed_decoder = msgspec.msgpack.Decoder(_ANY)
_packed_encoder = msgspec.msgpack.Encoder()


def encode(event: Event) -> bytes:
    """One event as JSON."""
    return _encoder.encode(event)


def decode(data: bytes) -> Event:
    """JSON to the event that its `type` names.

    Raises `ContractError` for anything else: bad JSON, an unknown type or version, a missing field.
    """
    try:
        event: Event = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(str(error)) from None
    return event


def encode_packed(event: Event) -> bytes:
    """One event as msgpack, for the plain `kv` messages."""
    return _packed_encoder.encode(event)


def encode_routed(event: Event) -> bytes:
    """One event as its route carries it: msgpack where no stream captures it, else JSON."""
    return encode(event) if BY_MESSAGE[type(event)].stream is not None else encode_packed(event)


def decode_packed(data: bytes) -> Event:
    """msgpack to event; raises `ContractError`."""
    try:
        event: Event = _packed_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(str(error)) from None
    return event
