"""`python -m quire` is the command `quire`."""

import sys

from quire.ops.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
