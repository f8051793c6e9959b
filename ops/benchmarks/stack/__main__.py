"""`make bench`: start the whole stack on a random checkpoint, measure it, and print one table.

python -m quire.ops.benchmarks.stack                                  the stack, all cases
python -m quire.ops.benchmarks.stack --cases c1,c32 --rounds 3
python -m quire.ops.benchmarks.stack --peer llamacpp --peer vllm      other servers by name, in alternating rounds
python -m quire.ops.benchmarks.stack --peer vllm=http://127.0.0.1:8101
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.ops.benchmarks.peers.command import add_arguments, compare
from quire.ops.benchmarks.stack.checkpoint import SHAPES
from quire.ops.benchmarks.stack.load import CASES

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint folder; by default one with random weights is made")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama135m", help="shape of the random checkpoint")
    parser.add_argument("--cases", default="c1,c32,long", help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--serve-args", default="", help="further arguments of `quire serve`")
    add_arguments(parser)
    args = parser.parse_args()
    return compare(args, RESULTS / "peers.json")


if __name__ == "__main__":
    sys.exit(main())
