"""What a site's agent says of its engines' caches in a run: `kv.changed`, from the engine models' journals.

Decides which digests of the fleet's chain an instance holds: those of which the engine has every block. A simulated
block is named by its place in a trace, so no token is chunked anew; all else is as the live agent does it (ADR 0013):
numbered messages, a snapshot for whoever lost his place, nothing in both fields of one message. Refuses to know how
late that is and who hears it.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenfleet.effects import Effect
from tokenfleet.prefix import CHUNK_TOKENS, DIGEST_BYTES
from tokenfleet.simulator.arrivals import BLOCK_BITS
from tokenfleet.siteagent import kv_summary
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.kv import KvChanged, KvRequested, KvSummarised

#: an entry of `Engine.journal`
Entry = tuple[Any, Any]


class Teller:
    """Follows one instance's journal and says what came and went."""

    def __init__(
        self, site: str, instance: str, model: str, block_tokens: int, say: Callable[[KvChanged], None]
    ) -> None:
        self.site, self.instance, self.model = site, instance, model
        #: blocks of a digest, or digests of a block
        self._blocks = max(1, CHUNK_TOKENS // block_tokens)
        self._digests = max(1, block_tokens // CHUNK_TOKENS)
        self._say = say
        self._sequence = -1
        self._incarnation = ""
        #: digest → how many of its blocks the engine has
        self._held: dict[int, int] = {}

    def begin(self, incarnation: str, now_ms: float) -> None:
        """The engine began, with an empty cache."""
        self._incarnation, self._held = incarnation, {}
        self.snapshot(now_ms)

    def snapshot(self, now_ms: float) -> None:
        """Say all that is held."""
        self._tell(now_ms, stored=self.content(), snapshot=True)

    def content(self) -> list[int]:
        """Digests that the engine holds whole, the longest held first."""
        return [digest for digest, blocks in self._held.items() if blocks == self._blocks]

    def follow(self, journal: Iterable[Entry], now_ms: float) -> None:
        """Say what came and went in these entries; what came and went again, or the other way about, is not said."""
        stored: dict[int, None] = {}
        removed: dict[int, None] = {}
        cleared = False
        held, whole = self._held, self._blocks
        for sequence, what in journal:
            if sequence is None and what is None:
                held.clear()
                stored, removed, cleared = {}, {}, True
            elif sequence is None:
                for digest in self._of(what):
                    blocks = held.get(digest, 0)
                    if blocks > 1:
                        held[digest] = blocks - 1
                    else:
                        held.pop(digest, None)
                    if blocks == whole and digest in stored:
                        del stored[digest]
                    elif blocks == whole:
                        removed[digest] = None
            else:
                for digest in self._of(sequence.hashes[what]):
                    blocks = held[digest] = held.get(digest, 0) + 1
                    if blocks == whole and digest in removed:
                        del removed[digest]
                    elif blocks == whole:
                        stored[digest] = None
        if stored or removed or cleared:
            self._tell(now_ms, stored=list(stored), removed=list(removed), cleared=cleared)

    def _of(self, block: int) -> Sequence[int]:
        """The digests that a block is a part of, or has as parts: both number a tenant's blocks from its salt on."""
        top = block >> BLOCK_BITS << BLOCK_BITS
        first = top + (block - top) // self._blocks * self._digests
        return range(first, first + self._digests)

    def _tell(
        self,
        now_ms: float,
        *,
        stored: Sequence[int],
        removed: Sequence[int] = (),
        cleared: bool = False,
        snapshot: bool = False,
    ) -> None:
        self._sequence += 1
        self._say(
            KvChanged(
                id=f"{self.instance}:kv:{self._sequence}",
                time_unix_ms=int(now_ms),
                site=self.site,
                model=self.model,
                instance=self.instance,
                incarnation=self._incarnation,
                sequence=self._sequence,
                stored=array("Q", stored).tobytes(),
                removed=array("Q", removed).tobytes(),
                cleared=cleared,
                snapshot=snapshot,
            )
        )


def summaries(site: str, tellers: Iterable[Teller], sequence: int, now_ms: float) -> Iterable[KvSummarised]:
    """What a site holds of each model, sampled as the live agent does it; no word on a model of which it has none."""
    held = {one.instance: (one.model, _packed(one.content())) for one in tellers}
    for model, contents in kv_summary.by_model(held).items():
        digests, bits = kv_summary.sample(contents)
        if digests:
            yield KvSummarised(
                id=f"kv:{site}:{model}:{sequence}",
                time_unix_ms=int(now_ms),
                site=site,
                model=model,
                sequence=sequence,
                digests=digests,
                hits=(),
                sampled_bits=bits,
            )


def _packed(digests: Iterable[int]) -> list[bytes]:
    return [digest.to_bytes(DIGEST_BYTES, "little") for digest in digests]


class Answering:
    """A site agent's ear: answers who asks for a snapshot. A core, as far as the bus knows it."""

    def __init__(self, site: str, tellers: dict[str, Teller]) -> None:
        self.site, self.tellers = site, tellers

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """A reader has lost its place."""
        if isinstance(message, KvRequested) and message.site == self.site:
            for name, teller in self.tellers.items():
                if message.instance in ("", name):
                    teller.snapshot(now_ms)
        return ()

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Nothing is ever due."""
        return ()
