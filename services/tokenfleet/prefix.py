"""The prefix digest: what a prompt shares with another, told without telling a word of it.

Decides how token ids become a chain of 8-byte keyed hashes, one per 64 tokens, and how a chain is packed into a
message. Each hash covers its parent, so equal digests at a position mean equal prompts up to there, and a chain that
keeps only every 2nd, 4th … digest stays comparable at the positions that remain. The key comes from the fleet's secret
and the tenant, so tenants match each other only when configured to, and digests cannot be guessed from likely prompts.

Refuses to know engines, tokenizers and who asks. Block hashing by a chain over (parent, tokens) is also how vLLM names
its KV blocks (`vllm/v1/core/kv_cache_utils.py`); agents re-chunk engines' blocks into this chain with `extend`.
"""

import binascii
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

#: tokens per digest
CHUNK_TOKENS = 64
#: bytes per digest
DIGEST_BYTES = 8
#: digests per message: 2,048 of them are 16 kB, 21.9 kB in base64
MAX_DIGESTS = 2048
#: the parent of a prompt's first digest
ROOT = bytes(DIGEST_BYTES)

_UINT32 = "I" if array("I").itemsize == 4 else "L"
_BYTE_ORDER = sys.byteorder
_CHUNK_BYTES = CHUNK_TOKENS * 4


class PrefixError(ValueError):
    """A secret, key, token id or packed chain that cannot be used; says which and why."""


def tenant_key(secret: str, tenant: str, share: bool = False, adapter: str = "") -> bytes:
    """The key under which one tenant's prompts are digested: 32 bytes.

    Tenants with `share` use one common key, so that their prefixes match. KV computed under another LoRA adapter is
    other KV, hence `adapter` is part of the key. Raises `PrefixError` without a secret: a guessable key would make
    digests an oracle for prompts.
    """
    return _derive(secret, b"tf.prefix", tenant, share, adapter, 32)


def cache_salt(secret: str, tenant: str, share: bool = False) -> str:
    """What goes to the engine as `cache_salt`, so that tenants share no prefix cache unless they both say so.

    Timing a shared cache tells what others have asked (vLLM documents `cache_salt` against this). Raises `PrefixError`
    without a secret.
    """
    return b64encode(_derive(secret, b"tf.salt", tenant, share, "", 18), altchars=b"-_").decode()


@lru_cache(maxsize=4096)
def _derive(secret: str, purpose: bytes, tenant: str, share: bool, adapter: str, size: int) -> bytes:
    if not secret:
        raise PrefixError("the fleet has no secret: prefix digests and cache salts would be guessable")
    if not tenant and not share:
        raise PrefixError("no tenant: its prefixes would be everybody's")
    secret_key = blake2b(secret.encode(), digest_size=64).digest()
    # One byte says which kind of name follows: no tenant can be called like the shared group.
    who = b"\x01" if share else b"\x00" + tenant.encode()
    return blake2b(who + b"\x00" + adapter.encode(), digest_size=size, key=secret_key, person=purpose).digest()


def digests(tokens: "Sequence[int] | bytes | bytearray | memoryview | array[int]", key: bytes) -> bytes:
    """The chain of a prompt: one 8-byte digest after every 64 tokens, concatenated; a rest below 64 has none.

    `bytes` are read as one token each (byte tokenizers). Raises `PrefixError` for ids outside 0 … 2^32 - 1.
    """
    return extend(ROOT, tokens, key)


def extend(parent: bytes, tokens: "Sequence[int] | bytes | bytearray | memoryview | array[int]", key: bytes) -> bytes:
    """The digests that follow `parent` (the last digest of what comes before) for these tokens.

    `extend(ROOT, a + b)` equals `extend(ROOT, a)` followed by `extend(its last digest, b)` when `a` is a whole number
    of chunks long. Raises `PrefixError`.
    """
    if len(parent) != DIGEST_BYTES:
        raise PrefixError(f"a parent digest is {DIGEST_BYTES} bytes, not {len(parent)}")
    if not 1 <= len(key) <= 64:
        raise PrefixError(f"a digest key is 1 to 64 bytes, not {len(key)}")
    data = _uint32_le(tokens)
    keyed = blake2b(digest_size=DIGEST_BYTES, key=key)
    found = bytearray()
    for at in range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        one = keyed.copy()  # the key block is absorbed once, not once per chunk
        one.update(parent)
        one.update(data[at : at + _CHUNK_BYTES])
        parent = one.digest()
        found += parent
    return bytes(found)


def _uint32_le(tokens: "Sequence[int] | bytes | bytearray | memoryview | array[int]") -> memoryview:
    if isinstance(tokens, memoryview):
        tokens = tokens.tobytes() if tokens.itemsize == 1 else array(_UINT32, tokens.tolist())
    if isinstance(tokens, (bytes, bytearray)):
        wide = bytearray(4 * len(tokens))
        wide[::4] = tokens
        return memoryview(wide)
    if isinstance(tokens, array) and tokens.typecode == _UINT32:
        ids = tokens
    else:
        try:
            ids = array(_UINT32, tokens)
        except (OverflowError, TypeError) as error:
            raise PrefixError(f"token ids are integers from 0 to 2^32 - 1: {error}") from None
    if _BYTE_ORDER == "big":
        ids = array(_UINT32, ids)
        ids.byteswap()
    return memoryview(ids.tobytes())


def pack(chain: bytes, limit: int = MAX_DIGESTS) -> tuple[str, int]:
    """A chain for a message: (base64, stride), at most `limit` digests, keeping every `stride`-th of them.

    The stride is the smallest power of two that fits, so that chains of different lengths keep common positions.
    Raises `PrefixError` if `chain` is not whole digests.
    """
    if len(chain) % DIGEST_BYTES:
        raise PrefixError(f"a chain is a multiple of {DIGEST_BYTES} bytes, not {len(chain)}")
    if limit < 1:
        raise PrefixError("a message carries at least one digest")
    count, stride = len(chain) // DIGEST_BYTES, 1
    while count // stride > limit:
        stride *= 2
    if stride > 1:
        step = stride * DIGEST_BYTES
        chain = b"".join(chain[at - DIGEST_BYTES : at] for at in range(step, len(chain) + 1, step))
    return b64encode(chain).decode(), stride


def unpack(packed: str) -> tuple[bytes, ...]:
    """The digests of a message in order; the n-th (from 1) stands for `n * stride * 64` tokens.

    Raises `PrefixError` for what is not base64 of whole digests.
    """
    try:
        chain = b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PrefixError(f"a packed prefix is base64: {error}") from None
    if len(chain) % DIGEST_BYTES:
        raise PrefixError(f"a chain is a multiple of {DIGEST_BYTES} bytes, not {len(chain)}")
    return tuple(chain[at : at + DIGEST_BYTES] for at in range(0, len(chain), DIGEST_BYTES))
