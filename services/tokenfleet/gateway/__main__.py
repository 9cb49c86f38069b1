"""`python -m tokenfleet.gateway`: one gateway, configured by `TOKENFLEET_*`."""

import sys

from tokenfleet.gateway.service import main

if __name__ == "__main__":
    sys.exit(main())
