"""Names as NATS subject tokens. The true name travels in the body; collisions are refused when a fleet is loaded."""

import re

#: stands where a token does not apply
NONE = "_"
_UNSAFE = re.compile(r"[^a-z0-9_-]")
_slugs: dict[str, str] = {}


def slug(name: str) -> str:
    """A name as one token of `[a-z0-9_-]`; an empty name is `_`."""
    found = _slugs.get(name)
    if found is None:
        found = _UNSAFE.sub("-", name.lower()) or NONE
        if len(_slugs) < 65_536:  # names are few; a flood of strange ones must not grow the table
            _slugs[name] = found
    return found
