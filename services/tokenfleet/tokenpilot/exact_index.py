"""What engines say they hold, followed message by message, and whether it can be relied on. Pure.

Decides for which instances the prefix index is exact: those whose site agent's messages (`kv.changed`) came without a
gap since a snapshot of the present incarnation. Everybody else is approximate, known by what was sent there. A reader
that has lost its place asks for a snapshot. Every request's foreseen hit is compared with the cached tokens that the
engine reports: where they keep disagreeing (another salt, another tokenizer, lost events), trust falls, and with it the
weight of affinity.

Refuses to know scores and how digests are looked up for many instances at once: it writes into a `Content`, which the
prefix index is; `Digests` is the plain one.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from tokenfleet.effects import Effect, Note, Publish
from tokenfleet.prefix import CHUNK_TOKENS, DIGEST_BYTES
from tokenfleet_schemas.kv import KvChanged, KvRequested

#: a snapshot is asked for again after this; longer each time that nobody answers, up to the second
ASK_MS, ASK_MAX_MS = 1_000.0, 60_000.0
#: requests over which foreseen and reported hits are compared, the least for a verdict, and the mean error that is too
#: much, as a share of the larger of both
WINDOW, WINDOW_MIN, ERROR_MAX = 200, 50, 0.20
#: of an instance's earlier incarnations so many are known as such
_PAST = 8
_UINT64 = "Q"


class Content(Protocol):
    """Digests by instance."""

    def store(self, instance: str, digests: Sequence[int]) -> None:
        """The engine holds these too."""
        ...

    def remove(self, instance: str, digests: Sequence[int]) -> None:
        """The engine holds these no more."""
        ...

    def clear(self, instance: str) -> None:
        """The engine holds nothing that is known."""
        ...


class Digests:
    """The plain content: a bounded set per instance, the longest known forgotten first.

    62 to 152 bytes a digest, by how full the table is: at most 38 for each block of 16 tokens.
    """

    def __init__(self, digests_max: int = 1_000_000) -> None:
        self.digests_max = max(16, digests_max)
        self._known: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def count(self, instance: str) -> int:
        """Digests of one instance."""
        return len(self._known.get(instance, ()))

    def store(self, instance: str, digests: Sequence[int]) -> None:
        """See `Content`."""
        known = self._known.setdefault(instance, {})
        known.update(dict.fromkeys(digests))
        over = len(known) - self.digests_max
        if over > 0:
            # A sixteenth at once: taking single ones from a dict's front gets slower with each.
            for digest in list(islice(known, over + self.digests_max // 16)):
                del known[digest]

    def remove(self, instance: str, digests: Sequence[int]) -> None:
        """See `Content`."""
        known = self._known.get(instance)
        if known:
            for digest in digests:
                known.pop(digest, None)

    def clear(self, instance: str) -> None:
        """See `Content`."""
        self._known.pop(instance, None)

    def hit_tokens(self, instance: str, chain: Iterable[int], stride: int = 1) -> int:
        """Tokens of the longest beginning of a prompt that the instance holds."""
        known = self._known.get(instance)
        count = 0
        if known:
            for digest in chain:
                if digest not in known:
                    break
                count += 1
        return count * stride * CHUNK_TOKENS


class _Place(msgspec.Struct):
    """How far one instance's messages were followed."""

    #: of the last report of capacity, and of what is known of the content
    reported: str = ""
    incarnation: str = ""
    past: tuple[str, ...] = ()
    sequence: int = -1
    exact: bool = False
    #: next time to ask for a snapshot, and how long to wait after that; infinity: no need
    ask_ms: float = 0.0
    pause_ms: float = ASK_MS
    asked: int = 0


class _Trust:
    """Foreseen against reported cached tokens of the last requests of one instance."""

    __slots__ = ("_missed", "_over", "_seen", "_totals", "alarmed", "error", "value")

    def __init__(self) -> None:
        #: per request: foreseen and not found, found and not foreseen, the larger of both
        self._seen: deque[tuple[int, int, int]] = deque()
        self._over = self._missed = self._totals = 0
        #: mean error, and what a foreseen hit is worth
        self.error, self.value = 0.0, 1.0
        self.alarmed = False

    def compare(self, foreseen: int, reported: int, tolerance: int, *, exact: bool) -> None:
        """Fold one request. An approximate index misses much by its nature: only what it promises counts."""
        over = max(0, foreseen - reported - tolerance)
        missed = max(0, reported - foreseen - tolerance) if exact else 0
        self._seen.append((over, missed, max(foreseen, reported)))
        self._count(1, *self._seen[-1])
        if len(self._seen) > WINDOW:
            self._count(-1, *self._seen.popleft())
        if len(self._seen) >= WINDOW_MIN and self._totals:
            self.error = (self._over + self._missed) / self._totals
            over_share = self._over / self._totals
            self.value = 1.0 if over_share <= ERROR_MAX else 1.0 - over_share

    def _count(self, sign: int, over: int, missed: int, total: int) -> None:
        self._over += sign * over
        self._missed += sign * missed
        self._totals += sign * total


class ExactIndex:
    """See the module. `asks`: whether anybody hears requests for snapshots (a simulation may be without KV events)."""

    def __init__(self, site: str, *, replica: str, content: Content | None = None, asks: bool = False) -> None:
        self.site = site
        self.replica = replica
        self.asks = asks
        self.content: Content = Digests() if content is None else content
        self._places: dict[str, _Place] = {}
        self._trust: dict[str, _Trust] = {}
        #: what a foreseen hit is worth, 0 … 1, on instances where that is less than 1
        self.distrusted: dict[str, float] = {}

    # --- following ------------------------------------------------------------------------------------------

    def changed(self, event: KvChanged, now_ms: float) -> Iterator[Effect]:
        """Fold one message of a site agent. Whoever is not declared here is to be left out by the caller."""
        name = event.instance
        place = self._places.setdefault(name, _Place())
        if event.incarnation in place.past:
            return  # queued before its engine began anew
        if event.sequence <= place.sequence:
            return  # a repeat; a new agent begins above whatever the old one said
        follows = event.sequence == place.sequence + 1 and event.incarnation == place.incarnation
        place.sequence = event.sequence
        if event.snapshot:
            self._begin(place, event.incarnation)
            self.content.clear(name)
            if not place.exact:
                yield Note("kv_exact", {}, {"instance": name}, "info")
            place.exact, place.ask_ms, place.pause_ms, place.asked = True, float("inf"), ASK_MS, 0
        elif not place.exact:
            yield from self._ask(name, place, now_ms)
            return
        elif not follows:
            place.exact, place.ask_ms = False, now_ms
            self.content.clear(name)
            yield Note("kv_gap", {}, {"instance": name, "sequence": str(event.sequence)}, "warning")
            yield from self._ask(name, place, now_ms)
            return
        if event.cleared:
            self.content.clear(name)
        if event.stored:
            self.content.store(name, _numbers(event.stored))
        if event.removed:
            self.content.remove(name, _numbers(event.removed))

    def reported(self, instance: str, incarnation: str, model: str, now_ms: float) -> Iterator[Effect]:
        """A capacity report names the present incarnation: what is known of another one is of no use."""
        place = self._places.setdefault(instance, _Place(ask_ms=now_ms))
        place.reported = incarnation
        if place.incarnation != incarnation:
            if place.incarnation:
                self.content.clear(instance)
                place.ask_ms, place.pause_ms = now_ms, ASK_MS
            self._begin(place, incarnation)
            place.exact = False
        yield from self._ask(instance, place, now_ms, model)

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._places.pop(instance, None)
        self._trust.pop(instance, None)
        self.distrusted.pop(instance, None)
        self.content.clear(instance)

    def renew(self, now_ms: float) -> None:
        """The reader was deaf for a while: what it knows is kept, but nothing is sure until a snapshot comes."""
        for place in self._places.values():
            place.exact, place.ask_ms, place.pause_ms = False, now_ms, ASK_MS

    def is_exact(self, instance: str, incarnation: str = "") -> bool:
        """Whether the instance's content is known exactly (of this incarnation, where one is named)."""
        place = self._places.get(instance)
        return place is not None and place.exact and incarnation in ("", place.incarnation)

    def exact(self) -> list[str]:
        """All instances of which that holds."""
        return [name for name, place in self._places.items() if place.exact]

    @staticmethod
    def _begin(place: _Place, incarnation: str) -> None:
        if place.incarnation and place.incarnation != incarnation:
            place.past = (*place.past, place.incarnation)[-_PAST:]
        place.incarnation = incarnation

    def _ask(self, instance: str, place: _Place, now_ms: float, model: str = "") -> Iterator[Effect]:
        if not self.asks or place.exact or now_ms < place.ask_ms:
            return
        place.ask_ms = now_ms + place.pause_ms
        place.pause_ms = min(ASK_MAX_MS, 2 * place.pause_ms)
        place.asked += 1
        yield Publish(
            KvRequested(
                id=f"kv-requested:{self.replica}:{instance}:{int(now_ms)}:{place.asked}",
                time_unix_ms=int(now_ms),
                site=self.site,
                model=model,
                instance=instance,
                replica=self.replica,
                sequence=place.sequence,
            )
        )

    # --- trusting -------------------------------------------------------------------------------------------

    def compare(self, instance: str, foreseen: int, reported: int | None, stride: int = 1) -> Iterator[Effect]:
        """A request ended: the hit that was foreseen for it, and the cached tokens that the engine reports, if it does.

        One stride of difference is none: an engine's blocks and the chain's chunks end at different tokens.
        """
        if reported is None:
            return
        trust = self._trust.setdefault(instance, _Trust())
        trust.compare(foreseen, reported, stride * CHUNK_TOKENS, exact=self.is_exact(instance))
        if trust.value < 1.0:
            self.distrusted[instance] = trust.value
        else:
            self.distrusted.pop(instance, None)
        if trust.error > ERROR_MAX and not trust.alarmed:
            trust.alarmed = True
            yield Note("hash_mismatch", {"instance": instance}, {"mean_error": f"{trust.error:.2f}"}, "warning")
        elif trust.error <= ERROR_MAX and trust.alarmed:
            trust.alarmed = False
            yield Note("hash_match", {"instance": instance}, {}, "info")

    def trust(self, instance: str) -> float:
        """0 … 1: what a foreseen hit there is worth."""
        return self.distrusted.get(instance, 1.0)


def _numbers(digests: bytes) -> list[int]:
    return array(_UINT64, digests[: len(digests) // DIGEST_BYTES * DIGEST_BYTES]).tolist()
