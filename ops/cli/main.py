"""The entry point of the command `quire`.

`main` sets the handler of Ctrl-C before it imports the slow modules, because these imports can take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.shared.process import interrupts


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `quire` with the arguments `argv`; None: the arguments of the process, which ends after this call.

    Return the exit code: 0, 1 for a failure, 2 for a wrong setting, 130 for Ctrl-C.
    """
    interrupts.end_at_ctrl_c()
    try:
        from quire.ops.cli.commands import run

        return run(argv, environ)
    finally:
        if argv is None:
            interrupts.end_at_ctrl_c()
        else:
            interrupts.raise_at_ctrl_c()
