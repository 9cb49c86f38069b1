"""`tokenfleet run accountant`."""

import logging
import sys

from tokenfleet.accountant.service import run
from tokenfleet.database import DatabaseError
from tokenfleet.runtime import service


def main() -> int:
    """Run until SIGTERM; exit code."""
    try:
        return service.main("accountant", run, database=True)
    except DatabaseError as error:
        logging.getLogger("tokenfleet.accountant").error("stopped by Postgres", extra={"error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
