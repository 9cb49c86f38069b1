"""How long until the first token, and how long per token after it: predicted, and corrected by what came.

Decides numbers only, from features that its caller gives; refuses to know requests, queues and clocks.

Physics comes first. An engine that computes at most B tokens a step needs, for the A tokens ahead of a prompt and its
own u,

    ttft = delay + c (A + u) + a pairs + t_step steps + k KV steps

with steps = (A + u) / (B - decoding); `pairs` counts a prefill's attention, KV the tokens that every step's decodes
read. Per token: tpot = t_step + c decoding + k KV + interference of prefills. Both are linear in their coefficients,
so recursive least squares with forgetting (Haykin, Adaptive Filter Theory, ch. 10; memory of 1 / (1 - lambda) = 200
requests) corrects each coefficient as a multiple of its prior, per instance and model version: mixed hardware and a
degraded card are learned. Errors are relative, so that short and long prompts teach alike.

A residual (mean relative error by bucket of queue and decoding) is applied only while its rolling error is below the
physics' own. Conformal margins per class widen the prediction until the wanted share of outcomes is below it (online
quantile tracking: q += gamma (miss - alpha); Gibbs and Candes 2021). Rolling error far above its usual level is drift:
it is said once, and the coefficients are freed to move (their covariance is reset).

Regression with a memory of hundreds of requests takes as many to believe in a sudden change, and an engine that is
throttled, or has a new neighbour, changes at once and altogether. So a short run of outcomes all far on the same side
is a new level: every coefficient is multiplied by their median ratio, and freed.
"""

import math
from functools import lru_cache
from operator import mul

import msgspec

#: forgetting per request
LAMBDA = 0.995
#: prior variance of a coefficient's multiple: within a factor of two or so
_VARIANCE = 0.5
_MULTIPLE_MIN, _MULTIPLE_MAX = 0.02, 50.0
#: relative errors beyond this teach as this: one stuck request is no new hardware
_CLIP = 3.0
#: samples before an instance without any known rate is predicted at all
ENOUGH = 8
#: rolling errors: memory of some 20 requests, and the usual level over some 200
_FAST, _SLOW = 0.05, 0.005
#: drift: the rolling error is above this, and above so many times its usual level
_DRIFT, _DRIFT_OVER = 0.3, 2.0
#: requests between two alarms of one instance
_DRIFT_GAP = 50
#: a new level: so many successive outcomes on one side, their median this far off (of the logarithm: 1.35 and 1.8
#: times); first tokens scatter more than paces, by what the queue did
_LEVEL_RUN = 5
_LEVEL_TPOT, _LEVEL_TTFT = 0.3, 0.6
#: conformal step, and the share of outcomes that may be above the margin
_GAMMA, _ALPHA = 0.02, 0.1
#: an outcome this far off, as a share of it, after long without any: what was known does not hold
_FAR = 0.2
#: no single outcome says more than that
_RESCALE_MAX = 4.0
_QUEUE_BUCKETS, _DECODE_BUCKETS = 5, 5

#: shape of the prior, relative to the time of one token's prefill; middle of the published fits for 8B to 70B on A100
#: and H100 (engine profiles): attention per pair, a step's own cost, KV read per token and step
_PAIRS, _STEP_TOKENS, _KV = 3.5e-5, 40.0, 1.5e-3
#: weights read once per decode step, in tokens' time
_WEIGHTS_TOKENS = 230.0
_DELAY_MS, _STEP_MS = 12.0, 1.5
#: output tokens over which the prefill beside an answer is spread
SPREAD_TOKENS = 200.0


class Regression(msgspec.Struct):
    """Recursive least squares over multiples of prior coefficients."""

    prior: list[float]
    multiples: list[float]
    #: covariance, row by row
    covariance: list[list[float]]
    samples: int = 0

    @classmethod
    def of(cls, prior: list[float]) -> "Regression":
        """Nothing learned yet."""
        return cls(prior, [1.0] * len(prior), _fresh(len(prior)))

    def coefficients(self) -> list[float]:
        """What features are multiplied by."""
        return list(map(mul, self.prior, self.multiples))

    def predict(self, features: list[float]) -> float:
        """Milliseconds; never negative."""
        found: float = sum(map(mul, map(mul, features, self.prior), self.multiples))
        return max(0.0, found)

    def learn(self, features: list[float], actual: float) -> None:
        """One outcome, ms. The error is taken relative to the larger of outcome and 1 ms."""
        scale = 1.0 / max(actual, 1.0)
        x = [f * p * scale for f, p in zip(features, self.prior, strict=True)]
        error = actual * scale - sum(map(mul, x, self.multiples))
        error = max(-_CLIP, min(_CLIP, error))
        rows = self.covariance
        px = [sum(map(mul, row, x)) for row in rows]
        below = LAMBDA + sum(map(mul, x, px))
        gain = [v / below for v in px]
        self.multiples = [
            min(_MULTIPLE_MAX, max(_MULTIPLE_MIN, m + g * error))
            for m, g in zip(self.multiples, gain, strict=True)
        ]  # fmt: skip
        # Forgetting must not blow up directions that nothing excites: variance never exceeds the prior's.
        n = len(x)
        grown = [
            [(r - g * p) / LAMBDA for r, p in zip(row, px, strict=True)] for row, g in zip(rows, gain, strict=True)
        ]
        for i in range(n):
            over = grown[i][i] / _VARIANCE
            if over > 1.0:
                shrink = over**-0.5
                for j in range(n):
                    grown[i][j] *= shrink
                    grown[j][i] *= shrink
        self.covariance = grown
        self.samples += 1

    def rescale(self, ratio: float) -> None:
        """Everything takes about so many times as long: half way there at once, the rest is to be learned anew."""
        factor = min(_RESCALE_MAX, max(1.0 / _RESCALE_MAX, ratio)) ** 0.5
        self.multiples = [min(_MULTIPLE_MAX, max(_MULTIPLE_MIN, m * factor)) for m in self.multiples]
        self.free()

    def scale(self, factor: float) -> None:
        """Everything takes so many times as long from now on; 1: nothing happens."""
        if factor != 1.0:
            self.multiples = [min(_MULTIPLE_MAX, max(_MULTIPLE_MIN, m * factor)) for m in self.multiples]
            self.free()

    def free(self) -> None:
        """Let every coefficient move again as freely as at the beginning."""
        self.covariance = _fresh(len(self.prior))


def _fresh(n: int) -> list[list[float]]:
    return [[_VARIANCE if i == j else 0.0 for j in range(n)] for i in range(n)]


class Residual(msgspec.Struct):
    """What physics misses, by bucket of queue and decoding."""

    means: list[float] = msgspec.field(default_factory=lambda: [0.0] * (_QUEUE_BUCKETS * _DECODE_BUCKETS))
    #: rolling errors with and without it
    error_with: float = 0.0
    error_without: float = 0.0
    samples: int = 0

    @property
    def helps(self) -> bool:
        """Whether it has been better than physics alone, and not by chance."""
        return self.samples >= 40 and self.error_with < 0.95 * self.error_without

    def learn(self, bucket: int, predicted: float, actual: float) -> None:
        """One outcome and what physics said."""
        ratio = actual / max(predicted, 1.0) - 1.0
        with_it = abs(predicted * (1.0 + self.means[bucket]) - actual) / max(actual, 1.0)
        without = abs(predicted - actual) / max(actual, 1.0)
        weight = max(1.0 / (1 + self.samples), _FAST)
        self.error_with += weight * (min(_CLIP, with_it) - self.error_with)
        self.error_without += weight * (min(_CLIP, without) - self.error_without)
        self.means[bucket] += _FAST * (max(-0.9, min(_CLIP, ratio)) - self.means[bucket])
        self.samples += 1


def bucket(ahead_steps: float, decoding: float, sequences_max: float) -> int:
    """Of the residual: steps of prefill ahead, and how full of decodes it is."""
    queue = min(_QUEUE_BUCKETS - 1, int(ahead_steps * 2.0))
    full = min(_DECODE_BUCKETS - 1, int(_DECODE_BUCKETS * decoding / max(1.0, sequences_max)))
    return queue * _DECODE_BUCKETS + full


@lru_cache(maxsize=1024)
def _priors(c_ms: float) -> tuple[list[float], list[float]]:
    """Of first token and pace, for this time per prompt token: equal instances share them and compare fast."""
    return (
        [_DELAY_MS, c_ms, _PAIRS * c_ms, _STEP_MS + _STEP_TOKENS * c_ms, _KV * c_ms],
        [_STEP_MS + _WEIGHTS_TOKENS * c_ms, c_ms, _KV * c_ms, c_ms],
    )


#: a prompt of middling length, tokens
_MIDDLING = 4000.0


class Model(msgspec.Struct):
    """All that was learned of one instance with one model version."""

    key: str
    ttft: Regression
    tpot: Regression
    #: a rate was declared or observed, so the prior means something
    rated: bool
    #: rolling relative error, and its usual level
    error: float = 0.0
    usual_error: float = 0.0
    samples: int = 0
    alarmed_at: int = -_DRIFT_GAP
    #: log ratios of the latest outcomes to predictions, for `level`
    ttft_recent: list[float] = []
    tpot_recent: list[float] = []

    @classmethod
    def of(cls, key: str, tokens_per_s: float | None, guess_tokens_per_s: float) -> "Model":
        """Prior from the declared prefill rate; a guess where none is known, not believed before it has learned."""
        ttft, tpot = _priors(1000.0 / (tokens_per_s or guess_tokens_per_s))
        return cls(key, Regression.of(ttft), Regression.of(tpot), tokens_per_s is not None)

    @property
    def slowness(self) -> float:
        """Prefill time of a prompt of middling length as it was learned, over its prior's."""
        (_, token, pair, step, _), (_, by, by_pair, by_step, _) = self.ttft.prior, self.ttft.multiples
        token, pair = _MIDDLING * token, _MIDDLING * _MIDDLING / 2.0 * pair
        return (by * token + by_pair * pair + by_step * step) / (token + pair + step)

    @property
    def known(self) -> bool:
        """Whether its predictions may be said."""
        return self.rated or self.ttft.samples >= ENOUGH

    def learn_ttft(self, features: list[float], predicted_ms: float, actual_ms: float, *, stale: bool = False) -> bool:
        """An outcome and what was said of it; True when the model is found to drift. `stale`: the first in a while."""
        error = min(_CLIP, abs(predicted_ms - actual_ms) / max(actual_ms, 1.0))
        self.samples += 1
        self.error += max(1.0 / self.samples, _FAST) * (error - self.error)
        self.usual_error += max(1.0 / self.samples, _SLOW) * (error - self.usual_error)
        drifts = self._alarm() if self.error > max(_DRIFT, _DRIFT_OVER * self.usual_error) else False
        if stale and error > _FAR:
            # An alarm wants many samples; who gets one request in a while must not wait for them.
            self.ttft.rescale(actual_ms / max(predicted_ms, 1.0))
            self.ttft_recent.clear()
            self.tpot.free()
        if drifts:
            self.ttft.free()
            self.tpot.free()
        factor = level(self.ttft_recent, self.ttft.predict(features), actual_ms, _LEVEL_TTFT)
        self.ttft.scale(factor)
        self.ttft.learn(features, actual_ms)
        return drifts or (factor != 1.0 and self._alarm())

    def learn_tpot(self, features: list[float], actual_ms: float) -> bool:
        """The pace of a whole answer; True when it has a new level."""
        factor = level(self.tpot_recent, self.tpot.predict(features), actual_ms, _LEVEL_TPOT)
        self.tpot.scale(factor)
        self.tpot.learn(features, actual_ms)
        return factor != 1.0 and self._alarm()

    def _alarm(self) -> bool:
        """Whether a change is news: not while the prior is still being corrected, and not soon after another."""
        if self.samples < 20 or self.samples - self.alarmed_at < _DRIFT_GAP:
            return False
        self.alarmed_at = self.samples
        return True


def level(recent: list[float], predicted: float, actual: float, apart: float) -> float:
    """The factor by which outcomes have left the predictions, 1 while they have not; `recent` is kept by the caller.

    Log ratios of the latest outcomes to what is predicted now (not to what was said: answers under way at a change
    would count it twice).
    """
    recent.append(math.log(max(actual, 1.0) / max(predicted, 1.0)))
    del recent[:-_LEVEL_RUN]
    if len(recent) < _LEVEL_RUN or not (min(recent) > 0.0 or max(recent) < 0.0):
        return 1.0
    median = sorted(recent)[_LEVEL_RUN // 2]
    if abs(median) < apart:
        return 1.0
    recent.clear()
    return math.exp(median)


class Margin(msgspec.Struct):
    """A class's conformal margin, as a share of the prediction."""

    share: float = 0.2

    def learn(self, predicted_ms: float, actual_ms: float) -> None:
        """Wider by (1 - alpha) steps after a miss, narrower by alpha steps after none."""
        miss = actual_ms > predicted_ms * (1.0 + self.share)
        self.share = max(0.0, min(_CLIP, self.share + _GAMMA * ((1.0 if miss else 0.0) - _ALPHA)))


def ttft_features(
    ahead_tokens: float,
    ahead_pairs: float,
    own_tokens: float,
    own_pairs: float,
    decoding: float,
    kv_tokens: float,
    token_budget: float,
) -> list[float]:
    """Of a request's TTFT: one, tokens, pairs, steps, KV tokens read over the steps."""
    steps = steps_of(ahead_tokens + own_tokens, decoding, token_budget)
    # Decodes take their place in each step: they are computed along with the prefill.
    return [1.0, ahead_tokens + own_tokens + steps * decoding, ahead_pairs + own_pairs, steps, steps * kv_tokens]


def steps_of(tokens: float, decoding: float, token_budget: float) -> float:
    """Engine steps until so many prompt tokens are computed, with half of the one under way."""
    return max(1.0, tokens / max(token_budget / 8.0, token_budget - decoding)) + (0.5 if decoding else 0.0)


def tpot_features(decoding: float, kv_tokens: float, prefill_tokens: float) -> list[float]:
    """Of the time per output token: one, sequences, KV tokens, the prefill booked there spread over an answer."""
    return [1.0, decoding + 1.0, kv_tokens, prefill_tokens / SPREAD_TOKENS]


def pairs_of(prefill_tokens: float, hit_tokens: float) -> float:
    """Attention of a prefill: pairs of a computed token and one before it."""
    return prefill_tokens * (hit_tokens + prefill_tokens / 2.0)
