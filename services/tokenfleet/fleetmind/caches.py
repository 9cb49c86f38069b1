"""Where a prompt's beginning is probably cached: sites, not instances, and in round figures.

Decides the expected prefix hit of a request at each site from what was sent there (own placements, as every replica
folds them) and from the summaries that site agents publish (`kv.summarised`). Both are samples of a digest chain: of
what was sent a few positions per octave are kept, so that a prompt of a million tokens costs a hundred entries, and a
summary holds the digests whose low bits are zero. It is advice, not state: a checkpoint leaves it out, and it fills
again by itself. Refuses to know instances; TokenPilot's index knows those.
"""

from base64 import b64decode
from binascii import Error as BinasciiError
from functools import lru_cache
from itertools import islice

from tokenfleet.prefix import CHUNK_TOKENS, DIGEST_BYTES
from tokenfleet_schemas.kv import KvSummarised
from tokenfleet_schemas.request import Ask

#: positions kept per octave of a chain: a hit is known within an eighth of its length
_PER_OCTAVE = 8
#: chunks of 64 tokens remembered of a site's pool where nobody knows its KV capacity
_CHUNKS_UNKNOWN = 32_768
#: entries of all sites' pools together: some hundred bytes each
_ENTRIES_MAX = 2_000_000
#: a summary older than this says nothing any more, ms: agents send one every few seconds
SUMMARY_MS = 30_000.0

#: site, model, version
PoolKey = tuple[str, str, str]


def sampled(chain: bytes, stride: int) -> list[tuple[int, bytes]]:
    """(position in chunks, digest) of the kept positions of a chain as it travels, shortest first.

    The n-th digest stands for `n * stride` chunks. A position is kept if it is a multiple of the largest power of two
    that leaves eight to its octave: chains of different strides keep the same ones where both have them.
    """
    kept = _kept(len(chain) // DIGEST_BYTES, stride)
    return [(chunks, chain[at : at + DIGEST_BYTES]) for chunks, at in kept]


@lru_cache(maxsize=4096)
def _kept(count: int, stride: int) -> tuple[tuple[int, int], ...]:
    """(position in chunks, offset in bytes) of what is kept of a chain of so many digests."""
    found: list[tuple[int, int]] = []
    number = 1
    while number <= count:
        chunks = number * stride
        step = max(1, (1 << (chunks.bit_length() - 1)) // _PER_OCTAVE // stride)
        if number % step:
            number += step - number % step
            continue
        found.append((chunks, (number - 1) * DIGEST_BYTES))
        number += step
    return tuple(found)


class _Sent:
    """What was sent to one pool: digest → chunks that it stands for, most recently used last."""

    __slots__ = ("chunks", "known")

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}
        self.chunks = 0

    def add(self, kept: list[tuple[int, bytes]], limit: int) -> None:
        # The end first: the beginning of a prompt is forgotten last, so a known digest implies its known parents.
        for place in range(len(kept) - 1, -1, -1):
            chunks, digest = kept[place]
            stands_for = chunks - (kept[place - 1][0] if place else 0)
            self.chunks += stands_for - self.known.pop(digest, 0)
            self.known[digest] = stands_for
        if self.chunks > limit:
            # A sixteenth at once: taking single ones from a dict's front gets slower with each.
            spare = self.chunks - limit + limit // 16
            for digest in list(islice(self.known, spare)):
                if spare <= 0:
                    break
                stands_for = self.known.pop(digest)
                spare, self.chunks = spare - stands_for, self.chunks - stands_for


class _Summary:
    """What one site said that it holds of one model."""

    __slots__ = ("digests", "heard_ms", "mask", "sequence")

    def __init__(self, message: KvSummarised, now_ms: float) -> None:
        data = message.digests
        self.digests = frozenset(data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))
        self.mask = (1 << message.sampled_bits) - 1
        self.sequence, self.heard_ms = message.sequence, now_ms


class Caches:
    """Expected prefix hits by site."""

    def __init__(self) -> None:
        self._sent: dict[PoolKey, _Sent] = {}
        self._summaries: dict[tuple[str, str], _Summary] = {}

    def sent(self, key: PoolKey, ask: Ask, kv_tokens: int | None) -> None:
        """A request was placed at a site; `kv_tokens` is its pool's capacity, None if unknown."""
        kept = _sampled_of(ask.prefix, ask.prefix_stride)
        if not kept:
            return
        if key not in self._sent and len(self._sent) * 64 > _ENTRIES_MAX:
            self._sent.clear()
        limit = _CHUNKS_UNKNOWN if kv_tokens is None else max(1, kv_tokens // CHUNK_TOKENS)
        self._sent.setdefault(key, _Sent()).add(kept, min(limit, _ENTRIES_MAX // 8))

    def summarised(self, message: KvSummarised, now_ms: float) -> None:
        """A site agent says what its instances hold; an older one than the last is not taken."""
        known = self._summaries.get((message.site, message.model))
        if known is None or message.sequence > known.sequence or now_ms - known.heard_ms > SUMMARY_MS:
            self._summaries[message.site, message.model] = _Summary(message, now_ms)

    def hits(self, ask: Ask, now_ms: float) -> dict[str, int]:
        """Site → prompt tokens that are probably cached there; sites without any are left out."""
        kept = _sampled_of(ask.prefix, ask.prefix_stride)
        if not kept:
            return {}
        found: dict[str, int] = {}
        for (site, model, version), sent in self._sent.items():
            if model == ask.model and version == ask.version:
                chunks = _longest(kept, sent.known)
                if chunks:
                    found[site] = min(ask.input_tokens, chunks * CHUNK_TOKENS)
        numbers: dict[int, list[tuple[int, bytes]]] = {}
        for (site, model), summary in self._summaries.items():
            if model != ask.model or now_ms - summary.heard_ms > SUMMARY_MS:
                continue
            if summary.mask not in numbers:
                numbers[summary.mask] = masked(_chain(ask.prefix), ask.prefix_stride, summary.mask)
            chunks = _longest(numbers[summary.mask], summary.digests)
            if chunks * CHUNK_TOKENS > found.get(site, 0):
                found[site] = min(ask.input_tokens, chunks * CHUNK_TOKENS)
        return found

    def forget(self, site: str, model: str, version: str) -> None:
        """Nothing of what was sent there is left: its only instance began anew."""
        self._sent.pop((site, model, version), None)


def masked(chain: bytes, stride: int, mask: int) -> list[tuple[int, bytes]]:
    """(position in chunks, digest) of those digests of a chain that a summary with this mask would hold."""
    return [
        ((at // DIGEST_BYTES + 1) * stride, chain[at : at + DIGEST_BYTES])
        for at in range(0, len(chain) - DIGEST_BYTES + 1, DIGEST_BYTES)
        if not int.from_bytes(chain[at : at + DIGEST_BYTES], "little") & mask
    ]


def _longest(kept: list[tuple[int, bytes]], known: "dict[bytes, int] | frozenset[bytes]") -> int:
    """Chunks of the furthest kept position that is known; what is known is a beginning of the chain."""
    low, high = 0, len(kept)
    while low < high:
        middle = (low + high) // 2
        if kept[middle][1] in known:
            low = middle + 1
        else:
            high = middle
    return kept[low - 1][0] if low else 0


@lru_cache(maxsize=2048)
def _sampled_of(prefix: str, stride: int) -> list[tuple[int, bytes]]:
    """`sampled` of a chain as it travels: asked for at a request's placement and again when it was assigned."""
    return sampled(_chain(prefix), stride)


def _chain(prefix: str) -> bytes:
    """The packed chain of a request; one that cannot be read has no prefix."""
    try:
        chain = b64decode(prefix, validate=True)
    except (BinasciiError, ValueError):
        return b""
    return chain[: len(chain) - len(chain) % DIGEST_BYTES]
