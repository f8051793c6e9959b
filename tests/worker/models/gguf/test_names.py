from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.worker.models.gguf.names import row_order, stored_name


@pytest.mark.parametrize("architecture", ["LLAMA", "QWEN2", "QWEN3"])
def test_names_are_those_of_the_published_package(architecture: str) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 3)
    parts = ["q_proj", "k_proj", "v_proj", "o_proj"]
    parts += ["q_norm", "k_norm"] if architecture == "QWEN3" else []
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    modules += [f"model.layers.2.self_attn.{part}" for part in parts]
    modules += [f"model.layers.2.mlp.{part}_proj" for part in ("gate", "up", "down")]
    modules += [f"model.layers.2.{part}_layernorm" for part in ("input", "post_attention")]
    for module in modules:
        assert stored_name(f"{module}.weight") == names.get_name(f"{module}.weight", (".weight",))
    assert stored_name("model.layers.1.self_attn.q_proj.bias") == "blk.1.attn_q.bias"


def test_the_order_of_rows_undoes_that_of_llama_cpp() -> None:
    rows = np.arange(3 * 8)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).flatten()
    assert stored[:4].tolist() == [0, 4, 1, 5]
    assert torch.from_numpy(stored)[row_order(3, 24)].tolist() == rows.tolist()
