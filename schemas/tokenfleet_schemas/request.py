"""What a client asked for, without its words: sizes, digests, names, objectives."""

from typing import Literal

from tokenfleet_schemas.event import Event, Part


class Ask(Part, frozen=True, kw_only=True):
    """The facts of one request that every decision needs; no text and no token ids ever travel."""

    request_id: str
    gateway: str
    #: of the gateway process: a new one means that the old one's streams are broken
    gateway_incarnation: str
    #: site of the gateway
    entry: str
    #: zone of the gateway: an instance must be routable from it
    entry_zone: str
    tenant: str
    service_class: str
    #: chat, document, agent, batch or what the client declared
    task: str = ""
    model_asked: str
    model: str
    version: str
    #: LoRA adapter that must be loaded; empty: none
    adapter: str = ""
    stream: bool = False
    input_tokens: int
    #: how `input_tokens` was found
    input_tokens_source: Literal["tokenizer", "engine", "estimate"] = "tokenizer"
    #: the client's limit on output; a constraint, never an estimate; None: up to the model's length
    output_budget_tokens: int | None = None
    #: size of the body that crosses the network
    request_bytes: int = 0
    #: base64 of packed 8-byte keyed chain hashes, one per `64 * prefix_stride` tokens (`tokenfleet.prefix`)
    prefix: str = ""
    prefix_stride: int = 1
    #: gateway's clock at receipt; orders requests, never judges a time-out
    received_unix_ms: int
    #: objectives, ms; None: none
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    #: longest hold before refusal, ms, at most 300,000
    patience_ms: float


class RequestReceived(Event, frozen=True, kw_only=True, tag="tokenfleet.request.v1.received"):
    """A gateway took a request from an authenticated client; a resubmission raises `revision`."""

    ask: Ask
    attempt: int = 1
    revision: int = 0
    #: since receipt, by the gateway's monotonic clock
    elapsed_ms: float = 0.0
