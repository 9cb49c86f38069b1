"""What a site says of its KV content to the whole fleet: a sample of its prefix digests, bounded in bytes.

Decides which digests of a model are named: those whose lowest bits are zero, as many bits as the bound needs, so that
a reader with a prompt's chain knows which of its digests to look for, and finds the longest held beginning within a
few chunks. Digests are keyed hashes, so their low bits are as good as dice. Refuses to know engines and the bus.
"""

from collections.abc import Iterable, Mapping

from tokenfleet.prefix import DIGEST_BYTES

#: digests in one summary: 32 kB
DIGESTS_MAX = 4_096
_BITS_MAX = 8 * DIGEST_BYTES - 1


def sample(holders: Iterable[Iterable[bytes]], digests_max: int = DIGESTS_MAX) -> tuple[bytes, int]:
    """(packed digests in order, how many low bits are zero in each) of what any of these holds, at most `digests_max`.

    The bits are the fewest that fit, so a small site is told whole.
    """
    bits, mask = 0, 0
    found: set[bytes] = set()
    for held in holders:
        for digest in held:
            if mask and int.from_bytes(digest, "little") & mask:
                continue
            found.add(digest)
            while len(found) > digests_max and bits < _BITS_MAX:
                bits += 1
                mask = (1 << bits) - 1
                found = {one for one in found if not int.from_bytes(one, "little") & mask}
    return b"".join(sorted(found)), bits


def by_model(contents: Mapping[str, tuple[str, Iterable[bytes]]]) -> dict[str, list[Iterable[bytes]]]:
    """Instances' contents, `(model, digests)` each, gathered by model."""
    models: dict[str, list[Iterable[bytes]]] = {}
    for model, held in contents.values():
        models.setdefault(model, []).append(held)
    return models
