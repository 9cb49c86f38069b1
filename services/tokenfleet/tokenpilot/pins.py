"""Which prompts' beginnings the sequences of an instance hold in its KV, and how much they hold in common.

Decides two sums: what a newcomer shares with those that are booked there, and by how much the bookings' KV, each for
itself, exceeds what they occupy together. An engine with a prefix cache keeps a block once, however many sequences
refer to it (vLLM's block pool, SGLang's radix tree): of a conversation whose next turn comes while the last one is
still being answered, only what is new needs room. Refuses to know what is cached without being used: that may be
thrown out at any time, and a newcomer that hits it occupies it anew. It is advice, not state: a checkpoint leaves it
out, and what was booked before shares nothing then.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from tokenfleet import prefix
from tokenfleet.tokenpilot.digest_table import DigestTable, Numbers
from tokenfleet.tokenpilot.prefix_index import Chain, PrefixIndex, once

#: an entry of a table: how many hold a digest, times this, and the logarithm of the chunks that it stands for, plus one
_COUNT, _SIZE = 16, 15


def _chunks(entries: Numbers) -> int:
    """Chunks that these stand for."""
    sizes = (entries & _SIZE).astype(np.int64)
    return int(((1 << sizes) >> 1).sum())


class _Held(msgspec.Struct):
    """What the bookings of one instance hold."""

    table: DigestTable
    #: chunks of all of them, each for itself, and of what they hold together
    chunks: int = 0
    distinct: int = 0


class Pins:
    """See the module. Instances have the numbers that `index` gives them."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = PrefixIndex(1 << 62, numbers_of=index)
        self._held: dict[str, _Held] = {}
        #: booking → its instance, digests and stride
        self._of: dict[str, tuple[str, Chain, int]] = {}

    def pin(self, booking_id: str, instance: str, chain: Chain, stride: int) -> None:
        """A booking's sequence will hold this prompt; once per booking."""
        if not chain.size or booking_id in self._of:
            return
        chain = once(chain)
        self._of[booking_id] = instance, chain, stride
        held = self._held.get(instance)
        if held is None:
            held = self._held[instance] = _Held(DigestTable())
        places = held.table.claim(chain)
        before = held.table.claimed(places)
        size = stride.bit_length()
        held.chunks += len(chain) * stride
        if not np.count_nonzero(before):
            held.table.write(places, _COUNT + size)
            held.distinct += len(chain) * stride
            self._index.hold(instance, chain)
            return
        # Prompts of one beginning may have digests at different distances: a digest stands for the longest of them, so
        # that too little is taken for shared rather than too much.
        after = np.where(before & _SIZE < size, (before & ~np.uint32(_SIZE)) + np.uint32(size), before)
        held.table.write(places, after + np.uint32(_COUNT))
        held.distinct += _chunks(after) - _chunks(before)
        fresh = chain[before == 0]
        if fresh.size:
            self._index.hold(instance, fresh)

    def unpin(self, booking_id: str) -> None:
        """The booking is over; nothing happens where it held nothing."""
        found = self._of.pop(booking_id, None)
        if found is None:
            return
        instance, chain, stride = found
        held = self._held[instance]
        places = held.table.find(chain)
        left = held.table.claimed(places) - np.uint32(_COUNT)
        last = left < _COUNT
        over = int(np.count_nonzero(last))
        held.chunks -= len(chain) * stride
        if over == len(chain):
            held.distinct -= _chunks(left)
            held.table.write(places, 0)
            self._index.drop(instance, chain)
        else:
            if over:
                held.distinct -= _chunks(left[last])
                left[last] = 0
                self._index.drop(instance, chain[last])
            held.table.write(places, left)
        if not held.chunks:
            del self._held[instance]

    def shared_tokens(self, instance: str) -> int:
        """By how much the bookings' prompts exceed what they occupy together, tokens."""
        held = self._held.get(instance)
        return 0 if held is None else max(0, held.chunks - held.distinct) * prefix.CHUNK_TOKENS

    def column(self, chain: Chain, stride: int) -> npt.NDArray[np.float64] | None:
        """Tokens of the prompt's beginning that bookings hold, by instance number; None: nobody holds any."""
        hits = self._index.hits(chain, stride) if self._held else ()
        return self._index.column(hits) if hits else None

    def bookings(self) -> Iterable[str]:
        """Those that hold something."""
        return self._of

    def clear(self) -> None:
        """Forget all."""
        self._index, self._held, self._of = self._index.anew(), {}, {}

    def __len__(self) -> int:
        return len(self._of)
