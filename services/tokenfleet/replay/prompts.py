"""Prompts of exact length whose prefixes are shared exactly as a trace's block ids say.

Decides the text of every block from (run seed, block id) alone, so that two requests share tokens up to the first
block id that differs and not one block further. Knows the emulated models' tokenizer (one token per UTF-8 byte of
the rendered ChatML prompt, as ByT5 does) and nothing of who serves them. Same seed, same prompts; another seed
shares nothing with them, which is how two runs on one warm fleet are kept apart.

Source: ByT5 (Xue et al., TACL 2022) for bytes as tokens; ChatML as `tokenfleet.chatml` renders it.
"""

import random
import re
from collections import OrderedDict
from hashlib import blake2b

from tokenfleet import chatml
from tokenfleet.replay.traces import Row

_WORDS = re.findall(
    r"\w+",
    "able about after again air all also always and answer any area ask away back base be before best book both "
    "bring build call came can carry case change city clear close cold come common could country course cover cross "
    "day deep did door down draw dry each early earth end enough even ever every eye fact fall far farm feel few "
    "field figure fill find fire first fish five fly follow food form found four free from front full game gave "
    "give gold good great green ground group grow half hand hard have head hear heat help here high hold home horse "
    "hot hour house idea inch island keep kind king knew know land large last late laugh lay lead learn leave left "
    "less let letter life light like line list little live long look lot love low machine made main make man many "
    "map mark may mean measure men might mile mind minute miss money moon more morning most mother mountain move "
    "much music must name near need never new next night north note nothing notice now number object ocean off "
    "often old once only open order over own page paper part pass pattern people picture piece place plain plan "
    "plane plant play point power press problem product pull put question quick rain read ready real record red "
    "remember rest right river road rock room round rule run said same saw say school science sea second see seem "
    "sentence serve set shape ship short should show side simple since sing size sleep slow small snow some song "
    "soon sound south space special spell stand star start state stay step still stood stop story street strong "
    "study such sun sure surface table tail take talk teach tell test than that there thing think thought thousand "
    "three through time together told took top toward town travel tree true try turn two under unit until use usual "
    "verb very voice vowel wait walk want warm watch water way week weight well went west wheel where which while "
    "white whole wind wood word work world would write year young",
)
_MEAN_WORD_BYTES = sum(map(len, _WORDS)) / len(_WORDS) + 1


class PromptMaker:
    """Makes the messages of a trace's rows. One per run; not shared between processes, and needs no sharing."""

    def __init__(self, seed: int, *, block_tokens: int = 512, cached_blocks: int = 16_384) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._cached_blocks = cached_blocks
        self._blocks: OrderedDict[int, str] = OrderedDict()
        self._head_tokens, self._overhead_tokens = _overhead()

    @property
    def minimum_tokens(self) -> int:
        """The shortest prompt that can be made: the template's own tokens and one of content."""
        return self._overhead_tokens + 1

    def messages(self, index: int, row: Row) -> list[dict[str, str]]:
        """Messages whose rendered prompt has exactly `row.input_tokens` tokens (or `minimum_tokens`, if that is more).

        Block k covers the prompt's tokens from k x block size on, the template's opening included in block 0. What
        the blocks do not cover is unique to the row `index`. The template's closing is always the prompt's end, so a
        last block that reaches into it is shared by so much less.
        """
        content_tokens = max(1, row.input_tokens - self._overhead_tokens)
        parts = [self._block(block, nth) for nth, block in enumerate(row.blocks)]
        covered = max(0, len(row.blocks) * self._block_tokens - self._head_tokens)
        if covered < content_tokens:
            parts.append(self._text(f"row {index}", content_tokens - covered))
        return [{"role": "user", "content": "".join(parts)[:content_tokens]}]

    def _block(self, block: int, nth: int) -> str:
        """The text of one block; the first is shorter by the template's opening, which fills its start."""
        text = self._blocks.get(block)
        if text is None:
            size = self._block_tokens - (self._head_tokens if nth == 0 else 0)
            text = self._text(f"block {block}", max(0, size))
            self._blocks[block] = text
            if len(self._blocks) > self._cached_blocks:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(block)
        return text

    def _text(self, what: str, size: int) -> str:
        """`size` bytes of ASCII words, a function of (run seed, `what`); differs from any other from its first word."""
        digest = blake2b(f"{self._seed} {what}".encode(), digest_size=8).digest()
        # A word of its own comes first: no two texts share as much as one 16-token engine block.
        opening = "".join(chr(97 + byte % 26) for byte in digest) + " "
        draws = random.Random(int.from_bytes(digest, "big")).choices(_WORDS, k=int(size / _MEAN_WORD_BYTES * 1.2) + 8)
        text = opening + " ".join(draws)
        while len(text) < size:  # the words drawn were shorter than the mean allows for
            text += " " + text
        return text[:size]


def _overhead() -> tuple[int, int]:
    """(tokens before the content, all tokens that are not content) of a one-message prompt, read from the template."""
    mark = "\x00"
    rendered = chatml.render([{"role": "user", "content": mark}])
    head, _, tail = rendered.partition(mark)
    return len(head.encode()), len(head.encode()) + len(tail.encode())
