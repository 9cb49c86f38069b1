"""A map from 8-byte digests to small numbers in 20 to 40 bytes an entry, for many digests at a time.

Decides nothing. Open addressing with linear probing in two arrays (Knuth, The Art of Computer Programming, vol. 3,
6.4): whole chains are looked up, put and taken with a few vector operations, a single digest with a few reads. A dict
takes 80 to 150 bytes for the same. Refuses to know what the numbers mean; 0 is "not there".
"""

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]
Places = npt.NDArray[np.intp]

#: an odd constant that spreads bits over the upper ones (Fibonacci hashing, Knuth): digests may be anybody's numbers
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
#: digest that means an empty place; a real digest of this value is taken for its neighbour's
_EMPTY = 0
_LEAST_BITS = 6
#: entries and places left by entries, over all places: at most this, else the table grows or is cleaned
_FULL = 0.6
#: entries over places below which the table shrinks
_SPARSE = 0.1
_SPREAD_EACH = np.uint64(_SPREAD)
#: so many that did not find their first place free are looked for one by one; more, all at once
_FEW = 192


class DigestTable:
    """See the module."""

    def __init__(self) -> None:
        self._count = 0
        self._make(_LEAST_BITS)

    def _make(self, bits: int) -> None:
        self._bits = bits
        self._keys: Digests = np.zeros(1 << bits, np.uint64)
        self._numbers: Numbers = np.zeros(1 << bits, np.uint32)
        #: places that are not empty: entries, and what entries left
        self._used = 0
        self._shift = np.uint64(64 - bits)
        # single reads through these cost a third of what they cost through the arrays
        self._key_at, self._number_at = self._keys.data, self._numbers.data

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the two arrays."""
        return int(self._keys.nbytes + self._numbers.nbytes)

    def get(self, digest: int) -> int:
        """The number of one digest; 0: not there."""
        key, mask = digest or 1, (1 << self._bits) - 1
        place = ((key * _SPREAD) & _MASK) >> (64 - self._bits)
        while (found := self._key_at[place]) != key:
            if found == _EMPTY:
                return 0
            place = (place + 1) & mask
        return self._number_at[place]

    def numbers(self, digests: Digests) -> Numbers:
        """The number of each; 0: not there."""
        return self.at(self.find(digests))

    def at(self, places: Places) -> Numbers:
        """The numbers at these places, as `find` and `claim` say them."""
        found = self._numbers[places]
        found[places < 0] = 0
        return found

    def claimed(self, places: Places) -> Numbers:
        """`at` for places that `claim` said: none of them is missing."""
        return self._numbers[places]

    def put(self, digests: Digests, numbers: Numbers | int) -> None:
        """Set the numbers (not 0) of digests of which none occurs twice."""
        self.write(self.claim(digests), numbers)

    def write(self, places: Places, numbers: Numbers | int) -> None:
        """Set the numbers at places that `find` or `claim` said, if nothing was put since; 0 forgets the digest."""
        self._count -= int(np.count_nonzero(self._numbers[places]))
        self._numbers[places] = numbers
        if isinstance(numbers, int):
            self._count += len(places) if numbers else 0
        else:
            self._count += int(np.count_nonzero(numbers))
        if self._bits > _LEAST_BITS and self._count < _SPARSE * len(self._keys):
            self._renew(0)

    def take(self, digests: Digests) -> None:
        """Forget these; their places are cleaned when the table is made anew."""
        places = self.find(digests)
        self.write(places[places >= 0], 0)

    def entries(self) -> tuple[Digests, Numbers]:
        """All digests and their numbers, in no order."""
        there = np.flatnonzero(self._numbers)
        return self._keys[there], self._numbers[there]

    def renumber(self, by: Numbers) -> None:
        """Put `by[number]` in the place of each number; `by[0]` is 0."""
        self._numbers = by[self._numbers]
        self._number_at = self._numbers.data

    def find(self, digests: Digests) -> Places:
        """Place of each; -1: not there."""
        keys = _keys(digests)
        places = self._first(keys)
        there = self._keys[places]
        missed = there != keys
        if not np.count_nonzero(missed):
            return places
        left = (missed & (there != _EMPTY)).nonzero()[0]
        at = places[left]
        places[missed] = -1
        if len(left) > _FEW:
            mask = len(self._keys) - 1
            while left.size:
                at = (at + 1) & mask
                there, wanted = self._keys[at], keys[left]
                hit = there == wanted
                places[left[hit]] = at[hit]
                going = ~hit & (there != _EMPTY)
                left, at = left[going], at[going]
            return places
        for n, key, place in zip(left.tolist(), keys[left].tolist(), at.tolist(), strict=True):
            found, there_now = self._seek(key, place)
            if there_now:
                places[n] = found
        return places

    def claim(self, digests: Digests) -> Places:
        """Place of each, made where it is not there; none may occur twice."""
        keys = _keys(digests)
        if self._used + len(keys) > _FULL * len(self._keys):
            self._renew(len(keys))
        places = self._first(keys)
        there = self._keys[places]
        empty = there == _EMPTY
        made = int(np.count_nonzero(empty))
        if made:
            # Of several that want one empty place the last gets it; the others look on.
            self._keys[places[empty]] = keys[empty]
            there = self._keys[places]
        left = (there != keys).nonzero()[0]
        self._used += made
        if not left.size:
            return places
        self._used -= int(np.count_nonzero(empty[left]))
        if len(left) > _FEW:
            self._claim_on(keys, places, left)
            return places
        for n, key, place in zip(left.tolist(), keys[left].tolist(), places[left].tolist(), strict=True):
            found, there_now = self._seek(key, place)
            if not there_now:
                self._key_at[found] = key
                self._used += 1
            places[n] = found
        return places

    def _seek(self, key: int, place: int) -> tuple[int, bool]:
        """Of one that is not at this place: where it is, or the empty place where it would be."""
        mask, key_at = (1 << self._bits) - 1, self._key_at
        while True:
            place = (place + 1) & mask
            found = key_at[place]
            if found == key:
                return place, True
            if found == _EMPTY:
                return place, False

    def _claim_on(self, keys: Digests, places: Places, left: Places) -> None:
        """Of many that did not get their first place, the next that is theirs."""
        mask = len(self._keys) - 1
        places[left] = (places[left] + 1) & mask
        left = self._found_meanwhile(keys, places, left)
        while left.size:
            at = places[left]
            empty = self._keys[at] == _EMPTY
            self._keys[at[empty]] = keys[left[empty]]
            lost = self._keys[at] != keys[left]
            self._used += len(left) - int(np.count_nonzero(lost))
            left = left[lost]
            places[left] = (places[left] + 1) & mask
            left = self._found_meanwhile(keys, places, left)

    def _found_meanwhile(self, keys: Digests, places: Places, left: Places) -> Places:
        """Of those that look on, the ones that have not come to their own place yet."""
        mask = len(self._keys) - 1
        while left.size:
            key = self._keys[places[left]]
            stop = (key == keys[left]) | (key == _EMPTY)
            if stop.all():
                break
            going = left[~stop]
            places[going] = (places[going] + 1) & mask
        lost: Places = left[self._keys[places[left]] != keys[left]]
        return lost

    def _first(self, keys: Digests) -> Places:
        """First place of each key."""
        found: Places = ((keys * _SPREAD_EACH) >> self._shift).view(np.int64)  # far below 2**63
        return found

    def _renew(self, more: int) -> None:
        keys, numbers = self.entries()
        bits = _LEAST_BITS
        while self._count + more > 0.5 * (1 << bits):
            bits += 1
        self._make(bits)
        self._numbers[self.claim(keys)] = numbers


def _keys(digests: Digests) -> Digests:
    if np.count_nonzero(digests) == len(digests):
        return digests
    return np.where(digests == _EMPTY, np.uint64(1), digests)
