"""What a replay remembers of every request: one record each, as JSON lines.

Decides the words for an ending and nothing else. Times are milliseconds on the driver's monotonic clock, counted from
the run's start, so that no two machines' clocks are ever subtracted. Holds no prompt and no key.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from tokenfleet.replay.errors import ReplayError

#: `refused`: the fleet said no before any token (403, 429, 503). `cancelled`: the driver gave up at its time-out.
#: `failed`: anything else that ended without a whole answer. `unfinished`: still open when the drain time was over.
Outcome = Literal["completed", "refused", "cancelled", "failed", "unfinished"]
OUTCOMES: tuple[Outcome, ...] = ("completed", "refused", "cancelled", "failed", "unfinished")


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request as its client saw it."""

    #: place in the trace
    index: int
    tenant: str
    cls: str = msgspec.field(name="class")
    task: str = ""
    model: str
    outcome: Outcome
    #: as the trace states them
    input_tokens: int
    stated_output_tokens: int
    deadline_ms: float | None = None
    planned_ms: float
    sent_ms: float
    #: first content, reasoning or tool token; never the role chunk
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    ended_ms: float | None = None
    #: as usage says; counted chunks where an answer broke off before it
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None
    error_code: str = ""
    error_type: str = ""
    retry_after_s: float | None = None
    finish_reason: str = ""
    #: the fleet's own id of the request, its attempts and its site, as the answer's headers say
    request_id: str = ""
    attempts: int | None = None
    site: str = ""

    @property
    def lag_ms(self) -> float:
        """How late the driver itself sent the request."""
        return self.sent_ms - self.planned_ms

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token from sending; None when none came."""
        return None if self.first_token_ms is None else self.first_token_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.first_token_ms is None or self.last_token_ms is None or self.output_tokens < 2:
            return None
        return (self.last_token_ms - self.first_token_ms) / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """From sending to the end of the answer; None while open."""
        return None if self.ended_ms is None else self.ended_ms - self.sent_ms


def encode(records: Iterable[Record]) -> bytes:
    """Records as JSON lines, in trace order."""
    lines = [msgspec.json.encode(record) for record in sorted(records, key=lambda r: r.index)]
    return b"\n".join([*lines, b""])


def decode(data: bytes) -> list[Record]:
    """Read what `encode` wrote. Raises `ReplayError` with the line that is not a record."""
    found: list[Record] = []
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ReplayError(f"records line {number}: {error}") from error
    return found


def nearest_rank(values: Sequence[float], quantile: float) -> float | None:
    """The quantile of sorted values by nearest rank (no interpolation: infinities stay whole); None of nothing."""
    if not values:
        return None
    rank = -int(-quantile * len(values) // 1)
    return values[max(0, min(len(values), rank) - 1)]
