"""Measures one linear layer of a CPU with each format of weights, in turns.

    python -m quire.ops.benchmarks.kernels.formats --threads 2

Each format has several copies of the layer, so that caches do not hold the weights. Prints the median time of a product
and the speed relative to weights of bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from quire import kernels
from quire.kernels.grouped_weight import FP8, GROUP, MXFP4, UINT4, UINT8, GroupedWeight, to_fp8
from quire.kernels.k_quant_weight import BLOCK, K_QUANTS, PART, KQuantWeight
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantization import quantize

BASE = "bfloat16"
COPIES = 4
ROWS = (1, 8, 32, 512)


def make_weights(out_features: int, in_features: int, has_integers: bool) -> dict[str, LinearWeight]:
    """Return random weights in each format. has_integers: with those that need float32 activations, too."""
    shape, groups = (out_features, in_features), -(-in_features // GROUP)
    wide = torch.randn(shape) / 64
    codes, scales = torch.randint(0, 16, shape).to(torch.uint8), torch.full((out_features, groups), 2.0**-7)
    found: dict[str, LinearWeight] = {
        BASE: wide.bfloat16(),
        UINT4: GroupedWeight(codes, scales, UINT4, torch.full_like(scales, 8, dtype=torch.uint8)),
        MXFP4: GroupedWeight(codes, scales, MXFP4),
        FP8: to_fp8(wide),
        UINT8: GroupedWeight(codes, scales, UINT8, torch.full_like(scales, 8, dtype=torch.uint8)),
    }
    if in_features % BLOCK == 0:
        of_blocks = torch.full((out_features, in_features // BLOCK), 2.0**-12)
        of_parts = torch.full((out_features, in_features // PART), 32, dtype=torch.int8)
        found |= {kind: KQuantWeight(codes, of_blocks, of_blocks * 8, of_parts, of_parts, kind) for kind in K_QUANTS}
    return found | ({"int8": quantize(wide, 8), "int4": quantize(wide, 4)} if has_integers else {})


def measure(dtype: torch.dtype, width: int, rows: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a product of `rows` rows, by format. dtype: of activations."""
    ops = kernels.CpuOps(dtype)
    weights = make_weights(width, width, dtype is torch.float32)
    packed = {name: [ops.pack_linear(weight) for _ in range(COPIES)] for name, weight in weights.items()}
    x = torch.randn(rows, width).to(dtype)
    times: dict[str, list[float]] = {name: [] for name in packed}
    for _ in range(rounds):
        for name, copies in packed.items():
            start = time.perf_counter()
            for one in copies:
                ops.linear(x, one)
            times[name].append((time.perf_counter() - start) / COPIES * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main(argv: list[str] | None = None) -> int:
    """Print a line for each dtype of activations and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="input and output features")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    kernels.set_num_threads(args.threads)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in args.rows:
            try:
                found = measure(dtype, args.width, rows, args.rounds)
            except kernels.KernelsUnavailable as missing:
                print(f"{str(dtype)[6:]} activations: not measured: {missing}")
                break
            parts = [f"{name} {ms:.2f} ms ({found[BASE] / ms:.2f}x)" for name, ms in found.items()]
            print(f"{str(dtype)[6:]} activations, {rows} rows: {', '.join(parts)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
