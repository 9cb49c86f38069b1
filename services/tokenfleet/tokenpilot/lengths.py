"""How long answers get: output-length distributions, learned online per (tenant, task, model).

Decides an expectation and quantiles; refuses to know requests and budgets (a client's limit is a cap, never an
estimate). A distribution is a histogram over logarithmic buckets, four per doubling, whose counts are halved when they
grow, so that it follows a change; memory is a few hundred bytes a key and the least recently used keys are forgotten.
Where a key has seen little, its answers are those of the task, then of the model. Same-prompt lengths are heavy-tailed
(ProD), hence quantiles and not a point.
"""

import math

import msgspec

#: buckets per doubling of the length
_PER_DOUBLING = 4
#: lengths above 2^20 share the last bucket
_BUCKETS = 20 * _PER_DOUBLING + 1
#: counts are halved at this total: memory of a few hundred answers
_TOTAL_MAX = 512.0
#: answers before a key is believed on its own
_ENOUGH = 8


class Lengths(msgspec.Struct):
    """One distribution; part of a checkpoint."""

    count: int = 0
    mean_tokens: float = 0.0
    #: bucket → weight
    weights: dict[int, float] = {}
    total: float = 0.0

    def learn(self, tokens: int) -> None:
        """Take one completed answer in."""
        self.count += 1
        self.mean_tokens += (tokens - self.mean_tokens) / min(self.count, 64)
        bucket = min(_BUCKETS - 1, int(_PER_DOUBLING * math.log2(max(1, tokens))))
        self.weights[bucket] = self.weights.get(bucket, 0.0) + 1.0
        self.total += 1.0
        if self.total >= _TOTAL_MAX:
            self.weights = {b: w / 2 for b, w in self.weights.items() if w > 0.25}
            self.total = sum(self.weights.values())

    def quantile(self, q: float) -> float:
        """Length that a share `q` of the answers does not exceed, within a bucket's width (19%)."""
        if not self.weights:
            return self.mean_tokens
        left = q * self.total
        for bucket in sorted(self.weights):
            weight = self.weights[bucket]
            if left <= weight:
                return float(2.0 ** ((bucket + left / weight) / _PER_DOUBLING))
            left -= weight
        return float(2.0 ** ((max(self.weights) + 1) / _PER_DOUBLING))


class LengthBook(msgspec.Struct):
    """All distributions of one site; at most `keys_max` of them."""

    keys_max: int = 4096
    #: least recently learned first
    of: dict[str, Lengths] = {}

    def learn(self, tenant: str, task: str, model: str, tokens: int) -> None:
        """Take one completed answer in, for its key and for the broader ones."""
        for key in _keys(tenant, task, model):
            found = self.of.pop(key, None) or Lengths()
            found.learn(tokens)
            self.of[key] = found
        while len(self.of) > self.keys_max:
            del self.of[next(iter(self.of))]

    def find(self, tenant: str, task: str, model: str) -> Lengths | None:
        """The narrowest distribution that has seen enough, else the broadest that has seen anything."""
        best: Lengths | None = None
        for key in _keys(tenant, task, model):
            found = self.of.get(key)
            if found is not None and found.count >= _ENOUGH:
                return found
            best = found or best
        return best


def _keys(tenant: str, task: str, model: str) -> tuple[str, str, str]:
    return f"{model} {task} {tenant}", f"{model} {task}", model
