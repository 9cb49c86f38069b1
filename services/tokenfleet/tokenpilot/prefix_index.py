"""Which instances probably still have a prompt's beginning in their KV cache, for all of them at once.

Decides the expected hits in tokens and nothing else. Each digest has a posting, the set of instances that hold it, so
that a lookup costs the chain's length (in truth the logarithm of it per distinct set) however many instances there
are. Where an engine says what it holds, `store` and `remove` follow it; where it does not, `add` remembers what was
sent there and forgets the least recently used beyond the instance's KV capacity, as vLLM's block pool does. A new
incarnation clears an instance. It is advice, not state: a checkpoint leaves it out and it fills again by itself.

A posting is the number of a bit set over instance numbers. That is 20 to 40 bytes for a digest and 35 to 65 for each
instance that holds it (its place in the order of use), for 64 tokens: four blocks of vLLM's usual 16.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tokenfleet import prefix
from tokenfleet.tokenpilot.digest_table import DigestTable, Numbers

#: a prompt's digests as numbers, in order
Chain = npt.NDArray[np.uint64]
EMPTY: Chain = np.zeros(0, np.uint64)

#: positions that are looked at before the search: where none of them is known, nothing is shared
_FIRST = (0, 1, 3, 7)
#: numbers of sets above which those without a digest are thrown out
_SETS_MAX = 65_536
#: a batch is lengthened up to so many digests; batches are numbered anew from here
_BATCH_MAX = 512
_NUMBER_MAX = (1 << 28) - 1
#: chunks by the last four bits of an entry of `_Use.last`
_CHUNKS = np.array([0, *(1 << size for size in range(15))], np.int64)


def chain_of(data: bytes) -> Chain:
    """Digests from their bytes, 8 each. Raises `prefix.PrefixError` for a rest."""
    if len(data) % prefix.DIGEST_BYTES:
        raise prefix.PrefixError(f"a chain is a multiple of {prefix.DIGEST_BYTES} bytes, not {len(data)}")
    return np.frombuffer(data, np.uint64)


class _Use:
    """What one instance holds, in the order of last use: batches of digests, and each one's last batch."""

    def __init__(self) -> None:
        #: digest → its last batch's number, times 16, and the logarithm of the chunks that it stands for
        self.last = DigestTable()
        self.batches: deque[tuple[int, Chain]] = deque()
        #: digests in `batches`, those included that were used again since
        self.logged = 0
        #: chunks of 64 tokens that are held
        self.chunks = 0
        self.number = 0

    def touch(self, digests: Chain, stride: int) -> Chain:
        """Use these now, the first soonest to be forgotten; says which of them are new here."""
        if self.number >= _NUMBER_MAX:
            self._number_anew()
        places = self.last.claim(digests)
        before = self.last.claimed(places)
        if self._joins(digests, before):
            self.batches[-1] = self.number, np.concatenate([self.batches[-1][1], digests])
        else:
            self.number += 1
            self.batches.append((self.number, digests))
        self.last.write(places, (self.number << 4) + stride.bit_length())
        self.logged += len(digests)
        self.chunks += stride * len(digests)
        if self.logged > 2 * len(self.last) + 1024:
            self._compact()
        if not np.count_nonzero(before):
            return digests
        self.chunks -= int(_chunks(before).sum())
        new: Chain = digests[before == 0]
        return new

    def _joins(self, digests: Chain, before: Numbers) -> bool:
        """Whether they can lengthen the last batch: engines tell of a few at a time, and a batch costs 200 bytes."""
        if not self.batches or self.batches[-1][0] != self.number:
            return False
        return len(self.batches[-1][1]) + len(digests) <= _BATCH_MAX and not (before >> 4 == self.number).any()

    def drop(self, digests: Chain) -> Chain:
        """Hold these no more; says which of them were held."""
        places = self.last.find(digests)
        before = self.last.at(places)
        self.chunks -= int(_chunks(before).sum())
        held = before > 0
        self.last.write(places[held], 0)
        found: Chain = digests[held]
        return found

    def forget(self, chunks: int) -> Chain:
        """Drop the least recently used ones that stand for at least so many chunks."""
        gone: list[Chain] = []
        while chunks > 0 and self.batches:
            number, digests = self.batches.popleft()
            numbers = self.last.numbers(digests)
            held = numbers >> 4 == number
            digests, sizes = digests[held], _chunks(numbers[held])
            count = int(np.searchsorted(np.cumsum(sizes), chunks)) + 1
            self.logged -= len(held)
            if count < len(digests):
                self.batches.appendleft((number, digests[count:].copy()))
                self.logged += len(digests) - count
            gone.append(self.drop(digests[:count]))
            chunks -= int(sizes[:count].sum())
        return np.concatenate(gone) if gone else EMPTY

    def _compact(self) -> None:
        """Leave out what was used again since."""
        kept = [(number, digests[self.last.numbers(digests) >> 4 == number].copy()) for number, digests in self.batches]
        self.batches = deque(one for one in kept if len(one[1]))
        self.logged = sum(len(digests) for _, digests in self.batches)

    def _number_anew(self) -> None:
        self._compact()
        for new, (_, digests) in enumerate(list(self.batches), start=1):
            sizes = self.last.numbers(digests) & 15
            self.last.put(digests, (np.uint32(new << 4) + sizes).astype(np.uint32))
            self.batches[new - 1] = (new, digests)
        self.number = len(self.batches)


def _chunks(numbers: Numbers) -> npt.NDArray[np.int64]:
    """Chunks that entries of `_Use.last` stand for; 0 for what is not there."""
    found: npt.NDArray[np.int64] = _CHUNKS[numbers & 15]
    return found


class PrefixIndex:
    """Digests by instance, and instances by digest."""

    def __init__(self, digests_max: int, *, numbers_of: "PrefixIndex | None" = None) -> None:
        """At most so many digests an instance; instances are numbered by another index, or by this one."""
        self.digests_max = digests_max
        self._numbers_of = numbers_of
        #: digest → number of the set of those that hold it
        self._postings = DigestTable()
        #: sets as bits, by number; 0 is nobody
        self._sets: list[int] = [0]
        self._set_numbers: dict[int, int] = {0: 0}
        self._sets_max = _SETS_MAX
        self._uses: dict[str, _Use] = {}
        #: chunks that the instance's KV has room for
        self._limits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []

    def number(self, instance: str) -> int:
        """The bit that stands for an instance; kept until `clear(..., gone=True)`."""
        if self._numbers_of is not None:
            return self._numbers_of.number(instance)
        found = self._numbers.get(instance)
        if found is None:
            found = self._numbers[instance] = self._free.pop() if self._free else len(self._numbers)
        return found

    @property
    def numbers(self) -> int:
        """All numbers are below this."""
        if self._numbers_of is not None:
            return self._numbers_of.numbers
        return len(self._numbers) + len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory of what grows with digests."""
        uses = sum(use.last.nbytes + sum(digests.nbytes for _, digests in use.batches) for use in self._uses.values())
        return self._postings.nbytes + uses

    def limit(self, instance: str, kv_tokens: int | None) -> None:
        """The instance's KV capacity, tokens; None: unknown, then the index's own bound rules."""
        chunks = self.digests_max if kv_tokens is None else min(self.digests_max, kv_tokens // prefix.CHUNK_TOKENS)
        self._limits[instance] = max(1, chunks)

    def add(self, instance: str, chain: Chain, stride: int = 1) -> None:
        """A prompt with this chain was sent to the instance."""
        limit = self._limits.get(instance, self.digests_max)
        # The end first: the beginning of a prompt is forgotten last, so a known digest implies its known parents.
        self._use(instance, once(chain[: max(1, limit // stride)][::-1]), stride)
        use = self._uses[instance]
        if use.chunks > limit:
            self._take(use.forget(use.chunks - limit), 1 << self.number(instance))

    def store(self, instance: str, digests: Sequence[int]) -> None:
        """The engine says that it holds these; bounded as `add` is."""
        limit = self._limits.get(instance, self.digests_max)
        # A prompt's beginning is forgotten last here too.
        self._use(instance, once(np.array(digests, np.uint64)[::-1]), 1)
        use = self._uses[instance]
        if use.chunks > limit:
            # A sixteenth at once: it is for engines that say more than they can hold, not for every message.
            self._take(use.forget(use.chunks - limit + limit // 16), 1 << self.number(instance))

    def remove(self, instance: str, digests: Iterable[int]) -> None:
        """The engine says that it has dropped these."""
        use = self._uses.get(instance)
        if use is not None:
            self._take(use.drop(once(np.array(list(digests), np.uint64))), 1 << self.number(instance))

    def hold(self, instance: str, digests: Chain) -> None:
        """The instance holds these, each said once, until `drop`: whoever says so remembers which, and forgets none."""
        self._give(digests, 1 << self.number(instance))

    def drop(self, instance: str, digests: Chain) -> None:
        """What `hold` said is over."""
        self._take(digests, 1 << self.number(instance))

    @property
    def known(self) -> int:
        """Digests that somebody holds."""
        return len(self._postings)

    def anew(self) -> "PrefixIndex":
        """An empty one of the same kind."""
        return PrefixIndex(self.digests_max, numbers_of=self._numbers_of)

    def hits(self, chain: Chain, stride: int) -> list[tuple[int, int]]:
        """(tokens, bit set): who holds exactly so long a beginning of the prompt; shortest first."""
        get, sets = self._postings.get, self._sets
        at_ = chain.item
        low = next((at for at in _FIRST if at < len(chain) and get(at_(at))), None)
        if low is None:
            return []
        bits, found = sets[get(at_(low))], []
        while bits:
            # The furthest position that all of `bits` still hold; sets only shrink along a chain.
            high = len(chain) - 1
            while low < high:
                middle = (low + high + 1) // 2
                if sets[get(at_(middle))] & bits == bits:
                    low = middle
                else:
                    high = middle - 1
            rest = sets[get(at_(low + 1))] & bits if low + 1 < len(chain) else 0
            found.append(((low + 1) * stride * prefix.CHUNK_TOKENS, bits & ~rest))
            bits, low = rest, low + 1
        return found

    def hit_column(self, chain: Chain, stride: int) -> npt.NDArray[np.float64]:
        """Hit tokens by instance number."""
        return self.column(self.hits(chain, stride))

    def column(self, hits: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
        """`hits` by instance number."""
        column = np.zeros(self.numbers)
        for tokens, bits in hits:
            packed = np.frombuffer(bits.to_bytes((self.numbers + 7) // 8, "little"), np.uint8)
            column[np.unpackbits(packed, count=self.numbers, bitorder="little").view(np.bool_)] = tokens
        return column

    def hit_tokens(self, instance: str, chain: Chain, stride: int) -> int:
        """Tokens of the longest beginning that the instance holds."""
        bit = 1 << self.number(instance)
        return next((tokens for tokens, bits in self.hits(chain, stride) if bits & bit), 0)

    def clear(self, instance: str, *, gone: bool = False) -> None:
        """The instance began anew, or is gone."""
        use = self._uses.pop(instance, None)
        if use is not None:
            self._take(use.last.entries()[0], 1 << self.number(instance))
        if gone:
            self._limits.pop(instance, None)
            number = self._numbers.pop(instance, None)
            if number is not None:
                self._free.append(number)

    def __len__(self) -> int:
        return sum(len(use.last) for use in self._uses.values())

    def _use(self, instance: str, digests: Chain, stride: int) -> None:
        new = self._uses.setdefault(instance, _Use()).touch(digests, stride)
        if new.size:
            self._give(new, 1 << self.number(instance))

    def _give(self, digests: Chain, bit: int) -> None:
        places = self._postings.claim(digests)
        self._postings.write(places, self._changed(self._postings.claimed(places), bit, True))

    def _take(self, digests: Chain, bit: int) -> None:
        if not digests.size:
            return
        places = self._postings.find(digests)
        self._postings.write(places, self._changed(self._postings.at(places), bit, False))

    def _changed(self, numbers: Numbers, bit: int, holds: bool) -> Numbers:
        """Numbers of the same sets with one instance more, or less."""
        first = numbers.item(0)
        if np.count_nonzero(numbers == first) == len(numbers):
            distinct, which = [first], None
        else:
            found, which = np.unique(numbers, return_inverse=True)
            distinct = found.tolist()
        changed = [self._sets[n] | bit if holds else self._sets[n] & ~bit for n in distinct]
        if len(self._sets) > self._sets_max:
            self._fewer_sets()
        if which is None:
            return np.full(len(numbers), self._set_number(changed[0]), np.uint32)
        return np.array([self._set_number(bits) for bits in changed], np.uint32)[which]

    def _set_number(self, bits: int) -> int:
        found = self._set_numbers.get(bits)
        if found is None:
            found = self._set_numbers[bits] = len(self._sets)
            self._sets.append(bits)
        return found

    def _fewer_sets(self) -> None:
        """Keep the sets that some digest has."""
        used = np.unique(self._postings.entries()[1])
        by = np.zeros(len(self._sets), np.uint32)
        by[used] = np.arange(1, len(used) + 1)
        self._sets = [0, *(self._sets[n] for n in used.tolist())]
        self._set_numbers = {bits: n for n, bits in enumerate(self._sets)}
        self._postings.renumber(by)
        self._sets_max = max(_SETS_MAX, 2 * len(self._sets))


def once(digests: Chain) -> Chain:
    """Each digest at its first place: whoever says one twice must not count for two."""
    if len(set(digests.tolist())) == len(digests):
        return digests
    _, first = np.unique(digests, return_index=True)
    return digests[np.sort(first)]
