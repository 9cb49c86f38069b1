"""Who decides for which scope: the fold of the marks that owners write into the streams.

Decides whether this replica holds an office and whether somebody else's decision came after it lost one. Refuses to
know how a lease is won: the runtime does that, and an office begins only when a replica reads its own mark back from
the stream, so that every decision of its predecessor has been folded by then.
"""

import msgspec


class Office(msgspec.Struct):
    """The newest mark of one scope."""

    term: int
    owner: str


class Offices:
    """Offices as one replica sees them. Marks that a former process of the same name wrote give it nothing."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.marks: dict[str, Office] = {}
        self._issued: dict[str, int] = {}

    def issue(self, scope: str, term: int) -> None:
        """This process is about to write a mark; reading it back begins the office."""
        self._issued[scope] = term

    def fold(self, scope: str, term: int, owner: str) -> bool:
        """Fold a mark; True when this replica takes office with it."""
        known = self.marks.get(scope)
        if known is not None and term <= known.term:
            return False
        self.marks[scope] = Office(term, owner)
        return self.term(scope) > 0

    def resign(self, scope: str) -> None:
        """The lease is lost: decide nothing for the scope until a new mark has been read back."""
        self._issued.pop(scope, None)

    def term(self, scope: str) -> int:
        """Term under which this replica decides for the scope; 0 when it does not."""
        known = self.marks.get(scope)
        if known is None or known.owner != self.replica or self._issued.get(scope) != known.term:
            return 0
        return known.term

    def void(self, scope: str, term: int) -> bool:
        """Whether a decision of that term, read now, is void because a later owner's mark was read before it."""
        known = self.marks.get(scope)
        return known is not None and 0 < term < known.term
