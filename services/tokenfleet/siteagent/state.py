"""What the agent knows: samples as they came, and the record of each instance and of the way to each other site."""

from typing import Literal

import msgspec

from tokenfleet.fleet import Instance
from tokenfleet_schemas.event import Event


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """One /metrics page in one form, whatever the engine and its version call things. None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    #: 0..1
    kv_usage: float | None = None
    kv_tokens_total: int | None = None
    #: prompt tokens computed (not read from the prefix cache) since the engine began
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    preemptions_total: int | None = None
    #: requests that ended with an answer
    finished_total: int | None = None
    #: when the engine's process began, as it says
    started_unix_s: float | None = None
    #: engine steps so far
    steps_total: int | None = None
    #: put to sleep by its operator: answers, computes nothing
    asleep: bool = False

    def unknown(self) -> tuple[str, ...]:
        """Names of what a report needs and this page does not say."""
        return tuple(name for name in ("running", "waiting", "kv_usage") if getattr(self, name) is None)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models."""

    name: str
    #: what it was loaded from, `<model>@<version>` where the operator named it so
    root: str = ""
    #: of an adapter: the model that it belongs to
    parent: str = ""
    max_model_len: int | None = None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says it is."""

    served: tuple[Served, ...]
    engine_version: str = ""


class Sample(Event, frozen=True, kw_only=True, tag="siteagent.sample"):
    """One poll of one instance: an input of the shell's, never published."""

    instance: str
    #: HTTP status of /health; None: no answer
    health: int | None
    #: without an answer: `refused` (the port is closed) or `silent`
    failure: str = ""
    #: None: no page in time
    metrics: Metrics | None = None
    #: None: not asked or no answer
    identity: Identity | None = None


class ProbeTaken(Event, frozen=True, kw_only=True, tag="siteagent.probe_taken"):
    """One probe of another site: an input of the shell's, never published."""

    other_site: str
    #: of its connections; None: lost
    rtts_ms: tuple[float | None, ...]


class BandwidthTaken(Event, frozen=True, kw_only=True, tag="siteagent.bandwidth_taken"):
    """One timed transfer from another site: an input of the shell's, never published."""

    other_site: str
    #: None: nothing was measured
    bytes_per_s: float | None


class Actuated(Event, frozen=True, kw_only=True, tag="siteagent.actuated"):
    """What an actuator answered: an input of the shell's, never published."""

    instance: str
    action: Literal["start", "stop"]
    ok: bool
    detail: str = ""


class Record(msgspec.Struct, kw_only=True):
    """One declared instance as last known."""

    declared: Instance
    incarnation: str = ""
    #: restarts seen that the engine's own start time does not show
    restarts: int = 0
    #: of the last report; rises over restarts of the agent too
    revision: int = 0
    ready: bool = False
    #: why it is not ready; empty with `ready` False: nothing is known yet
    reason: str = ""
    #: HTTP status of the last answer of /health
    health: int | None = None
    #: answered 200 since the incarnation began
    was_healthy: bool = False
    #: first of the present row of polls without an answer
    silent_since_ms: float | None = None
    silent_polls: int = 0
    refused: bool = False
    metrics: Metrics | None = None
    metrics_ms: float = 0.0
    identity: Identity | None = None
    #: last sign that tokens are computed, or that nothing runs
    progress_ms: float = 0.0
    #: requests entered the engine's batch since: one of them may be in a long prefill
    entered: bool = False
    #: the last sample came
    sampled_ms: float | None = None
    #: the last report went out; None: never
    reported_ms: float | None = None
    #: names missing in /metrics, said once
    warned: tuple[str, ...] = ()


class Path(msgspec.Struct, kw_only=True):
    """The network to one other site."""

    #: the last probes, each with the round trips of its connections, None for lost ones
    probes: list[tuple[float | None, ...]] = []
    #: of the last two transfers that were measured, bytes/s, and when the last one was
    bandwidths: list[float] = []
    bandwidth_ms: float = 0.0
    revision: int = 0
