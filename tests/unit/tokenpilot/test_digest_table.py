"""The table under the prefix index, against a dict."""

import random

import numpy as np

from tokenfleet.tokenpilot.digest_table import Digests, DigestTable


def digests(*values: int) -> Digests:
    return np.array(values, np.uint64)


def test_a_history_of_puts_and_takes_agrees_with_a_dict() -> None:
    """Numbers in a row, numbers that collide, and zero, which marks an empty place: whatever comes is found again."""
    dice, table, plain = random.Random(11), DigestTable(), dict[int, int]()
    kinds = [lambda: dice.getrandbits(64), lambda: dice.randrange(300), lambda: dice.randrange(300) << 40]
    for _ in range(600):
        some = list({dice.choice(kinds)() for _ in range(dice.randint(1, 40))} - {1})
        if dice.random() < 0.6:
            number = dice.randint(1, 1 << 31)
            table.put(digests(*some), number)
            plain |= dict.fromkeys(some, number)
        else:
            table.take(digests(*some))
            for one in some:
                plain.pop(one, None)
        assert len(table) == len(plain)
    probe = [*plain, *(dice.getrandbits(64) for _ in range(500))]
    expected = [plain.get(one, 0) for one in probe]
    assert table.numbers(digests(*probe)).tolist() == expected
    assert [table.get(one) for one in probe] == expected
    keys, numbers = table.entries()
    assert dict(zip((k if k != 1 else 0 for k in keys.tolist()), numbers.tolist(), strict=True)) == plain


def test_what_was_taken_leaves_no_memory_behind() -> None:
    """Instances came and went; the table stayed as large as it had ever been."""
    table = DigestTable()
    many = np.random.default_rng(1).integers(1, 1 << 63, 100_000).astype(np.uint64)
    table.put(np.unique(many), 7)
    assert table.nbytes / len(table) <= 12 / 0.25
    for part in np.array_split(many, 40):
        table.take(part)
    assert (len(table), table.nbytes) == (0, DigestTable().nbytes)
