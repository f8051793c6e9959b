"""Measures attention over long contexts against the memory bandwidth, for each type of the KV cache.

    python -m quire.ops.benchmarks.kernels.attention --context 8192 --queries 1 --kv-dtype bfloat16

Each round first reads the caches of all layers with a plain loop on the same threads, the floor, and then computes the
attention of all layers for the last `--queries` tokens of each sequence. The printed times are medians of the rounds,
and the ratio is the median of the ratios of the rounds. With more than some ten queries, products are the limit and not
the bandwidth. The default shape is SmolLM2-135M. KERNELS_CPU_ISA selects the level.
"""

import argparse
import statistics
import sys
import time

import torch

from quire import kernels
from quire.kernels import CpuOps
from quire.kernels.cpu import library
from quire.ops.benchmarks.kernels.cpu import DTYPES, KV_DTYPES


class LongAttention:
    """Sequences of one length with a full cache in each layer, in scattered blocks of random values."""

    def __init__(self, ops: CpuOps, args: argparse.Namespace) -> None:
        self.ops, self.scale = ops, args.head_dim**-0.5
        count, block_size = args.sequences, args.block_size
        blocks = -(-args.context // block_size) * count
        self.caches = [ops.alloc_kv_cache(blocks, args.kv_heads, block_size, args.head_dim) for _ in range(args.layers)]
        self.tables = torch.randperm(blocks).view(count, -1).int()
        self.lengths = torch.full((count,), args.context, dtype=torch.int32)
        self.starts = torch.arange(count + 1, dtype=torch.int32) * args.queries
        self.q = torch.randn(count * args.queries, args.heads, args.head_dim).to(ops.dtype)
        scores = count * args.queries * (args.context - args.queries / 2)
        self.flops = 4 * scores * args.heads * args.head_dim * args.layers
        width = (args.heads + 2 * args.kv_heads) * args.head_dim
        qkv, slots = torch.randn(blocks * block_size, width).to(ops.dtype), torch.arange(blocks * block_size)
        still = torch.ones(1, args.head_dim)
        for pair in self.caches:
            ops.rope_and_cache(qkv, torch.zeros_like(slots).int(), still, slots, *pair, args.heads, args.kv_heads)

    @property
    def cache_bytes(self) -> int:
        return sum(cache.nbytes for pair in self.caches for cache in pair)

    def read(self) -> None:
        """Read the caches with a plain loop."""
        common = library.load().common
        for cache in (cache for pair in self.caches for cache in pair):
            common.read_memory(cache.data_ptr(), cache.nbytes)

    def attend(self) -> None:
        for pair in self.caches:
            self.ops.paged_attention(self.q, *pair, self.tables, self.lengths, self.starts, self.scale)


def measure(case: LongAttention, rounds: int) -> tuple[float, float, float]:
    """Return the median seconds of the floor and of attention, and the median of floor / attention."""
    times = []
    for round_ in range(rounds + 1):
        start = time.perf_counter()
        case.read()
        between = time.perf_counter()
        case.attend()
        if round_:
            times.append((between - start, time.perf_counter() - between))
    floor, attention = (statistics.median(column) for column in zip(*times, strict=True))
    return floor, attention, statistics.median(one / other for one, other in times)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.kernels.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPES), action="append", help="default: all of this dtype")
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    sizes = {"context": 8192, "sequences": 1, "queries": 1, "layers": 30, "heads": 9, "kv-heads": 3, "head-dim": 64}
    sizes["block-size"] = 16
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args(argv)
    if args.queries > args.context:
        parser.error(f"--queries {args.queries}: a context of {args.context} tokens has fewer")
    if args.threads:
        kernels.set_num_threads(args.threads)
    dtype = DTYPES[args.dtype]
    print("level       cache           MB  floor ms   GB/s       ms   GB/s  GFLOP/s  ratio")
    for name in args.kv_dtype or [name for name in KV_DTYPES if dtype is torch.float32 or name != "float32"]:
        ops = CpuOps(dtype, KV_DTYPES[name])
        case = LongAttention(ops, args)
        floor, attention, ratio = measure(case, args.rounds)
        size = case.cache_bytes
        print(
            f"{ops.level.name:<12}{name:<10}{size / 1e6:>8.1f}{floor * 1e3:>10.2f}{size / floor / 1e9:>7.1f}"
            f"{attention * 1e3:>9.2f}{size / attention / 1e9:>7.1f}{case.flops / attention / 1e9:>9.1f}{ratio:>7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
