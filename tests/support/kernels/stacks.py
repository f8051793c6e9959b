"""Stacks of small random layers with full caches, and a step of them."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from quire import kernels
from quire.kernels.lora import LoraLayer, LoraPart
from quire.kernels.moe import GELU, SILU, ExpertNorms, ExpertWeights, Routing
from quire.kernels.ops import CacheStack, LayerStack, PerLayerInput

HIDDEN, INNER, HEADS, KV_HEADS, D, BLOCK = 72, 88, 6, 2, 32, 16
BLOCKS = 20
LENGTHS, QUERIES = [40, 17, 150], [1, 5, 30]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)


def make_layers(
    ops: kernels.Ops, windows: list[int], norms: bool, biases: bool, times: int = 1
) -> list[SimpleNamespace]:
    """Make a layer for each window. times: factor of the outputs of `o` and `down`."""

    def linear(pack, n: int, k: int, times: int = 1):
        return pack(random(n, k, dtype=ops.dtype) * times, random(n, dtype=ops.dtype) * times if biases else None)

    return [
        SimpleNamespace(
            input_norm=random(HIDDEN, dtype=ops.dtype),
            qkv=linear(ops.pack_linear, (HEADS + 2 * KV_HEADS) * D, HIDDEN),
            q_norm=random(D, dtype=ops.dtype) if norms else None,
            k_norm=random(D, dtype=ops.dtype) if norms else None,
            sliding_window=window,
            o=linear(ops.pack_linear, HIDDEN, HEADS * D, times),
            mlp_norm=random(HIDDEN, dtype=ops.dtype),
            gate_up=linear(ops.pack_gate_up, 2 * INNER, HIDDEN),
            down=linear(ops.pack_linear, HIDDEN, INNER, times),
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
            uses_key_ends=False,
        )
        for window in windows
    ]


def add_extras(ops: kernels.Ops, layers: list[SimpleNamespace]) -> list[SimpleNamespace]:
    """Give layers the parts of gpt-oss and Gemma: sinks, rotations of their own, norms of outputs, GELU, experts."""
    for index, layer in enumerate(layers):
        layer.sinks = torch.randn(HEADS) if index % 2 == 0 else None
        layer.cos_sin = torch.rand(160, D) if index % 2 == 1 else None
        layer.post_attention_norm = random(HIDDEN, dtype=ops.dtype) + 1
        layer.post_mlp_norm = random(HIDDEN, dtype=ops.dtype) + 1
        layer.gate = GELU
        if index == len(layers) - 1:
            router = ops.pack_linear(random(4, HIDDEN, dtype=ops.dtype))
            experts = [
                ExpertWeights(random(2 * 24, HIDDEN, dtype=ops.dtype), random(HIDDEN, 24, dtype=ops.dtype))
                for _ in range(4)
            ]
            layer.moe = ops.pack_moe(Routing(4, 2, normalised=True), router, experts)
            layer.gate_up = layer.down = None
    return layers


FULL_D, INPUT_WIDTH = 48, 20


def gemma4_arguments(
    ops: kernels.Ops, num_shared: int = 2
) -> tuple[list[SimpleNamespace], torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Return the arguments of `stack_layers` for six layers with all that models of Gemma 4 have.

    Even layers have a window and heads of D, odd layers one kv head of FULL_D, and two layers have experts. The last
    `num_shared` layers share caches.
    """
    layers, caches = make_layers(ops, [20, 0] * 3, norms=True, biases=False), []
    of_kind: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
    cos_sin, own = torch.rand(160, FULL_D), torch.rand(160, D)
    for index, layer in enumerate(layers):
        is_full, layer.shares_kv = layer.sliding_window == 0, index >= 6 - num_shared
        d, kv_heads = (FULL_D, 1) if is_full else (D, KV_HEADS)
        layer.cos_sin = None if is_full else own
        kv_rows = 0 if layer.shares_kv else 2 * kv_heads
        layer.qkv = ops.pack_linear(random((HEADS + kv_rows) * d, HIDDEN, dtype=ops.dtype))
        layer.o = ops.pack_linear(random(HIDDEN, HEADS * d, dtype=ops.dtype))
        layer.q_norm, layer.k_norm, layer.v_norm = (random(d, dtype=ops.dtype) + 1 for _ in range(3))
        inner = 2 * INNER if layer.shares_kv else INNER
        layer.gate_up = ops.pack_gate_up(random(2 * inner, HIDDEN, dtype=ops.dtype))
        layer.down = ops.pack_linear(random(HIDDEN, inner, dtype=ops.dtype))
        layer.post_attention_norm, layer.post_mlp_norm = (random(HIDDEN, dtype=ops.dtype) + 1 for _ in range(2))
        layer.gate, layer.output_scale, layer.uses_key_ends = GELU, 0.75 + index / 8, not is_full
        gate = ops.pack_linear(random(INPUT_WIDTH, HIDDEN, dtype=ops.dtype))
        projection = ops.pack_linear(random(HIDDEN, INPUT_WIDTH, dtype=ops.dtype))
        layer.per_layer_input = PerLayerInput(gate, projection, random(HIDDEN, dtype=ops.dtype) + 1)
        if index % 3 == 1:
            experts = [
                ExpertWeights(random(2 * 24, HIDDEN, dtype=ops.dtype), random(HIDDEN, 24, dtype=ops.dtype))
                for _ in range(4)
            ]
            router = ops.pack_linear(random(4, HIDDEN, dtype=ops.dtype))
            layer.moe = ops.pack_moe(Routing(4, 2, True, GELU), router, experts, torch.rand(4) + 0.5)
            layer.expert_norms = ExpertNorms(*(random(HIDDEN, dtype=ops.dtype) + 1 for _ in range(4)))
        if not layer.shares_kv:
            of_kind[is_full] = ops.alloc_kv_cache(BLOCKS, kv_heads, BLOCK, d)
        caches.append(of_kind[is_full])
    generator = torch.Generator("cpu").manual_seed(0)
    for cache in {id(one): one for pair in caches for one in pair}.values():
        cache.copy_(torch.randn(cache.shape, generator=generator, device="cpu").to(cache.dtype))
    return layers, random(HIDDEN, dtype=ops.dtype), caches, cos_sin


def make_caches(ops: kernels.Ops, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    caches = [ops.alloc_kv_cache(BLOCKS, KV_HEADS, BLOCK, D) for _ in range(count)]
    generator = torch.Generator("cpu").manual_seed(0)  # each call makes the same caches
    for cache in (cache for pair in caches for cache in pair):
        if cache.itemsize > 1:
            cache.copy_(torch.randn(cache.shape, generator=generator, device="cpu").to(ops.kv_dtype))
        else:  # any byte is a value; the scales of int8 are small
            cache.copy_(
                (torch.rand(cache.shape, generator=generator, device="cpu") * 63).to(torch.int8).view(cache.dtype)
            )
    return caches


def step() -> dict[str, torch.Tensor]:
    # Sequences may share the blocks that they only read. Each block that is written has one owner.
    order = torch.randperm(BLOCKS)
    written, read = order[:6], order[6:]
    tables = torch.stack([read[torch.randperm(len(read))[:10]] for _ in LENGTHS])
    tables[0, 2], tables[1, :2], tables[2, 7:] = written[0], written[1:3], written[3:]
    positions = [torch.arange(n - q, n) for n, q in zip(LENGTHS, QUERIES, strict=True)]
    slots = [tables[s, p // BLOCK] * BLOCK + p % BLOCK for s, p in enumerate(positions)]
    assert len(torch.cat(slots).unique()) == sum(QUERIES)
    return {
        "positions": torch.cat(positions).int(),
        "slot_mapping": torch.cat(slots).int(),
        "block_tables": tables.int(),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *QUERIES]).cumsum(0).int(),
    }


def image_ends() -> torch.Tensor:
    """Return the ends of the keys that the tokens of `step` see, with images of which two end with their sequences."""
    ends = torch.cat([torch.arange(n - q, n) + 1 for n, q in zip(LENGTHS, QUERIES, strict=True)]).int()
    ends[2:6], ends[7:19], ends[20:36] = 17, 133, 150
    return ends


def stack_arguments(ops, windows, norms=False, biases=False, times=1):
    final_norm = random(HIDDEN, dtype=ops.dtype)
    made = make_layers(ops, windows, norms, biases, times)
    return made, final_norm, make_caches(ops, len(windows)), torch.rand(160, D)


def make_stack(ops: kernels.Ops, windows: list[int]) -> tuple[LayerStack, list[tuple[torch.Tensor, torch.Tensor]]]:
    made, final_norm, caches, cos_sin = stack_arguments(ops, windows)
    return ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2), caches


def make_cache_stack(ops: kernels.Ops, count: int) -> tuple[CacheStack, list[tuple[torch.Tensor, torch.Tensor]]]:
    caches = make_caches(ops, count)
    return ops.stack_caches(caches), caches


class Alike:
    """Two ranks with equal values: their sum is twice the value."""

    rank, size = 0, 2

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values.mul_(2)


def alone_and_added_up(ops: kernels.Ops) -> list[torch.Tensor]:
    """Return the outputs of layers whose `o` and `down` are doubled, and of two equal ranks. Both should be equal.

    The step has one token after cached ones, and a prompt of three tokens.
    """
    numbers = {
        "positions": [7, 0, 1, 2],
        "slot_mapping": [4 * BLOCK + 7, 9 * BLOCK, 9 * BLOCK + 1, 9 * BLOCK + 2],
        "block_tables": [[4], [9]],
        "seq_lens": [8, 3],
        "query_start_loc": [0, 1, 4],
    }
    few = {name: torch.tensor(values).int() for name, values in numbers.items()} | {"rows": torch.tensor([0, 3])}
    outputs = []
    for times, ranks in ((2, None), (1, Alike())):
        torch.manual_seed(3)
        residual = random(4, HIDDEN, dtype=ops.dtype)
        made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 20], norms=True, biases=True, times=times)
        stack = ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2, ranks)
        outputs.append(ops.decoder_layers(residual, stack, **few))
    return outputs


# --- adapters ---------------------------------------------------------------------------------------------------------
# Random low-rank adapters for the stacks of `stacks.py`.

# Offset, width and inputs of each projection, by linear layer.
PROJECTIONS = {
    "qkv": [(0, HEADS * D, HIDDEN), (HEADS * D, KV_HEADS * D, HIDDEN), ((HEADS + KV_HEADS) * D, KV_HEADS * D, HIDDEN)],
    "o": [(0, HIDDEN, HEADS * D)],
    "gate_up": [(0, INNER, HIDDEN), (INNER, INNER, HIDDEN)],
    "down": [(0, HIDDEN, INNER)],
}


def make_factors(
    layers: int, rank: int, dtype: torch.dtype = torch.float32, names: tuple[str, ...] = tuple(PROJECTIONS)
) -> list[LoraLayer]:
    """Make the factors of an adapter that changes these linear layers of each layer."""
    return [
        {
            name: [
                LoraPart(random(rank, k, dtype=dtype), random(width, rank, dtype=dtype), 0.5 + rank / 8, offset)
                for offset, width, k in PROJECTIONS[name]
            ]
            for name in names
        }
        for _ in range(layers)
    ]


def with_gains(layers: list[LoraLayer]) -> list[LoraLayer]:
    """Give the outputs of these factors gains around 1 and shifts around 0."""

    def gains(part: LoraPart) -> torch.Tensor:
        return torch.stack([1 + torch.randn(len(part.b)) / 4, torch.randn(len(part.b)) / 4])

    return [
        {name: [replace(part, gains=gains(part)) for part in parts] for name, parts in layer.items()}
        for layer in layers
    ]


def make_norms(layers: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Make norms of an adapter for each second layer, and a final one."""
    sizes = {"input_norm": HIDDEN, "mlp_norm": HIDDEN, "q_norm": D, "k_norm": D}
    own = [{name: random(size, dtype=dtype) for name, size in sizes.items()} if at % 2 else {} for at in range(layers)]
    return [*own, {"input_norm": random(HIDDEN, dtype=dtype)}]


def make_ends(rank: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> LoraLayer:
    """Make factors of embedding and head, those of the head with gains."""
    embedding = LoraPart(random(rank, vocabulary, dtype=dtype), random(HIDDEN, rank, dtype=dtype), 2.0)
    head = LoraPart(random(rank, HIDDEN, dtype=dtype), random(vocabulary, rank, dtype=dtype), 3.0)
    return {"embedding": [embedding], **with_gains([{"head": [head]}])[0]}


def merged(weight: torch.Tensor, parts: list[LoraPart]) -> torch.Tensor:
    """Return the weights [N, K] with these factors added."""
    weight = weight.clone()
    for part in parts:
        weight[part.offset : part.offset + len(part.b)] += part.scale * part.b.float() @ part.a.float()
    return weight


def prompts() -> dict[str, torch.Tensor]:
    """Make a step of whole prompts, as long as QUERIES, with blocks of their own."""
    tables = torch.arange(6).view(3, 2)
    positions = [torch.arange(length) for length in QUERIES]
    return {
        "positions": torch.cat(positions).int(),
        "slot_mapping": torch.cat(
            [tables[at, one // BLOCK] * BLOCK + one % BLOCK for at, one in enumerate(positions)]
        ).int(),
        "block_tables": tables.int(),
        "seq_lens": torch.tensor(QUERIES).int(),
        "query_start_loc": torch.tensor([0, *QUERIES]).cumsum(0).int(),
    }
