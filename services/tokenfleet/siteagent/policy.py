"""Whether an instance is ready, and why not. Decides on what is known; refuses to know how it was found out.

Unknown is never ready. One late or lost sample is not yet a failure: the last known load is kept and ages, because an
engine answers slowest when it is fullest. A closed port is one at once.
"""

from tokenfleet.fleet import Instance
from tokenfleet.siteagent.settings import Knobs
from tokenfleet.siteagent.state import Identity, Metrics, Record

STARTING = "starting"
UNREACHABLE = "unreachable"
UNHEALTHY = "unhealthy"
STALLED = "stalled"
VERSION_MISMATCH = "version_mismatch"
DRAINING = "draining"
#: by a plan, or put to sleep by its operator
STOPPED = "stopped"


def verdict(record: Record, now_ms: float, knobs: Knobs, max_model_len: int) -> tuple[bool, str]:
    """(ready, reason why not)."""
    if record.silent_since_ms is not None:
        lasting = (
            now_ms - record.silent_since_ms >= knobs.unreachable_ms and record.silent_polls >= knobs.unreachable_polls
        )
        if record.refused or lasting:
            return False, UNREACHABLE
        return record.ready, record.reason  # one late answer changes nothing
    if record.health != 200:
        return False, UNHEALTHY if record.was_healthy else STARTING
    if record.identity is None:
        return False, STARTING
    if not served_version(record.declared, record.identity, knobs):
        return False, VERSION_MISMATCH
    if record.metrics is not None and record.metrics.asleep:
        return False, STOPPED
    if is_stalled(record, now_ms, knobs, max_model_len):
        return False, STALLED
    return True, ""


def served_version(declared: Instance, identity: Identity, knobs: Knobs) -> str:
    """The exact version of the declared model that an engine serves; empty: none, or nobody can tell.

    An engine says it in the root of its entry (`<model>@<version>`) or in the name itself. One that says neither is
    believed to serve what is declared, if it serves the model's name and the settings allow that.
    """
    exact = f"{declared.model}@{declared.version}"
    for entry in identity.served:
        if entry.parent or entry.name not in (declared.model, exact):
            continue
        said = entry.root if entry.root.startswith(f"{declared.model}@") else entry.name
        _, _, version = said.removeprefix(declared.model).partition("@")
        if version:
            return version if version == declared.version else ""
        return declared.version if knobs.trust_declared_version else ""
    return ""


def adapters(declared: Instance, identity: Identity) -> tuple[str, ...]:
    """Adapters of the declared model that are loaded, in name order."""
    names = {declared.model, f"{declared.model}@{declared.version}"}
    return tuple(sorted(entry.name for entry in identity.served if entry.parent in names))


def is_stalled(record: Record, now_ms: float, knobs: Knobs, max_model_len: int) -> bool:
    """Requests run and nothing has come of them for longer than a prefill can take.

    A request that entered since the last token may be in its prefill, during which some engines count nothing: it
    gets as long as the longest prompt would take at the known rate. Without an entry the plain limit holds.
    """
    metrics = record.metrics
    if metrics is None or not metrics.running:
        return False
    limit_ms = knobs.stalled_ms
    if record.entered:
        rate = record.declared.prefill_tokens_per_s or knobs.slow_prefill_tokens_per_s
        limit_ms = max(limit_ms, knobs.prefill_allowance * 1000.0 * max_model_len / rate)
    # judged when the page was taken: while pages do not come, nothing new is known
    return record.metrics_ms - record.progress_ms >= limit_ms


def progressed(before: Metrics | None, after: Metrics) -> bool:
    """Whether an engine computed anything between two pages, or had nothing to compute.

    KV blocks are taken chunk by chunk, so their share moves even where tokens are counted only at a prefill's end.
    """
    if before is None or not after.running:
        return True
    return any(
        getattr(before, name) != getattr(after, name)
        for name in ("prompt_tokens_total", "generation_tokens_total", "kv_usage", "steps_total")
    )


def restarted(before: Metrics | None, after: Metrics) -> bool:
    """Whether an engine's counters went backwards: it began anew, whatever its start time says.

    Computed prompt tokens are left out: where they are a difference (prompt less cached), the engine raises its two
    counters at different moments and the difference steps back under load, without any restart.
    """
    if before is None:
        return False
    pairs = (
        (before.generation_tokens_total, after.generation_tokens_total),
        (before.preemptions_total, after.preemptions_total),
    )
    return any(one is not None and other is not None and other < one for one, other in pairs)
