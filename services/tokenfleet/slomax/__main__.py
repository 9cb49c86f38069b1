"""`python -m tokenfleet.slomax`."""

import sys

from tokenfleet.slomax.service import main

if __name__ == "__main__":
    sys.exit(main())
