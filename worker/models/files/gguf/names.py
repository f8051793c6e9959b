"""The names of tensors in GGUF files, and how llama.cpp stores their numbers.

A place describes how a file stores a tensor of a Hugging Face checkpoint: the name, the entry of stacked experts, the
order of rows and columns, and the change of the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.shared.model.gguf.architectures import NEXTN
from quire.shared.model.gguf.config import EMBEDDING, OUTPUT
from quire.shared.model.gguf.file import GGUFFile, GGUFTensor
from quire.shared.model.gguf.keys import ModelKeys

WHOLE = {
    "model.embed_tokens.weight": EMBEDDING,
    "lm_head.weight": OUTPUT,
    "model.norm.weight": "output_norm.weight",
}
_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_LLAMA = {**_ATTENTION, **_MLP, "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_MIXTRAL = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA = {**_LLAMA, **_NORMS_AFTER, "pre_feedforward_layernorm": "ffn_norm"}
_QWEN35 = {
    **_LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
# By architecture: the module of a layer in a checkpoint, without the number of an expert, and in a GGUF file.
MODULES = {
    "llama": {**_LLAMA, **_MIXTRAL},
    "qwen2": _LLAMA,
    "qwen2moe": {**_LLAMA, **_EXPERTS, **_SHARED_EXPERT},
    "qwen3": _LLAMA,
    "qwen3moe": {**_LLAMA, **_EXPERTS},
    "qwen35": _QWEN35,
    "qwen35moe": {**_QWEN35, **_EXPERTS, **_SHARED_EXPERT},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    "gpt-oss": {
        **_ATTENTION,
        **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
        "mlp.router": "ffn_gate_inp",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
    },
    "smollm3": _LLAMA,
    "olmo2": {**_ATTENTION, **_MLP, **_NORMS_AFTER},
    "granite": _LLAMA,
}
# Names that do not end with that of a parameter in both formats.
_OTHERS = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}
_LAYER, _EXPERT = re.compile(r"model\.layers\.(\d{1,5})\.(.+)"), re.compile(r"(.*\.experts)\.(\d{1,5})(\..+)")
_STORED_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
_STACKED = "_exps"
_PAIRED = ("llama", "smollm3", "granite")  # llama.cpp rotates neighbours in their heads
_WITH_OFFSET = ("gemma2", "gemma3", "qwen35", "qwen35moe")  # llama.cpp adds 1 to the weights of norms
_STATE_NORM = "linear_attn.norm"  # has no offset


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """The place of the numbers of a tensor. entry: of stacked experts; None: the tensor is stored alone.

    rows, columns: the stored row or column of each one, int64; None: the same. undo: of a change to each number.
    shape: in a checkpoint, if it has other dimensions.
    """

    stored: str
    entry: int | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    undo: Callable[[Tensor], Tensor] | None = None
    shape: tuple[int, ...] | None = None


class TensorNames:
    """The names of the tensors of one file."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises FileError for wrong metadata."""
        self._file, self._architecture = file, file.text("general.architecture")
        self._modules = MODULES[self._architecture]
        self._keys = keys = ModelKeys(file, self._architecture)
        self._num_layers = keys.layers - keys.integer(NEXTN, 0, keys.layers - 1, 0)
        self._heads: dict[str, int] = {}
        if self._architecture in _PAIRED:
            heads = keys.of_all_layers("attention.head_count")
            kv_heads = keys.of_all_layers("attention.head_count_kv", heads)
            self._heads = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}

    def find(self, name: str) -> TensorPlace | None:
        """Return the place of a tensor with this canonical name; None if the architecture has no such tensor."""
        if name in WHOLE:
            return self._place(WHOLE[name], name.removesuffix(".weight").removeprefix("model."), None)
        if not (layer := _LAYER.fullmatch(name)):
            return None
        index, rest = layer.groups()
        entry = None
        if expert := _EXPERT.fullmatch(rest):
            rest, entry = expert[1] + expert[3], int(expert[2])
        module, _, end = rest.rpartition(".")
        if rest in _OTHERS:
            return self._place(f"blk.{index}.{_OTHERS[rest]}", rest, entry)
        if module not in self._modules or end not in ("weight", "bias"):
            return None
        stored = self._modules[module]
        if stored.endswith(_STACKED) != (entry is not None):
            return None
        return self._place(f"blk.{index}.{stored}.{end}", module, entry)

    def canonical(self, tensor: GGUFTensor) -> list[str] | None:
        """Return the canonical names of a stored tensor, one for each expert of a stack; none for layers of drafts.

        None for a tensor that is not of the architecture.
        """
        for name, stored in WHOLE.items():
            if tensor.name == stored:
                return [name]
        if not (layer := _STORED_LAYER.fullmatch(tensor.name)):
            return None
        index, rest = int(layer[1]), layer[2]
        if index >= self._num_layers:
            return [] if index < self._keys.layers else None
        part, _, end = rest.rpartition(".")
        for other, stored in _OTHERS.items():
            if rest == stored:
                return [f"model.layers.{index}.{other}"]
        module = next((module for module, stored in self._modules.items() if stored == part), None)
        if module is None or end not in ("weight", "bias"):
            return None
        if not part.endswith(_STACKED):
            return [f"model.layers.{index}.{module}.{end}"]
        block, _, projection = module.rpartition(".")
        return [f"model.layers.{index}.{block}.{at}.{projection}.{end}" for at in range(tensor.shape[0])]

    def _place(self, stored: str, module: str, entry: int | None) -> TensorPlace:
        """Return the place of a stored tensor. module: without the names of layer and parameter."""
        if module in self._heads and stored in self._file.tensors:
            heads, num_rows = self._heads[module], self._file.tensors[stored].shape[0]
            if num_rows % (2 * heads) == 0:  # else its shape is refused later
                return TensorPlace(stored, rows=row_order(heads, num_rows))
        if module == "linear_attn.A_log":
            return TensorPlace(stored, rows=self._value_order(1), undo=lambda values: (-values).log())
        if self._architecture in _WITH_OFFSET and module.endswith("norm") and module != _STATE_NORM:
            return TensorPlace(stored, undo=lambda values: values - 1)
        if module.startswith("linear_attn."):
            return self._place_of_states(stored, module)
        if module == "mlp.shared_expert_gate":
            return TensorPlace(stored, shape=(1, self._keys.integer("embedding_length")))
        return TensorPlace(stored, entry)

    def _place_of_states(self, stored: str, module: str) -> TensorPlace:
        """Return the place of a tensor of the layers of Qwen3.5 that keep a state."""
        heads, size = self._keys.integer("ssm.group_count"), self._keys.integer("ssm.state_size")
        width = self._keys.integer("ssm.inner_size") // self._keys.integer("ssm.time_step_rank")
        name = module.removeprefix("linear_attn.")
        if name in ("in_proj_a", "in_proj_b", "dt_bias"):
            return TensorPlace(stored, rows=self._value_order(1))
        if name == "in_proj_z":
            return TensorPlace(stored, rows=self._value_order(width))
        if name == "out_proj":
            return TensorPlace(stored, columns=self._value_order(width))
        values = self._value_order(width)
        first = 2 * heads * size  # queries and keys come before values
        rows = torch.cat([torch.arange(first), first + values])
        if name == "in_proj_qkv":
            return TensorPlace(stored, rows=rows)
        if name == "conv1d":
            return TensorPlace(stored, rows=rows, shape=(len(rows), 1, self._keys.integer("ssm.conv_kernel")))
        return TensorPlace(stored)

    def _value_order(self, width: int) -> Tensor:
        """Return the stored row of each row of values, with `width` rows for a head.

        llama.cpp stores the first value head of all key heads, then the second of all; Transformers all of a key head.
        """
        keys, values = self._keys.integer("ssm.group_count"), self._keys.integer("ssm.time_step_rank")
        return torch.arange(values * width).reshape(values // keys, keys, width).transpose(0, 1).flatten()


def row_order(num_heads: int, num_rows: int) -> Tensor:
    """Return the stored row of each row of a query or key projection of the architecture llama, int64 [num_rows].

    llama.cpp rotates neighbours, and stores the two halves of a head alternately; Transformers rotates halves.
    """
    size = num_rows // num_heads
    return torch.arange(num_rows).reshape(num_heads, size // 2, 2).transpose(1, 2).flatten()
