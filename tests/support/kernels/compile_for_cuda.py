"""Compiles the launches of the Triton kernels for a GPU that this machine need not have.

    python -m tests.support.kernels.compile_for_cuda

Operations are called as usual, on small tensors in host memory, but a launch only compiles its kernel, with Triton's
specialisation: dtypes, alignments, constants and options are those of a real launch. Prints a line of JSON for each
compiled kernel with the resources that it needs. TRITON_INTERPRET must not be set.

--keep FOLDER also writes the PTX and the machine code of each kernel, for the checks of tests/kernels/static.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire.kernels.gpu.attention import AttentionPlan
from quire.kernels.gpu.few_rows import products
from quire.kernels.gpu.fp8_matmul import quantize_rows
from quire.kernels.gpu.grouped_matmul import KINDS
from quire.kernels.gpu.lora import TritonAdaptedRows
from quire.kernels.gpu.ops import TritonOps
from quire.kernels.gpu.rope import rope_and_cache
from quire.kernels.grouped_weight import MAX_ZEROS, GroupedWeight
from quire.kernels.lora import LoraPart
from quire.kernels.moe import CLAMPED, GELU, ExpertWeights, Routing
from tests.support.kernels.stacks import make_cache_stack

# Properties of the GPU for which the kernels are compiled.
large_shared_memory = True
compute_capability = 90
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Attention:
    """A shape of heads and cache, on which several kernels depend."""

    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    block_size: int = 16
    window: int = 0
    fp8: bool = False
    norms: bool = False
    invariant: bool = False
    capped: bool = False  # with sinks, too

    def __str__(self) -> str:
        flags = [name for name in ("fp8", "norms", "invariant", "capped") if getattr(self, name)]
        shape = f"{self.dtype} d{self.head_dim} {self.heads}/{self.kv_heads} page{self.block_size} window{self.window}"
        return " ".join([shape, *flags])


QWEN = Attention("bf16", 128, 16, 8, norms=True)  # Qwen3-0.6B
LLAMA = Attention("bf16", 128, 32, 8)  # Llama-3.1-8B
GEMMA_4 = Attention("bf16", 512, 16, 2)  # Gemma 4 26B-A4B, layers without a window
# Heads of models that Quire serves, in each mode of the cache and of the arithmetic.
SERVED = [
    LLAMA,
    replace(LLAMA, dtype="fp16"),
    replace(LLAMA, fp8=True),
    replace(LLAMA, invariant=True),
    replace(LLAMA, fp8=True, invariant=True),
    replace(LLAMA, window=4096),  # Mistral
    QWEN,
    Attention("bf16", 64, 32, 8),  # Llama-3.2-1B
    Attention("bf16", 64, 32, 8, invariant=True),
    Attention("bf16", 64, 64, 8, window=128, capped=True),  # gpt-oss
    Attention("bf16", 256, 8, 2),  # Gemma
    GEMMA_4,
    replace(GEMMA_4, fp8=True),
    replace(GEMMA_4, invariant=True),
]
FEW = [QWEN, replace(QWEN, invariant=True), replace(QWEN, capped=True)]

# Shapes for which the tiles for Hopper do not fit into the shared memory of other devices.
WIDE = [Attention("bf16", 256, 8, 2), Attention("bf16", 256, 8, 2, invariant=True), Attention("fp32", 128, 8, 2)]
WIDE += [GEMMA_4, replace(GEMMA_4, invariant=True)]


def many() -> list[Attention]:
    found = []
    for dtype, d in product(DTYPES, (64, 80, 96, 128, 256)):
        found.append(Attention(dtype, d, 8, 2))
        found.append(Attention(dtype, d, 12, 2, block_size=128, window=100, fp8=True, norms=True, invariant=True))
    for dtype, window, capped in product(("bf16", "fp16"), (0, 100), (False, True)):
        found.append(Attention(dtype, 512, 16, 1, window=window, capped=capped, norms=True))
        found.append(Attention(dtype, 512, 6, 2, 64, window, fp8=True, invariant=True, capped=capped))
    found += [Attention("bf16", d, 4, 1, fp8=fp8) for d, fp8 in product((272, 512), (False, True))]
    # Groups that fill a part of a tile, one tile or several tiles; every block size.
    found += [Attention("bf16", 128, heads, 1, invariant=True) for heads in (1, 7, 16, 48, 64, 71)]
    for d, invariant in product((64, 128, 256), (False, True)):
        found += [Attention("bf16", d, 8, 2, fp8=fp8, invariant=invariant) for fp8 in (False, True)]
    found += [Attention(dtype, d, 8, 2, capped=True, invariant=True) for dtype, d in (("bf16", 64), ("fp16", 256))]
    found += [Attention("bf16", d, 64, 8, window=128, capped=True) for d in (64, 256)]
    found += [Attention("fp32", 256, heads, 1) for heads in (1, 32)]
    found += [Attention("bf16", 64, 14, 2, block_size=size) for size in (8, 16, 32, 64, 128)]
    return found


class Target:
    """A driver with the methods that Triton calls before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Replaces Triton's launcher."""

    def __init__(self, capability: int, keep: Path | None = None, once: bool = False) -> None:
        triton.runtime.driver.set_active(Target(capability))
        self.keep, self.once = keep, once
        self.launched: dict[tuple[str, str], list[str]] = {}  # hashes of the kernels of a name and a shape
        global large_shared_memory, compute_capability
        compute_capability = capability
        large_shared_memory = capability in (90, 100)
        self.run, self.what, self.seen = JITFunction.run, "", set()
        JITFunction.run = lambda kernel, *args, **kwargs: self.compile(kernel, *args, **kwargs)

    def compile(self, kernel: JITFunction, *args: object, **kwargs: object) -> None:
        if self.once and any(name == kernel.__name__ for name, _ in self.launched):
            return
        start = time.perf_counter()
        try:
            compiled = self.run(kernel, *args, **kwargs | {"warmup": True})
        except Exception as error:
            text = "".join(f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e)
            print(json.dumps({"kernel": kernel.__name__, "for": self.what, "error": text[-2000:]}), flush=True)
            return
        alike = self.launched.setdefault((kernel.__name__, self.what), [])
        if compiled.hash not in alike:
            alike.append(compiled.hash)
        if compiled.hash in self.seen:
            return
        self.seen.add(compiled.hash)
        ptx = compiled.asm["ptx"]
        line = {
            "kernel": kernel.__name__,
            "for": self.what,
            "shared": compiled.metadata.shared,
            **resources(compiled.kernel),
            "wide_loads": len(re.findall(r"ld\.global\S*\.v[24]", ptx)),
            "async_copies": len(re.findall(r"cp\.async\.c\S+ ", ptx)),
            "wgmma": ptx.count("wgmma.mma_async"),
            "shapes": sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx))),
            "mma": ptx.count("mma.sync"),
            "exponentials": len(re.findall(r"\bex2\.", ptx)),
            "fused": len(re.findall(r"\bfma\.rn\.(ftz\.)?f32", ptx)),
            "seconds": round(time.perf_counter() - start, 2),
        }
        if self.keep:
            line |= {"warps": compiled.metadata.num_warps, "file": f"{len(self.seen):03d}"}
            line["number"] = alike.index(compiled.hash)
            (self.keep / f"{line['file']}.ptx").write_text(ptx)
            (self.keep / f"{line['file']}.cubin").write_bytes(compiled.kernel)
        print(json.dumps(line), flush=True)


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread and its bytes of local memory, where registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(usage["REG"]), "spilled": int(usage["STACK"]) + int(usage["LOCAL"])}


def make_ops(dtype: str, fp8: bool = False, invariant: bool = False) -> TritonOps:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True  # allows tensors in host memory
        kv_dtype = torch.float8_e4m3fn if fp8 else None
        ops = TritonOps("cpu", DTYPES[dtype], kv_dtype, batch_invariant=invariant)
    # An H200 has 132 multiprocessors. With few, no keys of prefill are cut into chunks.
    ops.launch_options = replace(
        ops.launch_options,
        multiprocessors=132,
        large_shared_memory=large_shared_memory,
        dependent_launch=compute_capability >= 90,
    )
    return ops


def attend(shape: Attention) -> None:
    """Launch rope, and attention of decode rows alone and with prefill, with and without fresh keys."""
    ops = make_ops(shape.dtype, shape.fp8, shape.invariant)
    heads, kv_heads, d, tokens = shape.heads, shape.kv_heads, shape.head_dim, 12
    caches = ops.alloc_kv_cache(8, kv_heads, shape.block_size, d)
    qkv = torch.zeros(tokens, (heads + 2 * kv_heads) * d, dtype=ops.dtype)
    norm = torch.zeros(d, dtype=ops.dtype) if shape.norms else None
    where = torch.zeros(tokens, dtype=torch.int32), torch.zeros(64, d), torch.zeros(tokens, dtype=torch.int64)
    for keep_k in (False, True):
        q = rope_and_cache(qkv, *where, *caches, heads, kv_heads, norm, norm, 1e-6, keep_k)
        if norm is not None:
            rope_and_cache(qkv, *where, *caches, heads, kv_heads, norm, norm, 1e-6, keep_k, norm)
    dependent = ops.launch_options.dependent_launch and not shape.invariant
    if dependent:
        rope_and_cache(qkv, *where, *caches, heads, kv_heads, norm, norm, 1e-6, pdl=True)
    table = torch.zeros(tokens, 4096 // shape.block_size, dtype=torch.int32)  # room for several chunks in each mode
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    fresh = tuple(qkv.view(tokens, -1, d)[:, heads:].split(kv_heads, dim=1))
    for sequences in (tokens, 2):
        of_step = table[:sequences], torch.zeros(sequences, dtype=torch.int32), starts[: sequences + 1]
        split = sequences < tokens
        step = AttentionPlan(ops.launch_options, *of_step, split=split)
        extras = (torch.zeros(heads), 30.0) if shape.capped else (None, 0.0)
        step.attend(q, *caches, 0.1, shape.window, torch.empty_like(q), fresh if split else None, *extras)
        if split and compute_capability == 90:
            step.options = replace(step.options, hopper_prefill=True)
            step.attend(q, *caches, 0.1, shape.window, torch.empty_like(q), fresh, *extras)
        if dependent and not split:
            step.dependent = True
            step.attend(q, *caches, 0.1, shape.window, torch.empty_like(q), None, *extras)


def rows(dtype: str) -> None:
    """Launch the kernels that do not depend on heads: norms, activation, embedding, matmul."""
    ops = make_ops(dtype)
    for hidden in (1024, 2880):  # the second is not a power of two
        x, weight = torch.zeros(2, hidden, dtype=ops.dtype), torch.zeros(hidden, dtype=ops.dtype)
        ops.rms_norm(x, weight, 1e-6)
        ops.add_rms_norm(x, x.clone(), weight, 1e-6)
        for integer in (torch.int32, torch.int64):
            ops.embed(torch.zeros(2, dtype=integer), torch.zeros(32, hidden, dtype=ops.dtype))
    for kind in KINDS:
        for tokens in (2, 80):
            ops.linear(torch.zeros(tokens, 64, dtype=ops.dtype), ops.pack_linear(coded(kind, 96, 64)))
    if compute_capability >= 89:  # older GPUs have no fp8
        for width in (1024, 2880, 14336):
            quantize_rows(torch.zeros(2, width, dtype=ops.dtype))
    gate_up = ops.pack_gate_up(torch.zeros(2 * 384, 64, dtype=ops.dtype))
    ops.linear_silu_mul(torch.zeros(2, 64, dtype=ops.dtype), gate_up)
    invariant = make_ops(dtype, invariant=True)
    for depth in (128, 200):  # whole tiles, and a partial tile
        packed = invariant.pack_linear(torch.zeros(96, depth, dtype=ops.dtype), torch.zeros(96, dtype=ops.dtype))
        invariant.linear(torch.zeros(2, depth, dtype=ops.dtype), packed)
        invariant.linear_logits(torch.zeros(2, depth, dtype=ops.dtype), packed)
    for tokens, columns in ((2, 2064), (130, 96), (130, 12800)):  # with the case above, one case for each size of tiles
        packed = invariant.pack_linear(torch.zeros(columns, 128, dtype=ops.dtype))
        invariant.linear(torch.zeros(tokens, 128, dtype=ops.dtype), packed)


def coded(kind: str, n: int, k: int) -> GroupedWeight:
    """Return weights [n, k] of codes; k: a multiple of 32."""
    zeros = torch.zeros(n, k // 32, dtype=torch.uint8) if kind in MAX_ZEROS else None
    return GroupedWeight(torch.zeros(n, k, dtype=torch.uint8), torch.ones(n, k // 32), kind, zeros)


# Hidden and inner features of Qwen3-0.6B and of Llama-3.1-8B.
WIDTHS = [(1024, 3072), (4096, 14336)]


def few_rows(dtype: str) -> None:
    """Launch the products of steps of one and of eight rows: after a norm, with a gate, and with a sum."""
    ops = make_ops(dtype)
    options = ops.launch_options.multiprocessors, ops.launch_options.dependent_launch
    for rows, (hidden, inner) in product((1, 8), WIDTHS):
        x, wide = (torch.zeros(rows, width, dtype=ops.dtype) for width in (hidden, inner))
        norm, bias = x[0], torch.zeros(2 * hidden, dtype=ops.dtype)
        # The weights are views of one row: a launch only compiles.
        weight, gate_up = norm.expand(2 * hidden, hidden), norm.expand(2 * inner, hidden)
        products.product(x, weight, bias, *options, norm)
        products.product(x, gate_up, None, *options, norm, gate=products.SILU_MUL)
        products.product(wide, wide[0].expand(hidden, inner), None, *options, residual=x)


def experts(dtype: str) -> None:
    """Launch the kernels of mixtures of experts with each size of tiles, with biases, and with each kind of codes."""
    ops = make_ops(dtype)
    for routing, tokens, biased in (
        (Routing(128, 8, normalised=True), 2, False),
        (Routing(8, 2, normalised=False), 200, False),
        (Routing(8, 2, normalised=True), 800, False),
        (Routing(8, 2, normalised=True, activation=GELU), 2, False),
        (Routing(32, 4, normalised=True, activation=CLAMPED), 2, True),
    ):
        hidden, inner = (200, 96) if biased else (128, 64)
        weights = ExpertWeights(
            torch.zeros(2 * inner, hidden, dtype=ops.dtype),
            torch.zeros(hidden, inner, dtype=ops.dtype),
            torch.zeros(2 * inner, dtype=ops.dtype) if biased else None,
            torch.zeros(hidden, dtype=ops.dtype) if biased else None,
        )
        router = ops.pack_linear(torch.zeros(routing.num_experts, hidden, dtype=ops.dtype))
        packed = ops.pack_moe(routing, router, [weights] * routing.num_experts)
        # A launch only compiles, so that the chosen experts are undefined; nothing reads them on the host.
        ops.moe(torch.zeros(tokens, hidden, dtype=ops.dtype), packed)
    for kind in KINDS:
        of_codes = ExpertWeights(coded(kind, 128, 128), coded(kind, 128, 64))
        for experts, tokens in ((128, 2), (4, 200)):
            router = ops.pack_linear(torch.zeros(experts, 128, dtype=ops.dtype))
            packed = ops.pack_moe(Routing(experts, 4, normalised=True), router, [of_codes] * experts)
            ops.moe(torch.zeros(tokens, 128, dtype=ops.dtype), packed)


def adapters(dtype: str) -> None:
    """Launch the products of adapters with factors of both types, and with small and large ranks."""
    ops = make_ops(dtype)
    for factors, rank in ((torch.bfloat16, 8), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 16)):
        part = LoraPart(torch.zeros(rank, 128, dtype=factors), torch.zeros(128, rank, dtype=factors), 1.0)
        rows = TritonAdaptedRows([ops.pack_adapter([{"o": [part]}], 0)], np.zeros(2, dtype=np.int32), ops.device)
        rows.apply(0, "o", torch.zeros(2, 128, dtype=ops.dtype), torch.zeros(2, 128, dtype=ops.dtype))


def blocks() -> None:
    ops = make_ops("bf16")
    stack, _ = make_cache_stack(ops, 2)
    host = ops.alloc_host_blocks(stack, 4)
    for count in (1, 2):
        src, dst = torch.arange(count), torch.arange(count) + 2
        ops.copy_blocks(stack, src, dst)
        ops.swap_out(stack, host, src, dst)
        ops.swap_in(stack, host, src, dst)


def logits() -> None:
    ops = make_ops("bf16")
    for vocabulary in (151936, 4099):  # rows begin at multiples of 16 bytes, or do not
        values, count = torch.zeros(3, vocabulary), torch.zeros(3, dtype=torch.int32)
        real = torch.ones(3)
        ops.argmax(values)
        ops.sample(values, real, count, real, real, torch.zeros(3, dtype=torch.float64))
        ops.penalise(values, torch.zeros(4, dtype=torch.int32), count, count, real, real, real)
        ops.top_logprobs(values, 20)
        for integer in (torch.int32, torch.int64):
            ops.logprobs_of(values, torch.zeros(3, dtype=integer))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", help="I/N: one of N parts of all that is supported, instead of a few shapes")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 90 is Hopper, 80 Ampere, 100 Blackwell")
    parser.add_argument("--served", action="store_true", help="shapes of models that Quire serves")
    parser.add_argument("--shape", choices=[str(shape) for shape in SERVED], help="attention of one of these shapes")
    parser.add_argument("--once", action="store_true", help="only the first launch of each kernel")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write PTX and machine code of each kernel there")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    part, parts = (int(number) for number in (args.part or "0/1").split("/"))
    compiler = Compiler(args.capability, args.keep, args.once)
    torch.set_num_threads(1)
    if args.shape:
        shape = next(one for one in SERVED if str(one) == args.shape)
        compiler.what = args.shape
        attend(shape)
        if not args.once:
            return 0
    if part == 0:
        for dtype in DTYPES if args.part else ("bf16",):
            compiler.what = dtype
            rows(dtype)
            few_rows(dtype)
            experts(dtype)
            adapters(dtype)
        compiler.what = ""
        if large_shared_memory or args.part or args.served:  # they need almost no shared memory
            blocks()
            logits()
    few = FEW if large_shared_memory else WIDE
    served = [shape for shape in SERVED if args.capability >= 89 or not shape.fp8]  # older GPUs have no fp8
    for shape in (many() if args.part else served if args.served else few)[part::parts]:
        compiler.what = str(shape)
        attend(shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
