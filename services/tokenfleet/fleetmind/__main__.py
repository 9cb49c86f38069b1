"""`python -m tokenfleet.fleetmind`."""

import sys

from tokenfleet.fleetmind.service import main

if __name__ == "__main__":
    sys.exit(main())
