"""Lanes: how long a prefill may begin where, so that short ones do not queue behind long ones everywhere at once.

Decides a limit per instance, from what was sent to a pool lately and from what is ahead on its instances; refuses to
know requests. Prefill sizes are heavy-tailed: at any load worth having some instances compute long prompts, and who
comes with a short one waits for seconds if all do. Dispatching by size reserves servers for sizes (SITA:
Harchol-Balter, Crovella, Murta 1999). Here no server is reserved and no border is set: for every size x, what arrives
in prefills shorter than x needs so many instances, and a prefill much longer than x begins only where, and while, so
many others have less than x ahead of them.
"""

import msgspec
import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

#: borders between sizes, two per doubling, tokens
EDGES: Column = 256.0 * 2.0 ** (np.arange(24) / 2.0)
#: a prefill so many times as long as another is long beside it
LONG = 3.0
#: part of the time for which an instance that shorter prefills need may be busy with them
BUSY = 0.7
#: half of what is remembered was sent within this time, ms
_HALF_MS = 60_000.0


class Sizes(msgspec.Struct):
    """Prefill tokens that were sent to a pool lately, by size; forgets exponentially. Part of a checkpoint."""

    #: by number of borders at or below the size
    tokens: list[float] = msgspec.field(default_factory=lambda: [0.0] * (len(EDGES) + 1))
    #: time in which they were sent, weighted as they are, ms
    span_ms: float = 0.0
    at_ms: float = 0.0
    #: engine time that they take, ms
    work_ms: float = 0.0

    def learn(self, tokens: int, now_ms: float, work_ms: float = 0.0) -> None:
        """One prefill was sent, which takes so long by itself."""
        if self.at_ms:
            passed_ms = max(0.0, now_ms - self.at_ms)
            keep = 0.5 ** (passed_ms / _HALF_MS)
            self.tokens = [kept * keep for kept in self.tokens]
            self.span_ms = self.span_ms * keep + passed_ms
            self.work_ms *= keep
        self.at_ms = now_ms
        self.work_ms += work_ms
        self.tokens[int(EDGES.searchsorted(tokens, side="right"))] += tokens

    def busy(self, instances: int) -> float:
        """Part of the time for which so many instances were busy with them."""
        return self.work_ms / max(1000.0, self.span_ms) / max(1, instances)

    def needs(self, instances: int, tokens_per_s: float) -> Column:
        """For each border: instances that the prefills below it need, of so many that compute at this rate.

        Never more than their part of all prefill, nor all instances: what is longer has its part too.
        """
        below = np.cumsum(self.tokens)
        if below[-1] <= 0.0 or instances < 2:
            return np.zeros(len(EDGES))
        per_s = below[:-1] * (1000.0 / max(1000.0, self.span_ms))
        part = np.floor(instances * below[:-1] / below[-1])
        found: Column = np.minimum(np.minimum(np.rint(per_s / (BUSY * tokens_per_s)), part), instances - 1.0)
        return found


def longest(needs: Column, ahead: Column, able: npt.NDArray[np.bool_]) -> Column | None:
    """Longest prefill that may begin on each instance, tokens; None where there is no limit anywhere."""
    free = np.sort(ahead[able]).searchsorted(EDGES)
    full = np.flatnonzero((needs >= 1.0) & (free - 1.0 < needs))
    if not full.size:
        return None
    # For each instance the first border above what is ahead there that has too few instances below it.
    borders = np.append(LONG * EDGES[full], np.inf)
    found: Column = borders[EDGES[full].searchsorted(ahead, side="right")]
    return found
