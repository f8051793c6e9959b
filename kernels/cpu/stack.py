"""`decoder_layers` of the C++ kernels: a table of addresses that is made once, and one call of the library per step."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.cpu.library import LevelFunctions
from quire.kernels.cpu.linear import GATES, LinearWeights
from quire.kernels.cpu.lora import CpuAdapters
from quire.kernels.cpu.ranks import CpuRanks, GivenUp
from quire.kernels.interrupt import Interrupt, StepInterrupted
from quire.kernels.lora import AdapterBatch
from quire.kernels.ops import DecoderLayer, PackedLinear
from quire.kernels.stack import NORMS, Caches, Stack


class _Layer(Structure):
    """`Layer` in layers.h."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv", LinearWeights),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("o", LinearWeights),
        ("mlp_norm", c_void_p),
        ("gate_up", LinearWeights),
        ("down", LinearWeights),
        ("window", c_int64),
        ("moe", c_void_p),
        ("post_attention_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("gate", "kv_heads", "head_dim", "inner", "shares_kv")),
        *((name, c_void_p) for name in ("v_norm", "router_norm", "experts_norm", "mlp_output_norm")),
        ("experts_output_norm", c_void_p),
        ("input_gate", LinearWeights),
        ("input_projection", LinearWeights),
        ("input_norm_of_own", c_void_p),
        ("output_scale", c_double),
        ("uses_key_ends", c_int64),
    ]


class _Step(Structure):
    """`Step` in layers.h."""

    _ADDRESSES = (
        "final_norm", "residual", "out", "positions", "slots",
        "block_tables", "seq_lens", "query_start", "key_ends", "rows", "layer_inputs",
    )  # fmt: skip
    _SIZES = (
        "layer_count", "tokens", "row_count", "sequences", "table_width", "max_position", "block_count", "wide_slots",
        "hidden", "heads", "block_size", "kv_type", "qkv_width", "q_width", "inner", "input_width",
    )  # fmt: skip
    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in _ADDRESSES),
        *((name, c_int64) for name in _SIZES),
        ("eps", c_double),
        ("scale", c_double),
        ("softcap", c_double),
        ("ranks", c_void_p),
        ("adapters", c_void_p),
        ("interrupt", c_void_p),
    ]


# The kinds of error that `layers` returns in bits 40 and higher. The lower bits are 1 + an index.
_BAD_TOKEN, _BAD_SEQUENCE, _BAD_ROW, _RANK_HAS_ENDED, _INTERRUPTED = range(5)


class CpuCaches:
    """The addresses of the caches of all layers, and a reference to the caches."""

    def __init__(self, stack: Caches, kv_dtype: torch.dtype) -> None:
        stack.check_caches(None, kv_dtype)
        self.num_blocks, self.block_shape = stack.num_blocks, stack.block_shape
        self._kept = stack
        caches = stack.tensors
        self.caches = (c_void_p * len(caches))(*map(checks.address, caches))
        self.block_bytes = caches[0][0].nbytes if self.num_blocks else 0  # of one cache


class CpuStack:
    """The addresses of the weights and caches of all layers, and a reference to weights and caches."""

    def __init__(self, stack: Stack, dtype: torch.dtype, kv_dtype: torch.dtype, kv_type: int) -> None:
        """kv_type: `KvType` in kv_cache.h for caches of kv_dtype."""
        self.hidden = stack.check(dtype, kv_dtype)
        stack.check_packing(dtype)
        self.stack, self.dtype = stack, dtype
        self.num_blocks, _, block_size, _ = stack.kv_cache[0][0].shape
        self.num_slots = self.num_blocks * block_size
        layers = (_Layer * len(stack.layers))()
        for index, (to, layer) in enumerate(zip(layers, stack.layers, strict=True)):
            self._fill(to, index, layer)
        qkv: list[PackedLinear] = [layer.qkv for layer in stack.layers]
        self._step = _Step(  # which refers to `layers`
            layers=layers,
            layer_count=len(stack.layers),
            final_norm=checks.address(stack.final_norm),
            max_position=stack.cos_sin.shape[0],
            block_count=self.num_blocks,
            hidden=self.hidden,
            heads=stack.num_heads,
            block_size=block_size,
            kv_type=kv_type,
            qkv_width=max(linear.out_features for linear in qkv),
            q_width=max(layer.o.in_features for layer in stack.layers),
            inner=stack.max_inner,
            input_width=stack.input_width,
            eps=stack.eps,
            scale=stack.scale,
            softcap=stack.softcap,
            ranks=stack.ranks.address if isinstance(stack.ranks, CpuRanks) else None,
        )

    def _fill(self, to: _Layer, index: int, layer: DecoderLayer) -> None:
        """Write the addresses and the sizes of a layer into the table."""
        stack, (k, v) = self.stack, self.stack.kv_cache[index]
        for name in (*NORMS, "sinks"):
            setattr(to, name, checks.address(getattr(layer, name)))
        for name in stack.linear_names(layer):
            setattr(to, name, getattr(layer, name).weights)
        to.cos_sin = checks.address(stack.tables_of(index))
        to.gate = GATES[layer.gate]
        to.moe = None if layer.moe is None else layer.moe.address  # type: ignore[attr-defined]
        to.k_cache, to.v_cache, to.window = checks.address(k), checks.address(v), layer.sliding_window
        to.kv_heads, to.head_dim = stack.shape_of(index)
        to.inner = 0 if layer.down is None else layer.down.in_features
        to.shares_kv, to.output_scale, to.uses_key_ends = layer.shares_kv, layer.output_scale, layer.uses_key_ends
        if (norms := layer.expert_norms) is not None:
            to.router_norm, to.experts_norm = checks.address(norms.router), checks.address(norms.experts)
            to.mlp_output_norm = checks.address(norms.mlp_output)
            to.experts_output_norm = checks.address(norms.experts_output)
        if (end := layer.per_layer_input) is not None:
            to.input_gate = end.gate.weights  # type: ignore[attr-defined]
            to.input_projection = end.projection.weights  # type: ignore[attr-defined]
            to.input_norm_of_own = checks.address(end.norm)

    def run(
        self,
        functions: LevelFunctions,
        residual: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor,
        adapters: AdapterBatch | None = None,
        interrupt: Interrupt | None = None,
        layer_inputs: Tensor | None = None,
        key_ends: Tensor | None = None,
    ) -> Tensor:
        """Compute `Ops.decoder_layers` with the functions of a level. Raises GivenUp if another rank has ended."""
        tokens, sequences, count = residual.shape[0], seq_lens.shape[0], rows.shape[0]
        checks.step(residual, self.hidden, self.dtype, positions, slot_mapping, rows)
        checks.sequences(block_tables, seq_lens, query_start_loc)
        checks.key_ends(key_ends, tokens)
        self.stack.check_inputs(layer_inputs, tokens, self.dtype)
        out = torch.empty((count, self.hidden), dtype=self.dtype)
        if tokens == 0:
            if count:
                raise IndexError("rows[0] is not one of 0 tokens")
            return out
        step = _Step.from_buffer_copy(self._step)  # calls from several threads must not share one
        step.residual, step.out, step.rows = checks.address(residual), checks.address(out), checks.address(rows)
        step.positions, step.slots = checks.address(positions), checks.address(slot_mapping)
        step.block_tables, step.seq_lens = checks.address(block_tables), checks.address(seq_lens)
        step.query_start, step.table_width = checks.address(query_start_loc), block_tables.shape[1]
        step.layer_inputs, step.key_ends = checks.address(layer_inputs), checks.address(key_ends)
        step.tokens, step.sequences, step.row_count = tokens, sequences, count
        step.wide_slots = slot_mapping.dtype is torch.int64
        adapted = CpuAdapters(adapters) if adapters else None
        step.adapters = adapted.address if adapted else None
        step.interrupt = interrupt.address if interrupt else None
        if bad := functions.layers(ctypes.addressof(step)):
            kind, index = (bad - 1) >> 40, (bad - 1) & ((1 << 40) - 1)
            if kind == _INTERRUPTED:
                raise StepInterrupted
            if kind == _RANK_HAS_ENDED:
                raise GivenUp("another rank has ended")
            if kind == _BAD_TOKEN:
                max_position = self.stack.cos_sin.shape[0]
                raise IndexError(checks.no_such_slot(index, positions, max_position, slot_mapping, self.num_slots))
            if kind == _BAD_SEQUENCE:
                raise IndexError(checks.no_such_blocks(index, self.num_blocks))
            raise IndexError(f"rows[{index}] is {int(rows[index])}, not one of {tokens} tokens")
        return out
