"""Becomes a command that gets a signal when its parent dies, however that happens (Linux; elsewhere just the command).

    python die_with_parent.py SIGNAL PARENT_PID COMMAND [ARGUMENT ...]

A program of its own, because the request must be made between fork and exec, where a process with threads may run no
Python.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    number, parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):  # it died before the call above
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
