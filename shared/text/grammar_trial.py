"""`python -m quire.shared.text.grammar_trial` checks one grammar in a process with limits.

Nothing inside llguidance bounds all of the work of compiling a grammar: `multipleOf` takes time and memory by its
value, patterns of one text multiply, and a chain of references overflows the stack. In a trial such a grammar ends only
one small process.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict

from quire.shared.text.grammar import GrammarVocabulary, check, follow
from quire.shared.text.grammar_error import GrammarError

# Limits of one trial.
TRIAL_CPU_S = 2
_TRIAL_BYTES = 64 * 1024 * 1024
# Far below the stack of a worker's threads: a grammar that fits here fits there.
_TRIAL_STACK_BYTES = 1024 * 1024


def order(grammar: str, vocabulary: GrammarVocabulary, output: Sequence[int | str] = ()) -> bytes:
    """Return the standard input of a trial; with `output`, of whether an answer can begin with it (`follow`)."""
    return json.dumps({"grammar": grammar, "vocabulary": asdict(vocabulary), "output": output}).encode()


def main() -> None:
    """Check the grammar on standard input, and write its fault to standard output; nothing if it has no fault.

    The exit status is 0 if the check came to an end, whatever its result.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_TRIAL_BYTES, _TRIAL_BYTES))
    ordered = json.load(sys.stdin.buffer)
    vocabulary = GrammarVocabulary(**ordered["vocabulary"])
    faults: list[str] = []

    def look() -> None:
        try:
            if ordered["output"]:
                follow(ordered["grammar"], vocabulary, ordered["output"])
            else:
                check(ordered["grammar"], vocabulary)
            faults.append("")
        except GrammarError as error:
            faults.append(str(error))

    threading.stack_size(_TRIAL_STACK_BYTES)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    sys.stdout.buffer.write(faults[0].encode())


if __name__ == "__main__":
    main()
