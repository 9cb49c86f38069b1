"""`tokenfleet run siteagent`."""

import sys

from tokenfleet.runtime.service import main as run_service
from tokenfleet.siteagent.service import body


def main() -> int:
    """Run until SIGTERM; exit code of the process."""
    return run_service("siteagent", body)


if __name__ == "__main__":
    sys.exit(main())
