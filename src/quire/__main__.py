"""`python -m quire` is the command `quire`.

The handler of Ctrl-C is set before the first import that takes time, so that an early Ctrl-C prints no traceback.
"""

import sys

from quire.shared.process import interrupts

interrupts.end_at_ctrl_c()

from quire.ops.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
