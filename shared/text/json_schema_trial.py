"""`python -m quire.shared.text.json_schema_trial` checks one JSON schema in a process with limits.

Nothing inside llguidance bounds all of the work of making a grammar: `multipleOf` takes time and memory by its value,
patterns of one text multiply, and a chain of references overflows the stack. In a trial such a schema ends only one
small process.
"""

from __future__ import annotations

import resource
import sys
import threading

from quire.shared.text.json_schema import SchemaError, check

# Limits of one trial.
TRIAL_CPU_S = 2
_TRIAL_BYTES = 64 * 1024 * 1024
# Far below the stack of a worker's threads: a schema that fits here fits there.
_TRIAL_STACK_BYTES = 1024 * 1024


def main() -> None:
    """Check the schema on standard input, and write its fault to standard output; nothing if the schema has no fault.

    The exit status is 0 if the check came to an end, whatever its result.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_TRIAL_BYTES, _TRIAL_BYTES))
    schema = sys.stdin.buffer.read().decode()
    found: list[str] = []

    def look() -> None:
        try:
            check(schema)
            found.append("")
        except SchemaError as error:
            found.append(str(error))

    threading.stack_size(_TRIAL_STACK_BYTES)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    sys.stdout.buffer.write(found[0].encode())


if __name__ == "__main__":
    main()
