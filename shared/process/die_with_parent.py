"""Executes a command that gets a signal when its parent dies for any reason (Linux; elsewhere only executes it).

    python die_with_parent.py SIGNAL PARENT_PID COMMAND [ARGUMENT ...]

This is a separate program because the request must be made between fork and exec, where a process with threads may not
run Python.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    number, parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):  # the parent died before the call above
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
