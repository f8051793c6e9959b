"""`decoder_layers` of the C++ kernels: a table of addresses that is made once, and one call per step."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.cpu.ranks import CpuRanks, GivenUp
from quire.kernels.layers import Caches, Stack

_LAYER_ADDRESSES = (
    *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "k_cache", "v_cache", "o", "o_bias"),
    *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
)
_STEP_ADDRESSES = (
    *("final_norm", "residual", "out", "positions", "cos_sin", "slots"),
    *("block_tables", "seq_lens", "query_start", "rows"),
)
_STEP_SIZES = (
    *("layer_count", "tokens", "row_count", "sequences", "table_width", "max_position", "block_count", "wide_slots"),
    *("hidden", "intermediate", "heads", "kv_heads", "head_dim", "block_size"),
)


class _Layer(Structure):
    """`Layer` in layers.h."""

    _fields_ = [*((name, c_void_p) for name in _LAYER_ADDRESSES), ("window", c_int64)]


class _Step(Structure):
    """`Step` in layers.h."""

    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in _STEP_ADDRESSES),
        *((name, c_int64) for name in _STEP_SIZES),
        ("eps", c_double),
        ("scale", c_double),
        ("ranks", c_void_p),
    ]


class CpuCaches:
    """Addresses of caches, and the stack of them itself, which keeps them alive."""

    def __init__(self, stack: Caches | Stack, dtype: torch.dtype) -> None:
        _, kv_heads, block_size, d = stack.check_caches(None, dtype)
        self.dtype, self.num_blocks, self.block_shape = dtype, stack.num_blocks, stack.block_shape
        self._kept = stack
        caches = [cache for pair in stack.kv_cache for cache in pair]  # in the order of a host block
        self.caches = (c_void_p * len(caches))(*map(checks.address, caches))
        self.block_bytes = kv_heads * block_size * d * dtype.itemsize  # in one cache


class CpuStack(CpuCaches):
    """Addresses of weights and caches, and the stack itself, which keeps them alive."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        self.hidden, (blocks, kv_heads, block_size, d) = stack.check(dtype)
        super().__init__(stack, dtype)
        self.stack = stack
        self.max_position, self.slots = stack.cos_sin.shape[0], blocks * block_size
        self._layers = (_Layer * len(stack.layers))()
        for to, layer, (k, v) in zip(self._layers, stack.layers, stack.kv_cache, strict=True):
            for name in ("input_norm", "mlp_norm", "q_norm", "k_norm"):
                setattr(to, name, checks.address(getattr(layer, name)))
            for name in ("qkv", "o", "gate_up", "down"):
                packed = getattr(layer, name)
                if packed.gate_up != (name == "gate_up") or packed.dtype is not dtype:
                    raise ValueError(f"{name} was packed for another use or another dtype")
                setattr(to, name, packed.weight_address)
                setattr(to, f"{name}_bias", packed.bias_address)
            to.k_cache, to.v_cache = checks.address(k), checks.address(v)
            to.window = layer.sliding_window
        step = self.step = _Step()
        step.layers, step.layer_count = self._layers, len(stack.layers)
        step.final_norm, step.cos_sin = checks.address(stack.final_norm), checks.address(stack.cos_sin)
        step.max_position, step.block_count = self.max_position, blocks
        step.hidden, step.intermediate = self.hidden, stack.layers[0].down.in_features
        step.heads, step.kv_heads, step.head_dim, step.block_size = stack.num_heads, kv_heads, d, block_size
        step.eps, step.scale = stack.eps, stack.scale
        step.ranks = stack.ranks.address if isinstance(stack.ranks, CpuRanks) else None

    def run(
        self,
        function: ctypes._CFuncPtr,
        residual: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor,
    ) -> Tensor:
        tokens, sequences, count = residual.shape[0], seq_lens.shape[0], rows.shape[0]
        checks.tensor("residual", residual, self.dtype, (tokens, self.hidden))
        checks.tensor("positions", positions, torch.int32, (tokens,))
        checks.integers("slot_mapping", slot_mapping, (tokens,))
        checks.sequences(block_tables, seq_lens, query_start_loc)
        checks.tensor("rows", rows, torch.int64, (count,))
        out = torch.empty((count, self.hidden), dtype=self.dtype)
        if tokens == 0:
            if count:
                raise IndexError("rows[0] is not one of 0 tokens")
            return out
        # A copy: calls from several threads must not share it.
        step = _Step.from_buffer_copy(self.step)
        step.residual, step.out, step.rows = checks.address(residual), checks.address(out), checks.address(rows)
        step.positions, step.slots = checks.address(positions), checks.address(slot_mapping)
        step.block_tables, step.seq_lens = checks.address(block_tables), checks.address(seq_lens)
        step.query_start, step.table_width = checks.address(query_start_loc), block_tables.shape[1]
        step.tokens, step.sequences, step.row_count = tokens, sequences, count
        step.wide_slots = slot_mapping.dtype is torch.int64
        if bad := function(ctypes.addressof(step)):
            kind, index = (bad - 1) >> 40, (bad - 1) & ((1 << 40) - 1)
            if kind == 0:
                raise IndexError(checks.no_such_slot(index, positions, self.max_position, slot_mapping, self.slots))
            if kind == 3:
                raise GivenUp("another rank has ended")
            if kind == 1:
                raise IndexError(checks.no_such_blocks(index, int(self.step.block_count)))
            raise IndexError(f"rows[{index}] is {int(rows[index])}, not one of {tokens} tokens")
        return out
