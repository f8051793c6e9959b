"""A checkpoint is not in memory twice while it is loaded: the packed weights and a tenth of them are the peak."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.kernels import CpuOps, KernelsUnavailable
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools import gguf_writer
from tests.conftest import clean_environ
from tests.support.checkpoints import EXPERTS, make_checkpoint
from tests.support.quantized import FORMATS, PROJECTIONS, edit_config, group, scheme

# --- large checkpoints ------------------------------------------------------------------------------------------------
# Checkpoints of some hundred megabytes with random weights, in each stored format, for measurements of memory.
#
# The weights are repeated random numbers: they are written fast, and no test computes with them.

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}
MOE_SIZES = SIZES | EXPERTS | {"num_local_experts": 8, "moe_intermediate_size": 512, "num_experts": 8}
GROUP = 128


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers that repeat after 2^20."""
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        some = (torch.randn(1 << 20, generator=generator) * 0.02).to(dtype)
    else:
        some = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).to(dtype)
    size = torch.Size(shape).numel()
    return some.repeat(-(-size // len(some)))[:size].view(shape)


Layer = Callable[[int, int], dict[str, Tensor]]  # output channels, input features: tensors by the ends of their names


def _plain(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": _random((n, k), torch.bfloat16)}


def _gptq(bits: int, order: bool = False) -> Layer:
    def layer(n: int, k: int) -> dict[str, Tensor]:
        groups, per_word = k // GROUP, 32 // bits
        found = {
            "qweight": _random((k // per_word, n), torch.int32),
            "qzeros": _random((groups, n // per_word), torch.int32),
            "scales": _random((groups, n), torch.float16),
        }
        if order:
            found["g_idx"] = (torch.arange(k) // GROUP)[
                torch.randperm(k, generator=torch.Generator().manual_seed(k))
            ].int()
        return found

    return layer


def _awq(n: int, k: int) -> dict[str, Tensor]:
    groups = k // GROUP
    return {
        "qweight": _random((k, n // 8), torch.int32),
        "qzeros": _random((groups, n // 8), torch.int32),
        "scales": _random((groups, n), torch.float16),
    }


def _fp8(n: int, k: int) -> dict[str, Tensor]:
    scales = _random((n // 128, k // 128), torch.float32)
    return {"weight": _random((n, k), torch.float32).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _w8a16(n: int, k: int) -> dict[str, Tensor]:
    return {
        "weight_packed": _random((n, k // 4), torch.int32),
        "weight_scale": _random((n, k // GROUP), torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
KINDS: dict[str, tuple[Layer, dict[str, Any] | None]] = {
    "bf16": (_plain, None),
    "gptq-4": (_gptq(4), GPTQ | {"bits": 4}),
    "gptq-8": (_gptq(8), GPTQ | {"bits": 8}),
    "gptq-order": (_gptq(4, order=True), GPTQ | {"bits": 4, "desc_act": True}),
    "awq": (_awq, FORMATS["awq"][1] | {"group_size": GROUP}),
    "fp8": (_fp8, FORMATS["fp8-block"][1] | {"weight_block_size": [128, 128]}),
    "w8a16": (_w8a16, scheme("pack-quantized", group(8, strategy="group", group_size=GROUP))),
}
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
EXPERT_KINDS = ("moe",)
ALL = (*KINDS, *EXPERT_KINDS, *GGUF_TYPES)


def make_large_checkpoint(folder: Path, kind: str) -> Path:
    """Write a checkpoint of one of ALL, and return its folder or file."""
    layer, quantization = KINDS.get(kind, KINDS["bf16"])
    family, sizes = ("qwen3-moe", MOE_SIZES) if kind in EXPERT_KINDS else ("llama", SIZES)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    make_checkpoint(folder, family, **small)
    edit_config(folder, **sizes, torch_dtype="bfloat16", dtype="bfloat16")
    tensors: dict[str, Tensor] = {}
    for name, shape in _shapes(folder).items():
        *_, projection, end = name.split(".")
        is_quantized = projection in PROJECTIONS and end == "weight"
        parts = layer(*shape) if is_quantized else {"weight": _random(shape, torch.bfloat16)}
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        edit_config(folder, quantization_config=quantization)
    return _as_gguf(folder, kind) if kind in GGUF_TYPES else folder


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from quire.worker.models.native.config import EMBEDDING, HEAD, read_config

    config = read_config(folder)
    table = (config.vocab_size, config.hidden_size)
    return config.tensor_shapes() | {EMBEDDING: table, HEAD: table}


def _as_gguf(folder: Path, kind: str) -> Path:
    """Write the checkpoint as a GGUF file whose matrices repeat their first rows."""
    rows, quantized = 32, gguf_writer.quantized

    def repeated(values: Any, type_: str) -> Any:
        if values.ndim != 2 or type_ == "F32":
            return quantized(values, type_)
        some = quantized(np.ascontiguousarray(values[:rows]), type_)
        return np.tile(some, (-(-len(values) // rows), 1))[: len(values)]

    gguf_writer.quantized = repeated
    try:
        return gguf_writer.write_gguf(folder, folder.with_suffix(".gguf"), kind)
    finally:
        gguf_writer.quantized = quantized


pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

MIB = 1 << 20
LARGEST_PEAK = 1.10  # of the packed weights
LARGEST_FILE_PAGES = 48 * MIB
TIMEOUT_S = 300


def measure(folder: Path, bits: str, tiny: Path) -> dict[str, int]:
    """Load a checkpoint in a process of its own. Returns what `resident_memory` prints."""
    command = [sys.executable, "-m", "tests.support.resident_memory", str(folder), bits, str(tiny)]
    environ = clean_environ() | {"PYTHONPATH": f"{PROJECT_ROOT / 'src'}:{PROJECT_ROOT}"}
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environ, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        # All take minutes, so CI measures one.
        pytest.param("bf16", ("4",), marks=pytest.mark.slow),
        pytest.param("bf16", ("0", "8", "fp8"), marks=pytest.mark.soak),
        *(pytest.param(kind, ("0",), marks=pytest.mark.soak) for kind in ALL if kind != "bf16"),
    ],
)
def test_the_peak_is_the_packed_weights_and_a_tenth(kind: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    try:
        CpuOps()
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))
    tiny = make_checkpoint(tmp_path / "tiny", "llama")
    folder = make_large_checkpoint(tmp_path / kind, kind)
    for bits in settings:
        found = measure(folder, bits, tiny)
        said = {name: f"{size / MIB:.0f} MiB" for name, size in found.items()}
        print(kind, bits, said)
        assert found["weights"] > 150 * MIB, said
        assert found["peak"] <= LARGEST_PEAK * found["weights"], said
        assert found["file"] <= LARGEST_FILE_PAGES, said
