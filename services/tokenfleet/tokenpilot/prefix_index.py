"""Which instances probably still have a prompt's beginning in their KV cache, for all of them at once.

Decides the expected hits in tokens and nothing else. Each digest has a posting, the set of instances that hold it, so
that a lookup costs the chain's length (in truth the logarithm of it per distinct set) however many instances there
are. Where an engine says what it holds, `store` and `remove` follow it; where it does not, `add` remembers what was
sent there and forgets the least recently used beyond the instance's KV capacity, as vLLM's block pool does. A new
incarnation clears an instance. It is advice, not state: a checkpoint leaves it out and it fills again by itself.

A posting is an integer used as a bit set over instance numbers; equal ones are one object. That is about 150 bytes for
a digest on one instance and 55 for each further instance, which stands for 64 tokens: four blocks of vLLM's usual 16.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from tokenfleet import prefix

#: a prompt's digests as numbers, in order
Chain = npt.NDArray[np.uint64]
EMPTY: Chain = np.zeros(0, np.uint64)

#: positions that are looked at before the search: where none of them is known, nothing is shared
_FIRST = (0, 1, 3, 7)
#: distinct sets remembered to be shared
_SETS_MAX = 65_536


def chain_of(data: bytes) -> Chain:
    """Digests from their bytes, 8 each. Raises `prefix.PrefixError` for a rest."""
    if len(data) % prefix.DIGEST_BYTES:
        raise prefix.PrefixError(f"a chain is a multiple of {prefix.DIGEST_BYTES} bytes, not {len(data)}")
    return np.frombuffer(data, np.uint64)


class PrefixIndex:
    """Digests by instance, and instances by digest."""

    def __init__(self, digests_max: int) -> None:
        self.digests_max = digests_max
        self._postings: dict[int, int] = {}
        #: per instance, most recently used last: digest → chunks of 64 tokens that it stands for
        self._known: dict[str, dict[int, int]] = {}
        #: chunks in `_known`, and how many the instance's KV has room for
        self._chunks: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        #: one object per distinct bit set
        self._sets: dict[int, int] = {}

    def number(self, instance: str) -> int:
        """The bit that stands for an instance; kept until `clear(..., gone=True)`."""
        found = self._numbers.get(instance)
        if found is None:
            found = self._numbers[instance] = self._free.pop() if self._free else len(self._numbers)
        return found

    @property
    def numbers(self) -> int:
        """All numbers are below this."""
        return len(self._numbers) + len(self._free)

    def limit(self, instance: str, kv_tokens: int | None) -> None:
        """The instance's KV capacity, tokens; None: unknown, then the index's own bound rules."""
        chunks = self.digests_max if kv_tokens is None else min(self.digests_max, kv_tokens // prefix.CHUNK_TOKENS)
        self._limits[instance] = max(1, chunks)

    def add(self, instance: str, chain: Chain, stride: int = 1) -> None:
        """A prompt with this chain was sent to the instance."""
        known = self._known.setdefault(instance, {})
        limit = self._limits.get(instance, self.digests_max)
        chunks = self._chunks.get(instance, 0)
        bit = 1 << self.number(instance)
        # The end first: the beginning of a prompt is forgotten last, so a known digest implies its known parents.
        postings, sets = self._postings, self._shared_sets()
        for digest in chain[: max(1, limit // stride)][::-1].tolist():
            before = known.pop(digest, 0)
            if not before:  # as `_put`
                bits = postings.get(digest, 0) | bit
                postings[digest] = sets.setdefault(bits, bits)
            known[digest] = stride
            chunks += stride - before
        if chunks > limit:
            # Looked for in one go: the way to a dict's front gets longer with each that is taken from there.
            oldest = []
            for digest, count in known.items():
                oldest.append(digest)
                chunks -= count
                if chunks <= limit:
                    break
            for digest in oldest:
                del known[digest]
                self._take(digest, bit)
        self._chunks[instance] = chunks

    def store(self, instance: str, digests: Sequence[int]) -> None:
        """The engine says that it holds these; bounded as `add` is."""
        known = self._known.setdefault(instance, {})
        limit = self._limits.get(instance, self.digests_max)
        bit = 1 << self.number(instance)
        chunks = self._chunks.get(instance, 0)
        for digest in reversed(digests):  # a prompt's beginning is forgotten last here too
            before = known.pop(digest, 0)
            if not before:
                self._put(digest, bit)
            known[digest] = 1
            chunks += 1 - before
        if chunks > limit:
            # A sixteenth at once: taking single ones from a dict's front gets slower with each.
            spare = chunks - limit + limit // 16
            for digest in list(islice(known, spare)):
                if spare <= 0:
                    break
                count = known.pop(digest)
                spare, chunks = spare - count, chunks - count
                self._take(digest, bit)
        self._chunks[instance] = chunks

    def remove(self, instance: str, digests: Iterable[int]) -> None:
        """The engine says that it has dropped these."""
        known = self._known.get(instance)
        if not known:
            return
        bit = 1 << self.number(instance)
        for digest in digests:
            chunks = known.pop(digest, 0)
            if chunks:
                self._chunks[instance] -= chunks
                self._take(digest, bit)

    def hits(self, chain: Chain, stride: int) -> list[tuple[int, int]]:
        """(tokens, bit set): who holds exactly so long a beginning of the prompt; shortest first."""
        get = self._postings.get
        at_ = chain.item
        low = next((at for at in _FIRST if at < len(chain) and at_(at) in self._postings), None)
        if low is None:
            return []
        bits, found = get(at_(low), 0), []
        while bits:
            # The furthest position that all of `bits` still hold; sets only shrink along a chain.
            high = len(chain) - 1
            while low < high:
                middle = (low + high + 1) // 2
                if get(at_(middle), 0) & bits == bits:
                    low = middle
                else:
                    high = middle - 1
            rest = get(at_(low + 1), 0) & bits if low + 1 < len(chain) else 0
            found.append(((low + 1) * stride * prefix.CHUNK_TOKENS, bits & ~rest))
            bits, low = rest, low + 1
        return found

    def hit_column(self, chain: Chain, stride: int) -> npt.NDArray[np.float64]:
        """Hit tokens by instance number."""
        column = np.zeros(self.numbers)
        for tokens, bits in self.hits(chain, stride):
            packed = np.frombuffer(bits.to_bytes((self.numbers + 7) // 8, "little"), np.uint8)
            column[np.unpackbits(packed, count=self.numbers, bitorder="little").view(np.bool_)] = tokens
        return column

    def hit_tokens(self, instance: str, chain: Chain, stride: int) -> int:
        """Tokens of the longest beginning that the instance holds."""
        bit = 1 << self.number(instance)
        return next((tokens for tokens, bits in self.hits(chain, stride) if bits & bit), 0)

    def clear(self, instance: str, *, gone: bool = False) -> None:
        """The instance began anew, or is gone."""
        known = self._known.pop(instance, {})
        bit = 1 << self.number(instance)
        for digest in known:
            self._take(digest, bit)
        self._chunks.pop(instance, None)
        if gone:
            self._limits.pop(instance, None)
            self._free.append(self._numbers.pop(instance))

    def __len__(self) -> int:
        return sum(len(known) for known in self._known.values())

    def _shared_sets(self) -> dict[int, int]:
        if len(self._sets) > _SETS_MAX:
            self._sets = {}  # those in use stay alive in their postings
        return self._sets

    def _put(self, digest: int, bit: int) -> None:
        bits = self._postings.get(digest, 0) | bit
        self._postings[digest] = self._shared_sets().setdefault(bits, bits)

    def _take(self, digest: int, bit: int) -> None:
        bits = self._postings.get(digest, 0) & ~bit
        if bits:
            self._postings[digest] = self._sets.setdefault(bits, bits)
        else:
            self._postings.pop(digest, None)
