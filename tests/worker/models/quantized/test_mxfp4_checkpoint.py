"""A gpt-oss checkpoint with MXFP4 experts, as it is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.kernels.grouped_weight import MXFP4
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.offline import complete
from quire.worker.models.files.formats import make_reader, open_weights
from quire.worker.models.files.quantized.mxfp4 import mxfp4_weight
from quire.worker.models.native.config import read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.expert_weights import load_experts
from quire.worker.models.native.sharding import Shard
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import edit_config, edit_tensors
from tests.worker.models.test_decoder import TOLERANCE, WHOLE, Stepper, draw_prompts, transformers_logits

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_mxfp4(tmp_path / "gpt-oss")


def make_mxfp4(folder: Path) -> Path:
    """Write a checkpoint whose experts are random MXFP4 numbers. Its folder `plain` has them dequantised."""
    make_checkpoint(folder, "gpt-oss")
    plain = make_checkpoint(folder / "plain", "gpt-oss")
    tensors = load_file(folder / "model.safetensors")
    dequantized = dict(tensors)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, k, n = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, n, k // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(118, 122, (count, n, k // 32), generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights = [mxfp4_weight(*expert).dequantized() for expert in zip(blocks, scales, strict=True)]
        dequantized[name] = torch.stack(weights).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def load(folder: Path, ops: kernels.Ops, bits: int | str = 0, rank: int = 0, size: int = 1):
    config = read_config(folder)
    shard = Shard(config, rank, size)
    weights = open_weights(folder, config, ops.weight_dtypes, "cpu")
    weights.check(config.tensor_shapes(), weights._tensors)
    assert shard.local.experts is not None
    reader = make_reader(weights, shard, ops, ops.dtype, "cpu", bits)
    return load_experts(shard.local.experts, reader, "model.layers.0")


def test_logits_are_those_of_transformers_with_dequantised_weights(checkpoint: Path) -> None:
    prompts = draw_prompts(1)
    expected = transformers_logits(checkpoint / "plain", prompts, torch.float32)
    seen: list[tuple[int, int]] = []
    ops = kernels.select_ops("cpu", torch.float32)
    decoder = Decoder.load(checkpoint, ops, torch.float32, "cpu", 64, progress=lambda *at: seen.append(at))
    for one, other in zip(Stepper(decoder, prompts).run(WHOLE), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert seen[-1][0] == seen[-1][1]


def test_transformers_reads_the_same_weights(checkpoint: Path) -> None:
    """Transformers loads the checkpoint with its own expansion, so that the layout is the published one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    found = model.state_dict()
    for name, plain in load_file(checkpoint / "plain" / "model.safetensors").items():
        if "experts.gate_up_proj" in name or "experts.down_proj" in name:
            assert torch.equal(found[name].float(), plain.float()), name


def test_a_worker_serves_the_checkpoint(checkpoint: Path) -> None:
    """Its digest, its check of memory and its warm-up read the checkpoint, too."""
    settings = WorkerSettings(model=str(checkpoint), device="cpu", dtype="float32", num_blocks=32, threads=1)
    engine = build_engine(settings, "test")
    plain = Decoder.load(checkpoint / "plain", engine.runner.model.ops, torch.float32, "cpu")
    assert 0 < engine.runner.model.weight_bytes < plain.weight_bytes
    assert len(complete(engine, [(5, 9, 20)], SamplingParams(4, ignore_eos=True))[0][0].token_ids) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_stay_in_4_bits_with_the_products_of_their_values(checkpoint: Path, dtype: torch.dtype) -> None:
    try:
        ops = kernels.CpuOps(dtype)
    except kernels.KernelsUnavailable as error:
        pytest.skip(str(error))
    assert MXFP4 in ops.code_kinds
    packed, wide = load(checkpoint, ops), load(checkpoint / "plain", ops)
    for rows in (1, 9, 70):
        x = torch.randn(rows, 64).to(dtype)
        assert torch.equal(ops.moe(x, packed), ops.moe(x, wide))
    assert packed.nbytes < 0.45 * wide.nbytes


@pytest.mark.parametrize("bits", [8, 4, "fp8"])
def test_experts_are_not_rounded_again(checkpoint: Path, bits: int | str) -> None:
    x, ops = torch.randn(9, 64), kernels.select_ops("cpu", torch.float32)
    assert torch.equal(ops.moe(x, load(checkpoint, ops, bits)), ops.moe(x, load(checkpoint, ops)))


def test_parts_of_ranks_add_up_to_the_whole(checkpoint: Path) -> None:
    x, ops = torch.randn(7, 64), kernels.ReferenceOps("cpu", torch.float32)
    parts = [ops.moe(x, load(checkpoint, ops, rank=rank, size=2)) for rank in range(2)]
    torch.testing.assert_close(sum(parts), ops.moe(x, load(checkpoint, ops)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("gate_up_proj_blocks", None, "gate_up_proj_blocks is missing"),
        ("down_proj_scales", lambda tensor: tensor[:, :-1], r"down_proj_scales has the shape"),
        ("down_proj_blocks", lambda tensor: tensor.to(torch.int8), "has the type I8, expected U8"),
        ("down_proj_scales", lambda tensor: tensor.fill_(255), "scales has the value 255, expected at most 252"),
    ],
)
def test_bad_tensors_are_named(checkpoint: Path, end: str, change, message: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(f"{EXPERTS}.{end}")
        if change is not None:
            tensors[f"{EXPERTS}.{end}"] = change(tensor).contiguous()

    edit_tensors(checkpoint, edit)
    with pytest.raises(CheckpointError, match=message):
        Decoder.load(checkpoint, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu", 64)
