"""Measures one synthetic model step, operation by operation, for the C++ kernels and for plain torch.

    python -m quire.ops.benchmarks.kernels.cpu --ops cpu --case decode:1 --case prefill:512

The default shape is SmolLM2-135M, with random weights. The line `step` is one call for all layers (`decoder_layers`);
the other lines are the same step in single operations. A time is the least of `--repeat` rounds, because the machine
may have other work. GFLOP/s counts matrix multiplications and attention; GB/s counts the weights and the cache that
must be read.

`--ops triton` measures each Triton kernel alone instead, on a CUDA device: see ops/benchmarks/kernels/gpu.py.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from quire import kernels
from quire.kernels import CpuOps, ReferenceOps
from quire.kernels.moe import SILU
from quire.kernels.quantization import QuantizedWeight, quantize
from quire.ops.benchmarks.kernels import gpu

BITS = {"int8": 8, "int4": 4}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {name: DTYPES[name] for name in ("float32", "bfloat16")} | {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama-like model: SmolLM2-135M by default."""

    hidden: int = 576
    intermediate: int = 1536
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocabulary: int = 49152
    block_size: int = 16


@dataclass(frozen=True)
class CpuKernelCase:
    """The batch of a step."""

    kind: str  # decode: `count` sequences with one token each; prefill: one sequence, a chunk of `count` tokens
    count: int
    context: int

    @property
    def sequences(self) -> int:
        return self.count if self.kind == "decode" else 1

    @property
    def tokens(self) -> int:
        return self.count

    @property
    def length(self) -> int:
        return self.context if self.kind == "decode" else max(self.context, self.count)

    @property
    def pairs(self) -> int:
        """The number of query-key pairs that attention computes, per head."""
        if self.kind == "decode":
            return self.count * self.length
        return self.count * self.length - self.count * (self.count - 1) // 2


class Model:
    """A model with random weights, and one step of it, as a decoder calls the operations."""

    def __init__(self, ops: kernels.Ops, shape: ModelShape, case: CpuKernelCase, weights: str = "") -> None:
        """weights: the format of the linear layers, of DTYPES or BITS; the dtype of `ops` if empty."""
        self.ops, self.shape, self.case = ops, shape, case
        s, dtype = shape, ops.dtype

        def values(*size: int) -> torch.Tensor:
            return torch.randn(*size, dtype=torch.float32).mul_(0.02)

        def weight(*size: int, bits: int = BITS.get(weights, 0)) -> torch.Tensor | QuantizedWeight:
            return quantize(values(*size), bits) if bits else values(*size).to(DTYPES.get(weights, dtype))

        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.norm = torch.ones(s.hidden, dtype=dtype)
        self.layers = [
            SimpleNamespace(
                input_norm=self.norm,
                qkv=ops.pack_linear(weight(width, s.hidden)),
                q_norm=None,
                k_norm=None,
                sliding_window=0,
                o=ops.pack_linear(weight(s.hidden, s.heads * s.head_dim)),
                mlp_norm=self.norm,
                gate_up=ops.pack_gate_up(weight(2 * s.intermediate, s.hidden)),
                down=ops.pack_linear(weight(s.hidden, s.intermediate)),
                moe=None,
                gate=SILU,
                post_attention_norm=None,
                post_mlp_norm=None,
                sinks=None,
                cos_sin=None,
                v_norm=None,
                shares_kv=False,
                expert_norms=None,
                per_layer_input=None,
                output_scale=1.0,
            )
            for _ in range(s.layers)
        ]
        self.table = values(s.vocabulary, s.hidden).to(DTYPES.get(weights, dtype))
        self.head = ops.pack_linear(weight(s.vocabulary, s.hidden, bits=8) if weights in BITS else self.table)
        layers = [packed for at in self.layers for packed in (at.qkv, at.o, at.gate_up, at.down)]
        packed_bytes = sum(packed.nbytes for packed in layers)
        # Bytes per weight of the layers, for the rates of reading; the head may have another format.
        self.weight_size = packed_bytes / sum(packed.in_features * packed.out_features for packed in layers)
        self.head_size = self.head.nbytes / (s.vocabulary * s.hidden)
        per_sequence = -(-case.length // s.block_size)
        blocks = case.sequences * per_sequence
        self.caches = [ops.alloc_kv_cache(blocks, s.kv_heads, s.block_size, s.head_dim) for _ in range(s.layers)]
        self.block_tables = torch.randperm(blocks).view(case.sequences, per_sequence).int()
        self.seq_lens = torch.full((case.sequences,), case.length, dtype=torch.int32)
        queries = case.tokens // case.sequences
        self.query_start_loc = torch.arange(case.sequences + 1, dtype=torch.int32) * queries
        positions = torch.arange(case.length - queries, case.length)
        slots = self.block_tables[:, positions // s.block_size] * s.block_size + positions % s.block_size
        self.positions = positions.repeat(case.sequences).int()
        self.slots = slots.flatten().long()
        self.cos_sin = torch.rand(case.length, s.head_dim)
        self.token_ids = torch.randint(0, s.vocabulary, (case.tokens,))
        self.last = (self.query_start_loc[1:] - 1).long()

        scale = s.head_dim**-0.5
        self.stack = ops.stack_layers(
            self.layers, self.norm, self.caches, self.cos_sin, s.heads, s.kv_heads, 1e-5, scale
        )

    def step(self) -> torch.Tensor:
        """Compute the step with one call for all layers."""
        residual = self.ops.embed(self.token_ids, self.table)
        tables = self.block_tables, self.seq_lens, self.query_start_loc
        hidden = self.ops.decoder_layers(residual, self.stack, self.positions, self.slots, *tables, self.last)
        return self.ops.argmax(self.ops.linear_logits(hidden, self.head))

    def timed_step(self, timed: Callable) -> torch.Tensor:
        """Compute the step with single operations, each called as timed(name, function, *arguments)."""
        ops, s = self.ops, self.shape
        residual = timed("embed", ops.embed, self.token_ids, self.table)
        x = timed("norm", ops.rms_norm, residual, self.norm, 1e-5)
        where = self.positions, self.cos_sin, self.slots
        tables = self.block_tables, self.seq_lens, self.query_start_loc
        for layer, cache in zip(self.layers, self.caches, strict=True):
            qkv = timed("qkv", ops.linear, x, layer.qkv)
            q = timed("rope", ops.rope_and_cache, qkv, *where, *cache, s.heads, s.kv_heads)
            x = timed("attention", ops.paged_attention, q, *cache, *tables, s.head_dim**-0.5)
            x = timed("o", ops.linear, x, layer.o)
            x = timed("norm", ops.add_rms_norm, x, residual, self.norm, 1e-5)
            x = timed("gate_up", ops.linear_silu_mul, x, layer.gate_up)
            x = timed("down", ops.linear, x, layer.down)
            x = timed("norm", ops.add_rms_norm, x, residual, self.norm, 1e-5)
        logits = timed("head", ops.linear_logits, x[self.last], self.head)
        return timed("argmax", ops.argmax, logits)


def work(model: Model) -> dict[str, tuple[float, float]]:
    """Return, for each operation, (floating-point operations, bytes that must be read)."""
    s, case, t = model.shape, model.case, model.case.tokens
    width = (s.heads + 2 * s.kv_heads) * s.head_dim

    def product(n: int, k: int, rows: int, times: int, size: float = model.weight_size) -> tuple[float, float]:
        return 2.0 * n * k * rows * times, n * k * size * times

    cache = case.sequences * case.length * s.kv_heads * s.head_dim * 2 * model.ops.kv_dtype.itemsize * s.layers
    return {
        "qkv": product(width, s.hidden, t, s.layers),
        "o": product(s.hidden, s.heads * s.head_dim, t, s.layers),
        "gate_up": product(2 * s.intermediate, s.hidden, t, s.layers),
        "down": product(s.hidden, s.intermediate, t, s.layers),
        "head": product(s.vocabulary, s.hidden, case.sequences, 1, model.head_size),
        "attention": (4.0 * case.pairs * s.heads * s.head_dim * s.layers, float(cache)),
    }


def measure(model: Model, repeat: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a whole step and of each operation, each the least of the rounds."""
    whole, parts = float("inf"), defaultdict(lambda: float("inf"))
    clock = time.perf_counter
    for round_ in range(repeat + 1):
        start = clock()
        model.step()
        if round_:
            whole = min(whole, clock() - start)
        spent: dict[str, float] = defaultdict(float)

        def timed(name: str, function: Callable, *args: object, spent: dict[str, float] = spent) -> object:
            begin = clock()
            result = function(*args)
            spent[name] += clock() - begin
            return result

        model.timed_step(timed)
        if round_:
            for name, seconds in spent.items():
                parts[name] = min(parts[name], seconds)
    return whole, dict(parts)


def report(name: str, model: Model, repeat: int) -> None:
    """Measure a step and print a table of its operations."""
    whole, parts = measure(model, repeat)
    amounts = work(model)
    case = model.case
    rate = case.tokens / whole
    print(f"\n{name} {model.ops.dtype} {case.kind}:{case.count} context {case.length}")
    print(f"{'operation':<12}{'ms':>9}{'share':>8}{'GFLOP/s':>10}{'GB/s':>8}")
    rows = [("step", whole, *(sum(column) for column in zip(*amounts.values(), strict=True)))]
    rows += [(op, seconds, *amounts.get(op, (0.0, 0.0))) for op, seconds in parts.items()]
    for op, seconds, flops, size in rows:
        flop_rate = f"{flops / seconds / 1e9:10.1f}" if flops else " " * 10
        byte_rate = f"{size / seconds / 1e9:8.1f}" if size else ""
        print(f"{op:<12}{seconds * 1e3:>9.3f}{seconds / whole:>8.1%}{flop_rate}{byte_rate}")
    print(f"{rate:.1f} tokens/s", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", choices=["cpu", "reference", "both", "triton"], default="both")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument(
        "--weights", choices=[*DTYPES, *BITS], default="", help="format of linear layers (default: that of --dtype)"
    )
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPES), help="type of the KV cache (default: --dtype)")
    parser.add_argument(
        "--case",
        action="append",
        help="decode:N (sequences) or prefill:N (tokens); repeatable",
    )
    parser.add_argument("--context", type=int, default=192, help="tokens of context per sequence (default 192)")
    parser.add_argument(
        "--repeat", type=int, help="rounds; the least time counts (default 5), or with triton the median (30)"
    )
    parser.add_argument("--threads", type=int, default=None, help="threads (default: every processor)")
    for name, default in vars(ModelShape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    gpu.add_arguments(parser)
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype]
    if args.ops == "triton":
        return gpu.run(dtype, args.repeat or 30, args.json)
    if args.json:
        parser.error("--json is for --ops triton")
    kv_dtype = KV_DTYPES[args.kv_dtype] if args.kv_dtype else dtype
    shape = ModelShape(**{name: getattr(args, name) for name in vars(ModelShape())})
    if args.threads:
        torch.set_num_threads(args.threads)
    for text in args.case or ["decode:1", "decode:8", "decode:32", "prefill:128", "prefill:512"]:
        kind, _, count = text.partition(":")
        if kind not in ("decode", "prefill") or not count.isdecimal() or int(count) < 1:
            parser.error(f"--case {text}: it must be decode:N or prefill:N")
        case = CpuKernelCase(kind, int(count), args.context)
        for name in ("cpu", "reference") if args.ops == "both" else (args.ops,):
            ops = CpuOps(dtype, kv_dtype) if name == "cpu" else ReferenceOps("cpu", dtype, kv_dtype)
            if args.threads and name == "cpu":
                kernels.set_num_threads(args.threads)
            report(name, Model(ops, shape, case, args.weights), args.repeat or 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
