"""Measures each Triton kernel on this GPU against the card's measured copy bandwidth and matrix multiplication rate.

    make gpu-check ARGS="--only bandwidth"

Each case has a number of bytes to move and of floating-point operations to do. The floor of a case is the time that the
card takes for them, the larger of the two times. The share is the floor divided by the median of several runs. The
L2 cache is overwritten between runs. A case that can be captured runs as a CUDA graph, so that the host's launch time
does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.gpu.ops import TritonOps  # imports Triton

FLOAT32, INT32, INT64 = 4, 4, 8  # bytes
FLUSH_BYTES = 256 << 20  # several times the L2 cache of any card


@dataclass(frozen=True)
class KernelWork:
    """The work of a case. bytes: moved in the device's memory or over the bus; flops: of matrix multiplications."""

    bytes: int = 0
    flops: int = 0

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the least seconds that the work takes at these rates."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


@dataclass(frozen=True)
class GpuKernelCase:
    """A case: work(itemsize of the activations), and make(ops), which returns a function that does the work once."""

    name: str
    is_captured = True

    @property
    def bus(self) -> str:
        """Return "to host" or "to device"; "" for the device's memory."""
        return ""

    def work(self, itemsize: int) -> KernelWork:
        raise NotImplementedError

    def make(self, ops: TritonOps) -> Callable[[], object]:
        raise NotImplementedError


@dataclass(frozen=True)
class Heads:
    """The heads and block size of a model: Llama-3.1-8B by default."""

    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    block_size: int = 16

    @property
    def key_values(self) -> int:
        """The number of values of k and v of one token in one layer."""
        return 2 * self.kv_heads * self.d


@dataclass(frozen=True)
class AttentionCase(GpuKernelCase):
    """Attention of sequences with `queries` tokens at the end of the context each. Planning is not measured."""

    lengths: tuple[int, ...]
    queries: int | None = None  # None: all of the context, with nothing cached
    heads: Heads = field(default_factory=Heads)
    hopper: bool = False  # by `kernels/gpu/hopper_prefill.py`; other cases are without it

    @property
    def counts(self) -> list[int]:
        return [n if self.queries is None else self.queries for n in self.lengths]

    @property
    def pairs(self) -> int:
        """The number of query-key pairs that a causal mask leaves."""
        return sum(n * count - count * (count - 1) // 2 for n, count in zip(self.lengths, self.counts, strict=True))

    def work(self, itemsize: int) -> KernelWork:
        h, tokens = self.heads, sum(self.counts)
        values = sum(self.lengths) * h.key_values + 2 * tokens * h.heads * h.d  # q in, result out
        return KernelWork(values * itemsize, 4 * self.pairs * h.heads * h.d)

    def make(self, ops: TritonOps) -> Callable[[], object]:
        from quire.kernels.gpu.attention import AttentionPlan

        h, tokens, device = self.heads, sum(self.counts), ops.device
        per_sequence = [-(-n // h.block_size) for n in self.lengths]
        ids = torch.randperm(sum(per_sequence), dtype=torch.int32).split(per_sequence)  # type: ignore[no-untyped-call]
        tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(device)
        caches = ops.alloc_kv_cache(sum(per_sequence), h.kv_heads, h.block_size, h.d)
        for cache in caches:
            cache.normal_()
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0).int().to(device)
        qkv = torch.randn(tokens, h.heads + 2 * h.kv_heads, h.d, device=device).to(ops.dtype)
        q = qkv[:, : h.heads].contiguous()
        split = self.queries is None
        k, v = qkv[:, h.heads :].chunk(2, dim=1)
        if split:  # the cache has these keys and values, too
            at = [torch.arange(n, device=device) for n in self.lengths]
            blocks = torch.cat([row[tokens // h.block_size] for row, tokens in zip(tables.long(), at, strict=True)])
            for cache, rows in zip(caches, (k, v), strict=True):
                cache[blocks, :, torch.cat(at) % h.block_size] = rows
        options = replace(ops.launch_options, hopper_prefill=self.hopper)
        plan = AttentionPlan(options, tables, lengths, starts, split=split)
        fresh, scale, out = (k, v) if split else None, float(h.d**-0.5), torch.empty_like(q)
        return lambda: plan.attend(q, *caches, scale, 0, out, fresh)


@dataclass(frozen=True)
class RopeAndCache(GpuKernelCase):
    tokens: int
    heads: Heads = field(default_factory=Heads)

    def work(self, itemsize: int) -> KernelWork:
        h = self.heads
        values = 2 * self.tokens * (h.heads * h.d + h.key_values)  # read once, written once
        return KernelWork(values * itemsize + self.tokens * (h.d * FLOAT32 + INT32 + INT64))

    def make(self, ops: TritonOps) -> Callable[[], object]:
        h, device = self.heads, ops.device
        blocks = -(-self.tokens // h.block_size)
        caches = ops.alloc_kv_cache(blocks, h.kv_heads, h.block_size, h.d)
        qkv = torch.randn(self.tokens, (h.heads + 2 * h.kv_heads) * h.d, device=device).to(ops.dtype)
        positions = torch.arange(self.tokens, dtype=torch.int32, device=device)
        cos_sin = torch.rand(self.tokens, h.d, device=device)
        slots = torch.randperm(blocks * h.block_size, device=device)[: self.tokens]
        return lambda: ops.rope_and_cache(qkv, positions, cos_sin, slots, *caches, h.heads, h.kv_heads)


@dataclass(frozen=True)
class AddRmsNorm(GpuKernelCase):
    tokens: int
    hidden: int = 4096

    def work(self, itemsize: int) -> KernelWork:
        values = (4 * self.tokens + 1) * self.hidden  # x, the residual twice, the result; the weight
        return KernelWork(values * itemsize)

    def make(self, ops: TritonOps) -> Callable[[], object]:
        x, residual = torch.randn(2, self.tokens, self.hidden, device=ops.device).to(ops.dtype)
        weight = torch.ones(self.hidden, dtype=ops.dtype, device=ops.device)
        return lambda: ops.add_rms_norm(x, residual, weight, 1e-5)


@dataclass(frozen=True)
class SiluMul(GpuKernelCase):
    tokens: int
    inner: int = 14336

    def work(self, itemsize: int) -> KernelWork:
        return KernelWork(3 * self.tokens * self.inner * itemsize)

    def make(self, ops: TritonOps) -> Callable[[], object]:
        from quire.kernels.gpu.rows import silu_mul

        gate_up = torch.randn(self.tokens, 2 * self.inner, device=ops.device).to(ops.dtype)
        out = gate_up.new_empty(self.tokens, self.inner)
        return lambda: silu_mul(gate_up, out)


@dataclass(frozen=True)
class Moves(GpuKernelCase):
    """A copy of `blocks` blocks in all layers. bus: to or from host memory. Ids come from the host each time."""

    bus: str = ""
    blocks: int = 256
    layers: int = 32
    heads: Heads = field(default_factory=Heads)
    is_captured = False

    def work(self, itemsize: int) -> KernelWork:
        size = self.blocks * self.layers * self.heads.block_size * self.heads.key_values * itemsize
        return KernelWork(size if self.bus else 2 * size)  # a copy on the device reads and writes there

    def make(self, ops: TritonOps) -> Callable[[], object]:
        from quire.kernels.gpu.block_moves import BlockMover

        h, shape = self.heads, (2 * self.blocks, self.heads.kv_heads, self.heads.block_size, self.heads.d)
        caches = [ops.alloc_kv_cache(shape[0], h.kv_heads, h.block_size, h.d) for _ in range(self.layers)]
        table = BlockMover([cache for pair in caches for cache in pair])
        ids = torch.randperm(2 * self.blocks, device="cpu")
        src, dst = ids[: self.blocks].contiguous(), ids[self.blocks :].contiguous()

        def with_caches(function: Callable[[], object]) -> Callable[[], object]:
            return lambda: (function(), caches)[0]  # the mover does not hold the caches

        if not self.bus:
            return with_caches(lambda: table.copy(src, dst))
        host_shape = (self.blocks, self.layers, 2, *shape[1:])
        host = torch.zeros(host_shape, dtype=ops.kv_dtype, device="cpu", pin_memory=ops.device.type == "cuda")
        there = torch.arange(self.blocks, device="cpu")
        if self.bus == "to host":
            return with_caches(lambda: table.swap_out(host, src, there))
        return with_caches(lambda: table.swap_in(host, there, src))


@dataclass(frozen=True)
class Logits(GpuKernelCase):
    """An operation on logits. The floor reads each row once; the passes of a search beyond that lower the share."""

    method: str  # "argmax", "sample", "top_logprobs"
    rows: int = 256
    vocabulary: int = 128256
    top_k: int = 0
    top_p: float = 1.0

    def work(self, itemsize: int) -> KernelWork:
        return KernelWork(self.rows * self.vocabulary * FLOAT32)

    def make(self, ops: TritonOps) -> Callable[[], object]:
        logits = torch.randn(self.rows, self.vocabulary, device=ops.device) * 3
        if self.method == "argmax":
            return lambda: ops.argmax(logits)
        if self.method == "top_logprobs":
            return lambda: ops.top_logprobs(logits, min(20, self.vocabulary))
        columns = (1.0, torch.float32), (self.top_k, torch.int32), (self.top_p, torch.float32), (0.0, torch.float32)
        t, k, p, m = (torch.full((self.rows,), value, dtype=dtype, device=ops.device) for value, dtype in columns)
        uniform = torch.rand(self.rows, dtype=torch.float64, device=ops.device)
        return lambda: ops.sample(logits, t, k, p, m, uniform)


@dataclass(frozen=True)
class Product(GpuKernelCase):
    """A product of a linear layer. how: "cublas" or "cublaslt", the libraries of torch, or "triton", unsplit tiles."""

    tokens: int
    features: tuple[int, int]  # of the output and of the input
    how: str

    def work(self, itemsize: int) -> KernelWork:
        (n, k), t = self.features, self.tokens
        return KernelWork((n * k + t * (n + k)) * itemsize, 2 * t * n * k)

    def make(self, ops: TritonOps) -> Callable[[], object]:
        from quire.kernels.gpu.invariant_matmul import invariant_matmul

        (n, k), choose = self.features, torch.backends.cuda.preferred_blas_library
        x, weight = (torch.randn(rows, k, device=ops.device).to(ops.dtype) for rows in (self.tokens, n))
        out = x.new_empty(self.tokens, n)
        if self.how == "triton":
            return lambda: invariant_matmul(x, weight, None, out, x.dtype)

        def run() -> None:
            before = choose()
            choose(self.how)
            torch.mm(x, weight.T, out=out)
            choose(before)

        return run


# Layers of Llama-3.1-8B. A layer with 4,096 output features has 64 tiles of 128 x 128 for 256 rows.
LAYERS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
PRODUCTS = [*((name, tokens) for tokens in (64, 256) for name in LAYERS), ("down", 512)]

CASES: list[GpuKernelCase] = [
    AttentionCase("decode attention, 256 x 1k", (1024,) * 256, 1),
    AttentionCase("decode attention, 1 x 32k + 63 x 1k", (32768, *(1024,) * 63), 1),
    AttentionCase("decode attention, 1 x 1k", (1024,), 1),
    AttentionCase("prefill attention, 8k, nothing cached", (8192,)),
    AttentionCase("prefill attention, 2k on 8k cached", (8192,), 2048),
    AttentionCase("extend attention, 64 on 32k cached", (32832,), 64),
    RopeAndCache("rotation and cache, 256 tokens", 256),
    RopeAndCache("rotation and cache, 8k tokens", 8192),
    AddRmsNorm("add and norm, 256 tokens", 256),
    AddRmsNorm("add and norm, 8k tokens", 8192),
    SiluMul("silu times up, 256 tokens", 256),
    SiluMul("silu times up, 8k tokens", 8192),
    Moves("copy of 256 blocks"),
    Moves("swap of 256 blocks to the host", "to host"),
    Moves("swap of 256 blocks to the device", "to device"),
    Logits("argmax, 256 x 128k", "argmax"),
    Logits("draw, 256 x 128k", "sample"),
    Logits("draw, top-k 50, 256 x 128k", "sample", top_k=50),
    Logits("draw, top-p 0.9, 256 x 128k", "sample", top_p=0.9),
    Logits("draw, top-k and top-p, 1 x 128k", "sample", rows=1, top_k=50, top_p=0.9),
    Logits("argmax, 1 x 152k", "argmax", rows=1, vocabulary=151936),
    Logits("draw, 1 x 152k", "sample", rows=1, vocabulary=151936),
    Logits("draw, top-k 50, 1 x 152k", "sample", rows=1, vocabulary=151936, top_k=50),
    Logits("draw, top-p 0.9, 1 x 152k", "sample", rows=1, vocabulary=151936, top_p=0.9),
    Logits("draw, top-p 0.9, 32 x 152k", "sample", rows=32, vocabulary=151936, top_p=0.9),
    Logits("top 20 log-probabilities, 64 x 128k", "top_logprobs", rows=64),
    *(
        Product(f"product {name}, {tokens} rows, {how}", tokens, LAYERS[name], how)
        for name, tokens in PRODUCTS
        for how in ("cublas", "cublaslt", "triton")
    ),
    # The last one: it has not run on a card yet, and the results of all others are saved.
    AttentionCase("prefill attention by warps with roles, 8k", (8192,), hopper=True),
]


@dataclass(frozen=True)
class Card:
    """The rates of a card, as the fastest of torch's operations reach them, not as published."""

    name: str
    copy_bytes_per_s: float  # read and written
    flops_per_s: float  # of bfloat16 products
    bus_bytes_per_s: float  # from and to pinned memory

    def floor_s(self, case: GpuKernelCase, itemsize: int) -> float:
        rate = self.bus_bytes_per_s if case.bus else self.copy_bytes_per_s
        return case.work(itemsize).floor_s(rate, self.flops_per_s)


@dataclass(frozen=True)
class GpuKernelResult:
    name: str
    ms: float
    gb_per_s: float
    tflop_per_s: float
    share: float  # of the floor; 1 is perfect

    @classmethod
    def of(cls, case: GpuKernelCase, card: Card, itemsize: int, seconds: float) -> GpuKernelResult:
        work = case.work(itemsize)
        rates = work.bytes / seconds / 1e9, work.flops / seconds / 1e12
        return cls(case.name, seconds * 1e3, *rates, card.floor_s(case, itemsize) / seconds)


class Timer:
    """Measures the median time of runs on the device."""

    def __init__(self, repeat: int, flush_bytes: int = FLUSH_BYTES) -> None:
        self.repeat = repeat
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], object], captured: bool = True) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        times: list[float] = []
        for _ in range(self.repeat):
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(times)


class CardProbe(NamedTuple):
    """The sizes with which the rates of a card are measured."""

    copy_bytes: int = 1 << 30
    matrix: int = 8192  # rows and columns
    flush_bytes: int = FLUSH_BYTES


def measure_card(timer: Timer, probe: CardProbe = CardProbe()) -> Card:  # noqa: B008 (it is immutable)
    """Measure the rates of the current CUDA device."""
    size, n = probe.copy_bytes, probe.matrix
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
    a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
    product: Tensor = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    part = source[: len(host)]
    # The driver's copy within a graph reached 2.8 TB/s on an H200, where this kernel reached 4.1 TB/s.
    words, negated = source.view(torch.int64), target.view(torch.int64)
    return Card(
        torch.cuda.get_device_name(),
        2 * size / timer.seconds(lambda: torch.bitwise_not(words, out=negated)),
        2 * n**3 / timer.seconds(lambda: torch.mm(a, b, out=product)),
        len(host) / timer.seconds(lambda: part.copy_(host, non_blocking=True), captured=False),
    )


def run(
    dtype: torch.dtype,
    repeat: int,
    save: Callable[[dict[str, Any]], None],
    cases: list[GpuKernelCase] = CASES,
    probe: CardProbe = CardProbe(),  # noqa: B008 (it is immutable)
) -> dict[str, Any]:
    """Measure the cases, and call `save` after each case. Return the rates of the card and a row for each case."""
    from quire.kernels.gpu.ops import TritonOps

    timer, ops = Timer(repeat, probe.flush_bytes), TritonOps(dtype=dtype)
    card = measure_card(timer, probe)
    results: dict[str, Any] = {"card": asdict(card), "kernels": []}
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    for case in cases:
        if isinstance(case, AttentionCase) and case.hopper and not is_hopper:
            continue
        try:
            seconds = timer.seconds(case.make(ops), case.is_captured)
        except Exception as error:  # of this kernel; the next kernels are still measured
            results["kernels"].append({"name": case.name, "error": f"{type(error).__name__}: {error}"})
        else:
            results["kernels"].append(asdict(GpuKernelResult.of(case, card, dtype.itemsize, seconds)))
        print(results["kernels"][-1], flush=True)
        save(results)
        torch.cuda.empty_cache()
    return results | {"status": "failed" if any("error" in row for row in results["kernels"]) else "passed"}
