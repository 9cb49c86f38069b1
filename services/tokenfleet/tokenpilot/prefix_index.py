"""Which instance probably still has a prompt's beginning in its KV cache: an index made from own placements.

Decides the expected hit in tokens and nothing else. Approximate: it remembers what was sent where, not what the engine
kept; it is bounded per instance, forgets the least recently used first (as vLLM's block pool does), and is cleared by
a new incarnation. It is advice, not state: a checkpoint leaves it out and it fills again by itself.
"""

from itertools import islice

from tokenfleet import prefix

#: positions that are looked at before the search: where none of them is known, nothing is shared
_FIRST = (0, 1, 3, 7)


class PrefixIndex:
    """Digests per instance, most recently used last."""

    def __init__(self, digests_max: int) -> None:
        self.digests_max = digests_max
        self._known: dict[str, dict[bytes, None]] = {}

    def add(self, instance: str, chain: tuple[bytes, ...]) -> None:
        """A prompt with this chain was sent to the instance."""
        known = self._known.setdefault(instance, {})
        # The end first: the beginning of a prompt is forgotten last, so a known digest implies its known parents.
        for digest in reversed(chain[: self.digests_max]):
            known.pop(digest, None)
            known[digest] = None
        over = len(known) - self.digests_max
        if over > 0:
            for digest in list(islice(known, over)):
                del known[digest]

    def hit_tokens(self, instance: str, chain: tuple[bytes, ...], stride: int) -> int:
        """Tokens of the longest beginning that the instance was sent before."""
        known = self._known.get(instance)
        if not known or not chain:
            return 0
        if not any(chain[at] in known for at in _FIRST if at < len(chain)):
            return 0
        low, high = 0, len(chain)  # the longest known beginning has from `low` to `high` digests
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low * stride * prefix.CHUNK_TOKENS

    def clear(self, instance: str) -> None:
        """The instance began anew, or is gone."""
        self._known.pop(instance, None)

    def __len__(self) -> int:
        return sum(len(known) for known in self._known.values())
