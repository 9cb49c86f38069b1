"""How many sequences an instance may run so that its tokens come at the pace that was promised.

Decides a number per instance. An engine takes as many sequences as its limit and its KV hold; each makes every step
longer, so that in an overload all answers come too slowly and none complies, though half as many would. More sequences
make more tokens, of which fewer come in time: the number is taken that makes most compliant ones of the pool's recent
demand. The shape of the pace over the number of sequences is the predictor's physics with the prefill that each
sequence brings with it; its level and its spread are learned from outcomes.

No instance is limited for what the physics say alone: promises must have been broken there, and a limit is lifted by
and by while they are kept. Refuses to know requests, and says nothing of instances that have shown little.
"""

import math
from collections.abc import Sequence

import msgspec

#: weight of one more outcome, once enough have been seen, and how many are enough
WEIGHT, ENOUGH = 0.03, 20
#: standard deviation over the mean absolute one, of a normal distribution; and the least that is believed, of the pace
SIGMA, DEVIATION_MIN = 1.25, 0.03
#: part of the tokens that came too slowly: above it a limit is set, below the lower one it is lifted, by this part a
#: second. Both are high: answers beside long prefills are late whatever runs, and whom a limit holds for nothing is
#: late as well
LATE, LATE_LITTLE = 0.8, 0.3
LIFT = 0.03
#: weight of one more answer of the mean length in that, or of a longer one: a hundred of them, not a burst, set a limit
LATE_WEIGHT = 0.01
#: fewer are never asked for: below, a step's time is that of reading the weights, and hardly one sequence more or less
LEAST = 16.0
#: counts that are compared
STEPS = 32
#: no limit is set for less than a tenth more of compliant tokens; counts within this part of the best are as good
WORTH, ALIKE = 0.9, 0.97
#: what is remembered of a demand shrinks by this with each request: the last two hundred count
KEPT = 0.995
_HALF_ROOT = math.sqrt(0.5)


class Promised(msgspec.Struct):
    """Output tokens that were lately asked of a pool, by the promised time per token. Part of a checkpoint."""

    #: promised ms per token, whole ones; 0: nothing was promised
    tokens: dict[int, float] = {}

    def hear(self, tpot_ms: float | None, tokens: float) -> None:
        """Somebody asks for so many tokens."""
        for key in list(self.tokens):
            self.tokens[key] *= KEPT
            if self.tokens[key] < 1.0:
                del self.tokens[key]
        key = 0 if tpot_ms is None else max(1, int(tpot_ms))
        self.tokens[key] = self.tokens.get(key, 0.0) + tokens

    def kept(self, pace_ms: float, level: float, deviation: float) -> float:
        """Part of the tokens whose promise is kept at paces distributed normally around `level * pace_ms`, 0..1."""
        total = sum(self.tokens.values())
        good = 0.0
        for promised, tokens in self.tokens.items():
            beyond = (promised / pace_ms - level) / deviation
            good += tokens if not promised else tokens * 0.5 * (1.0 + math.erf(beyond * _HALF_ROOT))
        return good / total if total > 0 else 0.0


class Tempo(msgspec.Struct):
    """What outcomes taught of one instance's pace. Part of a checkpoint."""

    #: pace over what the physics say, and its mean deviation
    level: float = 1.0
    spread: float = 0.0
    samples: int = 0
    #: means over the answers: prompt tokens computed, output tokens, KV tokens at the end
    prefill_tokens: float = 0.0
    output_tokens: float = 0.0
    kv_tokens: float = 0.0
    #: part of the latest answers' tokens that came more slowly than promised
    late: float = 0.0

    def judge(self, tpot_ms: float, promised_ms: float | None, tokens: float) -> None:
        """One whole answer of so many tokens kept its promised pace, or did not: a short one says less."""
        broken = promised_ms is not None and tpot_ms > promised_ms
        weight = LATE_WEIGHT * min(1.0, tokens / max(1.0, self.output_tokens))
        self.late += weight * (broken - self.late)

    def learn(
        self, prior: Sequence[float], sequences: float, prefill: float, output: float, kv: float, tpot_ms: float
    ) -> None:
        """One whole answer beside so many sequences; `prior` as `predictor.tpot_features` has it."""
        weight = max(WEIGHT, 1.0 / (self.samples + 1))
        self.samples += 1
        self.prefill_tokens += weight * (prefill - self.prefill_tokens)
        self.output_tokens += weight * (output - self.output_tokens)
        self.kv_tokens += weight * (kv - self.kv_tokens)
        base_ms, each_ms = self._shape(prior)
        ratio = tpot_ms / (base_ms + each_ms * max(1.0, sequences))
        self.level += weight * (ratio - self.level)
        self.spread += weight * (abs(ratio - self.level) - self.spread)

    def _shape(self, prior: Sequence[float]) -> tuple[float, float]:
        """(pace of an empty instance, what each sequence adds with its KV and its prefill), ms."""
        base_ms, sequence_ms, kv_ms, prefill_ms = prior
        brought = self.prefill_tokens / max(1.0, self.output_tokens)
        return base_ms, sequence_ms + kv_ms * self.kv_tokens + prefill_ms * brought

    def most(self, prior: Sequence[float], promised: Promised, sequences_max: float, kv_total: float) -> int | None:
        """Sequences at once by which most tokens come at their promised pace; None: as many as it takes.

        Of counts that do about as well the largest, so that nobody waits for nothing, and none for a small gain.
        """
        if self.samples < ENOUGH or not promised.tokens:
            return None
        base_ms, each_ms = self._shape(prior)
        full = max(1.0, min(sequences_max, kv_total / max(1.0, self.kv_tokens)))
        if full <= LEAST:
            return None
        deviation = max(DEVIATION_MIN, SIGMA * self.spread)
        found: list[tuple[float, float]] = []
        for step in range(1, STEPS + 1):
            count = max(LEAST, float(int(full * step / STEPS)))
            pace_ms = base_ms + each_ms * count
            found.append((count / pace_ms * promised.kept(pace_ms, self.level, deviation), count))
        best = max(found)[0]
        if found[-1][0] >= WORTH * best:
            return None
        return int(max(count for tokens, count in found if tokens >= ALIKE * best))

    def limit(
        self, now: float | None, prior: Sequence[float], promised: Promised, sequences_max: float, kv_total: float
    ) -> float | None:
        """The limit that follows on the present one; None: none. Asked for about once a second."""
        if self.late > LATE:
            most = self.most(prior, promised, sequences_max, kv_total)
            return now if most is None else float(most) if now is None else min(now, float(most))
        if now is None or self.late > LATE_LITTLE:
            return now
        lifted = now + max(0.1, LIFT * now)
        return None if lifted >= sequences_max else lifted
