"""Writes `.env` from `.env.example` with random secrets; needs nothing but Python. Never overwrites one."""

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Exit codes: 0 written, 2 there is one already."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".env"
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    # a letter first: see .env.example
    text = re.sub(r"(?m)^(\w+=)change-me$", lambda found: f"{found[1]}s{secrets.token_hex(24)}", text)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        print(f"{target} exists: its secrets are kept", file=sys.stderr)
        return 2
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
