"""`python -m tokenfleet.tokenpilot`."""

import sys

from tokenfleet.tokenpilot.service import main

if __name__ == "__main__":
    sys.exit(main())
