"""What an engine's KV events say of its cache, told as digests of the fleet's own prefix chain. Pure.

Decides which digests (64 tokens each, `tokenfleet.prefix`) an instance holds, from blocks of any size that engines name
by hashes of their own: the blocks' token ids are chunked anew, under the key of the tenant whose salt the first block
carries. Copies are counted here (an engine may store one block several times, and removes it once per copy), so a
digest is told once when it comes and once when it goes. Token ids never leave this module.

Refuses to know sockets, instances and the bus. What cannot be told exactly is left out and counted, never guessed: a
digest too few costs a cache hit, one too many a wrong choice.

Sources: vLLM 0.32 `vllm/distributed/kv_events.py` (`[ts, events, dp_rank]`, maps with `type`, hashes the low 64 bits
unsigned or 32 bytes) and `vllm/v1/core/kv_cache_utils.py` (extra keys: adapter, multimodal items, and the salt on block
0); SGLang 0.5.23 `srt/disaggregation/kv_events.py` (signed hashes, no extra keys); older vLLM: events as arrays.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenfleet import prefix
from tokenfleet.fleet import Fleet

_MASK = 2**64 - 1
_UINT32 = "I" if array("I").itemsize == 4 else "L"
#: kinds of KV cache in which a prefix hit needs every block from the start
_WHOLE_PREFIX = (None, "", "full_attention", "mla_attention")
#: where a block must lie to be a hit
_ON_GPU = (None, "", "GPU")

Hash = int | bytes


class KvEventError(ValueError):
    """Bytes that are no batch of KV events."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored", tag_field="type"):
    """Blocks, in order, that the engine now holds; token ids of all of them in one list."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    #: per block what its hash covers besides tokens; UNSET: the engine does not say
    extra_keys: list[list[Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", tag_field="type"):
    """One copy of each of these blocks is gone."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    """Nothing is held any more."""


class _StoredRow(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | msgspec.UnsetType | None = msgspec.UNSET


class _RemovedRow(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None


class _ClearedRow(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_rows = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)


class Batch(msgspec.Struct, frozen=True):
    """One message of a publisher."""

    #: the engine's clock, seconds since the epoch
    unix_s: float
    events: list[KvEvent]
    #: events of kinds or shapes that nobody here knows
    unknown: int = 0


def decode(payload: bytes) -> Batch:
    """One ZMQ payload of vLLM or SGLang. Raises `KvEventError`; an unknown event in a batch is counted, not fatal."""
    try:
        batch = _batches.decode(payload)
    except msgspec.DecodeError as error:
        raise KvEventError(f"no batch of KV events: {error}") from None
    events: list[KvEvent] = []
    unknown = 0
    for raw in batch.events:
        try:
            events.append(_decode_event(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            unknown += 1
    return Batch(batch.ts, events, unknown)


def _decode_event(raw: msgspec.Raw) -> KvEvent:
    first = memoryview(raw)[0]
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):  # msgpack: arrays
        row = _rows.decode(raw)
        if isinstance(row, _StoredRow):
            return BlockStored(**{name: getattr(row, name) for name in row.__struct_fields__})
        return BlockRemoved(row.block_hashes, row.medium) if isinstance(row, _RemovedRow) else AllBlocksCleared()
    event: KvEvent = _maps.decode(raw)
    return event


def number(name: Hash) -> int:
    """One form for a block's hash: signed and unsigned 64 bits, or the last 8 of more bytes, mean the same."""
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name & _MASK


class Source(msgspec.Struct, frozen=True):
    """Where one publisher of an engine is heard."""

    endpoint: str
    #: empty: nothing can be asked for again
    replay_endpoint: str
    topic: str


class _Source(msgspec.Struct):
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"


def sources(page: bytes, host: str) -> tuple[Source, ...]:
    """The publishers that vLLM's `/kv_event_sources` names, one per rank; raises `KvEventError`.

    An engine that binds all its interfaces does not say under which name it is reached: that is `host`.
    """
    try:
        found = msgspec.json.decode(page, type=dict[str, _Source])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KvEventError(f"/kv_event_sources: {error}") from None
    return tuple(
        Source(_reachable(one.endpoint, host), _reachable(one.replay_endpoint or "", host), one.topic)
        for _, one in sorted(found.items())
        if one.endpoint and one.enable_kv_cache_events and one.publisher == "zmq"
    )


def _reachable(endpoint: str, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    for anywhere in ("*", "0.0.0.0", "[::]"):
        if endpoint.startswith(f"tcp://{anywhere}:"):
            return f"tcp://{name}:{endpoint.rpartition(':')[2]}"
    return endpoint


def replayed_frames(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(sequence, payload) of one message of a replay, with or without its delimiter and topic; None at its end.

    Raises `KvEventError` for what is neither.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise KvEventError(f"no replayed message: {len(frames)} frames")
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    return None if sequence < 0 else (sequence, frames[-1])


class Keys:
    """Which digest key belongs to a block's salt: those of the fleet's tenants, nobody else's."""

    def __init__(self, fleet: Fleet, secret: str) -> None:
        """Raises `prefix.PrefixError` without a secret."""
        self._secret = secret
        self._who: dict[str, tuple[str, bool]] = {}
        for tenant, declared in fleet.tenants.items():
            share = declared.share_prefix
            self._who[prefix.cache_salt(secret, tenant, share)] = (tenant, share)

    def of(self, stored: BlockStored) -> tuple[bytes, str]:
        """(key, "") for blocks that begin a prompt, or (empty, why there is none)."""
        if stored.lora_id is not None and not stored.lora_name:
            return b"", "adapter_unnamed"
        said: list[Any] | None = None
        if isinstance(stored.extra_keys, msgspec.UnsetType):
            # An engine that names no salts: only where there is a single one is it known which.
            if len(self._who) != 1:
                return b"", "salt_unsaid"
            salt = next(iter(self._who))
        else:
            said = stored.extra_keys[0] if stored.extra_keys else None
            found = [part for part in said or () if part != stored.lora_name]
            if not found:
                return b"", "unsalted"
            if len(found) > 1:
                return b"", "multimodal"
            salt = found[0] if isinstance(found[0], str) else ""
        who = self._who.get(salt)
        if who is None:
            return b"", "salt_unknown"
        return prefix.tenant_key(self._secret, *who, stored.lora_name or ""), ""


class Changes(msgspec.Struct, frozen=True):
    """What came and what went since the last time; both packed digests, none in both."""

    stored: bytes
    removed: bytes
    cleared: bool


class Content:
    """The digests that an instance holds, over all its publishers, and what of it has not been told yet."""

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._untold: dict[bytes, bool] = {}
        self._cleared = False

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._held)

    @property
    def changed(self) -> int:
        """How many digests there are to tell; a clearing counts as one."""
        return len(self._untold) + self._cleared

    def add(self, digest: bytes) -> None:
        """One more block gives this digest."""
        copies = self._held.get(digest, 0)
        self._held[digest] = copies + 1
        if not copies and self._untold.pop(digest, None) is None:
            self._untold[digest] = True

    def drop(self, digest: bytes) -> None:
        """One block less gives it."""
        copies = self._held[digest] - 1
        if copies:
            self._held[digest] = copies
            return
        del self._held[digest]
        if self._untold.pop(digest, None) is None:
            self._untold[digest] = False

    def clear(self) -> None:
        """Nothing is held, and nothing of before need be told."""
        self._held, self._untold, self._cleared = {}, {}, True

    def take(self) -> Changes:
        """What has not been told, which is told by this."""
        stored = b"".join(digest for digest, came in self._untold.items() if came)
        removed = b"".join(digest for digest, came in self._untold.items() if not came)
        changes = Changes(stored, removed, self._cleared)
        self._untold, self._cleared = {}, False
        return changes

    def snapshot(self) -> bytes:
        """Everything held, packed; tells what has not been told."""
        self._untold, self._cleared = {}, False
        return b"".join(self._held)


class _Block:
    """One block of the engine's, under its hash."""

    __slots__ = ("children", "copies", "digests", "key", "kids", "live", "name", "parent", "rest", "tail")

    def __init__(self, name: int, parent: "_Block | None", key: bytes) -> None:
        self.name = name
        self.parent = parent
        self.key = key
        self.copies = 0
        #: blocks that follow it and are held
        self.kids = 0
        #: every block since the beginning of the chunk that it begins in is held
        self.live = False
        #: last digest up to its end, tokens since then (4 bytes each), and digests that end in it
        self.tail = prefix.ROOT
        self.rest = b""
        self.digests = b""
        #: those that continue the chunk it ends in
        self.children: list[_Block] | None = None


class Blocks:
    """The blocks of one publisher, folded into a `Content`; at most `blocks_max`, the oldest leaves forgotten first."""

    def __init__(self, content: Content, keys: Keys, *, blocks_max: int = 131_072, alone: bool = True) -> None:
        self.keys = keys
        self.blocks_max = max(16, blocks_max)
        self._content = content
        #: no other publisher of the instance tells of the same content
        self._alone = alone
        self._blocks: dict[int, _Block] = {}
        self._group: int | None = None
        self.block_tokens = 0
        #: blocks that were left out, by why; and events of unknown shape
        self.skipped: Counter[str] = Counter()
        self.folded = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def fold(self, batch: Batch) -> None:
        """Take one batch in."""
        if batch.unknown:
            self.skipped["event_unknown"] += batch.unknown
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.clear()

    def clear(self) -> None:
        """The engine holds nothing, or nothing is known of what it holds."""
        if self._alone:
            self._content.clear()
        else:
            for block in self._blocks.values():
                for digest in _live_digests(block):
                    self._content.drop(digest)
        self._blocks = {}
        self._group = None

    # --- storing --------------------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        count, size = len(event.block_hashes), event.block_size
        reason = self._unfit(event, count, size)
        if reason:
            self.skipped[reason] += count
            return
        if size != self.block_tokens:
            # Another block size is another cache, whether or not anybody said so.
            if self.block_tokens:
                self.skipped["block_size_changed"] += len(self._blocks)
                self.clear()
            self.block_tokens = size
        if event.kv_cache_spec_kind is not None and self._group is None:
            self._group = event.group_idx
        parent: _Block | None = None
        if event.parent_block_hash is None:
            key, reason = self.keys.of(event)
        else:
            parent = self._blocks.get(number(event.parent_block_hash))
            key, reason = (parent.key, "") if parent is not None else (b"", "parent_unknown")
        if reason:
            self.skipped[reason] += count
            return
        tail, rest = (parent.tail, parent.rest) if parent is not None else (prefix.ROOT, b"")
        try:
            tokens = array(_UINT32, rest)
            tokens.extend(event.token_ids)
            chain = prefix.extend(tail, tokens, key)
        except (OverflowError, TypeError, prefix.PrefixError):
            self.skipped["tokens_unusable"] += count
            return
        data = tokens.tobytes()
        at, told = len(rest) // 4, 0
        for index, name in enumerate(event.block_hashes):
            at += size
            ends = at // prefix.CHUNK_TOKENS
            digests = chain[told * 8 : ends * 8]
            block = self._put(number(name), parent, key, digests)
            if block.copies == 1:
                block.tail = chain[ends * 8 - 8 : ends * 8] if ends else tail
                block.rest = data[ends * 256 : at * 4]
            told, parent = ends, block
            if self._other_content(event, index + 1):
                self.skipped["multimodal"] += count - index - 1
                break
        self.folded += count
        if len(self._blocks) > self.blocks_max:
            self._forget(parent)

    def _unfit(self, event: BlockStored, count: int, size: int) -> str:
        """Why an event's blocks cannot be told; empty: they can."""
        if event.medium not in _ON_GPU:
            return "not_on_gpu"
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX:
            return "not_whole_prefix"
        if self._group is not None and event.group_idx is not None and event.group_idx != self._group:
            return "other_group"
        if size < 1 or len(event.token_ids) != count * size:
            return "size_mismatch"
        if event.parent_block_hash is not None and self._other_content(event, 0):
            return "multimodal"
        return ""

    @staticmethod
    def _other_content(event: BlockStored, index: int) -> bool:
        """Whether a block that does not begin a prompt holds more than its tokens say (images, embeddings)."""
        extra = event.extra_keys
        if isinstance(extra, msgspec.UnsetType) or not extra or index >= len(extra):
            return False
        said = extra[index]
        return bool(said) and any(part != event.lora_name for part in said or ())

    def _put(self, name: int, parent: _Block | None, key: bytes, digests: bytes) -> _Block:
        spans = parent is not None and bool(parent.rest)
        live = parent.live if spans and parent is not None else True
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(name, parent, key)
            block.digests = digests
            block.live = live
            self._attach(block, parent)
            for digest in _live_digests(block):
                self._content.add(digest)
        elif block.parent is not parent or live != block.live:
            # Its predecessor went and came back: the chunk between them is whole again.
            if not block.live and live:
                block.live = True
                if block.digests:
                    self._content.add(block.digests[:8])
            if block.parent is not parent:
                block.parent = parent
                self._attach(block, parent)
        block.copies += 1
        return block

    @staticmethod
    def _attach(block: _Block, parent: _Block | None) -> None:
        if parent is not None:
            parent.kids += 1
            if parent.rest:
                if parent.children is None:
                    parent.children = []
                parent.children.append(block)

    # --- removing -------------------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in _ON_GPU:
            return
        if self._group is not None and event.group_idx is not None and event.group_idx != self._group:
            return
        for name in event.block_hashes:
            block = self._blocks.get(number(name))
            if block is None:
                self.skipped["removed_unknown"] += 1
                continue
            block.copies -= 1
            if not block.copies:
                self._drop(block)
        self.folded += len(event.block_hashes)

    def _drop(self, block: _Block) -> None:
        del self._blocks[block.name]
        for digest in _live_digests(block):
            self._content.drop(digest)
        parent = block.parent
        if parent is not None:
            parent.kids -= 1
            if parent.children is not None:
                parent.children.remove(block)
        broken = block.children or []
        block.parent = block.children = None
        for child in broken:
            child.parent = None  # until its predecessor is stored again, and it after that
        while broken:
            child = broken.pop()
            if child.live:
                child.live = False
                if child.digests:
                    self._content.drop(child.digests[:8])
                else:
                    broken.extend(child.children or ())

    def _forget(self, newest: _Block | None) -> None:
        """Make room: leaves that were stored long ago go, and what thereby becomes a leaf."""
        spare = len(self._blocks) - self.blocks_max * 15 // 16
        keep = newest.name if newest is not None else None
        for name in list(self._blocks):
            block: _Block | None = self._blocks.get(name)
            while block is not None and block.kids <= 0 and block.name != keep and block.name in self._blocks:
                parent = block.parent
                self._drop(block)
                self.skipped["forgotten"] += 1
                spare -= 1
                if spare <= 0:
                    return
                block = parent
        if spare > 0:  # one chain longer than all that may be kept
            self.skipped["forgotten"] += len(self._blocks)
            self.clear()


def _live_digests(block: _Block) -> Iterator[bytes]:
    digests = block.digests
    for at in range(0 if block.live else 8, len(digests), 8):
        yield digests[at : at + 8]


class Gap(msgspec.Struct, frozen=True):
    """Messages that did not come: `first` up to and not including `until`."""

    first: int
    until: int


class Feed:
    """One publisher's messages in their order: gaps, repeats and restarts told apart.

    The shell hands in what comes and asks the engine again for what a `Gap` names (`replayed`), then hands in the
    message that showed the gap once more.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        #: number of the next message; None: nothing came yet
        self.next: int | None = None
        #: time of the last message, and of the first since the engine began, by the engine's clock
        self.last_unix_s = float("-inf")
        self.first_unix_s = float("-inf")
        self.gaps = 0
        self.gaps_unrecovered = 0
        self.restarts = 0
        self.undecodable = 0

    def offer(self, sequence: int, payload: bytes) -> Gap | None:
        """One message; a `Gap` says that it was not taken, because others before it are missing."""
        if self.next is not None and sequence < self.next:
            if not self._is_newer(payload):
                return None  # a repeat
            self._restart()
        due = self.next or 0
        if sequence > due:
            self.gaps += self.next is not None
            return Gap(due, sequence)
        self._take(sequence, payload)
        return None

    def replayed(self, gap: Gap, messages: Mapping[int, bytes]) -> bool:
        """What the engine still had of a gap, and perhaps after it; False: some of it is lost for good.

        A `removed` may be among the lost, so what was known before is forgotten then, and what follows the loss taken.
        """
        first = gap.until
        while first > gap.first and first - 1 in messages:
            first -= 1
        whole = first <= gap.first
        if not whole and self.next is not None:
            self.gaps_unrecovered += 1
            self.blocks.clear()
        while first in messages:
            self._take(first, messages[first])
            first += 1
        self.next = first
        return whole

    def begin(self, started_unix_s: float | None) -> bool:
        """The engine has a new incarnation; True: what was known is forgotten, ask for everything from 0.

        False where the messages told so before: the first since the restart is not older than the process.
        """
        if started_unix_s is not None and self.first_unix_s >= started_unix_s:
            return False
        self._restart()
        return True

    def _is_newer(self, payload: bytes) -> bool:
        try:
            return decode(payload).unix_s > self.last_unix_s
        except KvEventError:
            return False

    def _restart(self) -> None:
        self.restarts += 1
        self.blocks.clear()
        self.next = None
        self.first_unix_s = self.last_unix_s = float("-inf")

    def _take(self, sequence: int, payload: bytes) -> None:
        self.next = sequence + 1
        try:
            batch = decode(payload)
        except KvEventError:
            # What it said is lost, and may have been that something is gone.
            self.undecodable += 1
            self.blocks.clear()
            return
        if self.first_unix_s == float("-inf"):
            self.first_unix_s = batch.unix_s
        self.last_unix_s = batch.unix_s
        self.blocks.fold(batch)
