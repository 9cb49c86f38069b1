"""The feedback: compliant output per window, from the accountant."""

from tokenfleet_schemas.event import Event, Part


class Percentiles(Part, frozen=True, kw_only=True):
    """Of the samples in the window, ms; None without samples."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class GoodputMeasured(Event, frozen=True, kw_only=True, tag="tokenfleet.goodput.v1.measured"):
    """One group (class × tenant × model × served site) over one sliding window; attributed by finish time.

    Goodput is output tokens of requests that completed and met their objectives, divided by the window's length.
    A window changed by late events is issued again with a higher `revision`.
    """

    service_class: str
    tenant: str
    model: str
    window_s: int
    window_end_unix_ms: int
    revision: int
    #: final outcomes in the window, whatever they were
    offered: int
    completed: int
    compliant: int
    refused: int
    cancelled: int
    failed: int
    #: attempts that were not final: the request was placed again
    repeated: int
    output_tokens: int
    compliant_tokens: int
    #: tokens delivered by attempts that did not comply or did not count, by cause
    wasted_tokens: dict[str, int]
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    #: compliant over offered requests; None when nothing was offered
    compliance_requests: float | None = None
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    #: median of actual − predicted TTFT, ms
    ttft_error_ms_p50: float | None = None
    #: final attempts with a first token and a prediction of it
    predicted: int = 0
    #: `predicted` over all final attempts with a first token; None without any
    prediction_coverage: float | None = None
    #: |actual − predicted| TTFT, ms
    ttft_abs_error_ms: Percentiles | None = None
    #: median of actual − predicted TPOT, ms
    tpot_error_ms_p50: float | None = None
