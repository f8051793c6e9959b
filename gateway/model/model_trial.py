"""`python -m quire.gateway.model.model_trial FOLDER` loads the model files of a folder in a process with limits.

Registered files come from Redis, so a gateway does not trust them. A tokenizer that takes all memory, an endless
template or a fault inside the tokenizer library ends only this process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from quire.shared.process.errors import StartError

# Limits of a trial: processor time, memory, and the time until it is given up on a busy machine.
TRIAL_CPU_S = 60
TRIAL_BYTES = 2 * 1024**3
TIMEOUT_S = 180.0
MAX_FAULT = 500


def try_out(folder: Path) -> str:
    """Return the fault of the model files in a folder; empty if they can be loaded. Blocks for the time of a load."""
    command = [sys.executable, "-P", "-m", "quire.gateway.model.model_trial", str(folder)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"loading it takes more than {TIMEOUT_S:g} s"
    if done.returncode:
        return f"loading it takes more than {TRIAL_BYTES >> 30} GiB or {TRIAL_CPU_S} s, or fails in the tokenizer"
    return done.stdout.decode(errors="replace")[:MAX_FAULT]


def main() -> None:
    """Load the files, and write the fault, if any, to standard output.

    The exit status is 0 if the load came to an end, whatever its result.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (TRIAL_BYTES, TRIAL_BYTES))
    from quire.gateway.model.served_model import load_model

    try:
        model = load_model(sys.argv[1], "trial")
        model.tokenizer.encode("A trial: 1, 2, 3.")
    except StartError as error:
        sys.stdout.write(str(error)[:MAX_FAULT])


if __name__ == "__main__":
    main()
