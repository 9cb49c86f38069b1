"""What a request costs a replica, and how much a replica can do: in replica-seconds, learned from what came of
requests.

Decides the seconds of one whole replica that a request takes (its computed prompt at the engine's prefill rate, its
answer at the engine's best sustainable decode speed), and how coarse such work is. The decode speed is a line: a
token takes `a + b·n` ms when n sequences run, fitted to observed TPOT; a replica runs as many sequences as its batch,
its KV and the tightest TPOT objective allow. Until enough was observed, an operator who set a batch size is believed:
with that batch, tokens come at `TRUSTED` of the objective. Refuses to know hardware, prices and time.
"""

import msgspec

#: part of the TPOT objective that a full batch may use
TRUSTED = 0.7
#: objective that stands where nobody promised one, ms
OBJECTIVE_MS = 100.0
#: what an observation weighs after each newer one
FORGET = 0.999
#: weight of what is believed beforehand, in observations, at each end of the line
BELIEVED = 5.0
#: weight of a new request in means
MEAN = 0.01


class Curve(msgspec.Struct):
    """Time per token over running sequences: sums of a weighted least-squares line."""

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def observe(self, running: float, tpot_ms: float) -> None:
        """A request's mean time per output token while so many sequences ran."""
        self.n = self.n * FORGET + 1.0
        self.x = self.x * FORGET + running
        self.xx = self.xx * FORGET + running * running
        self.y = self.y * FORGET + tpot_ms
        self.xy = self.xy * FORGET + running * tpot_ms

    def line(self, batch: float, objective_ms: float) -> tuple[float, float]:
        """(a, b) ms of `a + b·n`, with the belief for a batch of that size; neither is negative."""
        low, high = 1.0, max(2.0, batch)
        believed = ((low, 0.3 * objective_ms), (high, TRUSTED * objective_ms))
        n, x, xx, y, xy = self.n, self.x, self.xx, self.y, self.xy
        weight = BELIEVED
        if self.n > 20 * BELIEVED:
            weight = BELIEVED / 10  # enough was seen; a trace of belief keeps the line defined
        for at, value in believed:
            n, x, xx, y, xy = (
                n + weight,
                x + weight * at,
                xx + weight * at * at,
                y + weight * value,
                xy + weight * at * value,
            )
        slope = max(0.0, (n * xy - x * y) / max(1e-9, n * xx - x * x))
        base = max(0.0, (y - slope * x) / n)
        return base, slope


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a pool's replicas."""

    max_sequences: int
    #: 0: unknown
    kv_tokens: int
    #: 0: unknown
    prefill_tokens_per_s: float
    #: the tightest TPOT objective of what it serves, ms
    objective_ms: float = OBJECTIVE_MS


class Speed(msgspec.Struct, frozen=True):
    """How fast a replica works at the batch that it can sustain."""

    sequences: float
    decode_s_per_token: float
    prefill_s_per_token: float


def speed(engine: Engine, curve: Curve, tokens_per_sequence: float) -> Speed:
    """The sustainable batch of a replica and what tokens cost in it.

    `tokens_per_sequence` is the KV that a request holds on average; 0 where unknown.
    """
    a, b = curve.line(engine.max_sequences, engine.objective_ms)
    batch = float(engine.max_sequences)
    if engine.kv_tokens and tokens_per_sequence > 0:
        batch = min(batch, engine.kv_tokens / tokens_per_sequence)
    allowed_ms = TRUSTED * engine.objective_ms
    if b > 0:
        batch = min(batch, (allowed_ms - a) / b)
    batch = max(1.0, batch)
    prefill = 1.0 / engine.prefill_tokens_per_s if engine.prefill_tokens_per_s > 0 else 0.0
    return Speed(batch, (a + b * batch) / 1000.0 / batch, prefill)


class Demand(msgspec.Struct):
    """Means of the requests of one model and class, from those that completed."""

    seen: int = 0
    input_tokens: float = 0.0
    #: part of the prompt that was read from a prefix cache
    cached: float = 0.0
    output_tokens: float = 0.0
    #: dispatch to end
    serving_s: float = 0.0

    def observe(self, input_tokens: int, cached_tokens: int | None, output_tokens: int, serving_s: float) -> None:
        """A request completed."""
        self.seen += 1
        weight = max(MEAN, 1.0 / self.seen)
        self.input_tokens += weight * (input_tokens - self.input_tokens)
        self.output_tokens += weight * (output_tokens - self.output_tokens)
        self.serving_s += weight * (serving_s - self.serving_s)
        if cached_tokens is not None:
            part = cached_tokens / input_tokens if input_tokens else 0.0
            self.cached += weight * (part - self.cached)

    @property
    def kv_tokens(self) -> float:
        """KV that a request holds at its end."""
        return self.input_tokens + self.output_tokens

    def work_s(self, at: Speed) -> float:
        """Replica-seconds of a mean request."""
        computed = self.input_tokens * (1.0 - self.cached)
        return computed * at.prefill_s_per_token + self.output_tokens * at.decode_s_per_token

    def grain(self, at: Speed) -> float:
        """Part of a replica that a running request takes: how coarse the load is."""
        if self.serving_s <= 0:
            return 1.0 / at.sequences
        return min(1.0, self.work_s(at) / self.serving_s)
