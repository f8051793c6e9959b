"""Files of weights: read tensor by tensor, in parts for ranks, mapped, and released."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.kernels.grouped_weight import FP8, to_fp8
from quire.kernels.quantization import quantize
from quire.worker.models.files.free_memory import FreeMemory
from quire.worker.models.files.loader import Weights
from quire.worker.models.files.mapped_files import MappedFiles
from quire.worker.models.files.weight_reader import WeightReader
from quire.worker.models.native.config import EMBEDDING, HEAD, ModelConfig, read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.sharding import NotDivisible, Shard
from tests.support.checkpoints import make_checkpoint
from tests.support.resident_memory import resident

GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))


def stored_as(folder: Path, dtypes: dict[str, torch.dtype], other: torch.dtype) -> Path:
    """Convert the tensors of a checkpoint. Returns the folder."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(dtypes.get(name, other)) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": str(other)[6:]}))
    return folder


def reader_of(folder: Path, ops: kernels.Ops, bits: int | str = 0) -> WeightReader:
    return WeightReader(Weights(folder), Shard(read_config(folder)), ops, ops.dtype, "cpu", bits)


def float_ops() -> kernels.CpuOps:
    try:
        return kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))


def test_weights_of_two_types_side_by_side_become_activations(tmp_path: Path) -> None:
    folder = stored_as(make_checkpoint(tmp_path / "llama", "llama"), {GATE: torch.float16}, torch.bfloat16)
    ops, tensors = float_ops(), load_file(folder / "model.safetensors")
    packed = reader_of(folder, ops).linear([GATE, UP])
    x = torch.randn(3, packed.in_features)
    expected = ops.pack_linear(torch.cat([tensors[GATE].float(), tensors[UP].float()]))
    assert torch.equal(ops.linear(x, packed), ops.linear(x, expected))


def test_a_type_that_the_kernels_lack_is_converted(tmp_path: Path) -> None:
    folder = stored_as(make_checkpoint(tmp_path / "llama", "llama"), {}, torch.float16)
    assert reader_of(folder, kernels.ReferenceOps("cpu", torch.float32)).embedding(EMBEDDING).dtype is torch.float32


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_layers_have_few_bits_and_the_head_has_8(tmp_path: Path, bits: int) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    tensors = load_file(folder / "model.safetensors")
    for ops in (float_ops(), kernels.ReferenceOps("cpu", torch.float32)):
        reader = reader_of(folder, ops, bits)
        packed = reader.linear([GATE])
        x = torch.randn(3, packed.in_features)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack_linear(quantize(tensors[GATE], bits))))
        head = reader.head(EMBEDDING, tensors[EMBEDDING])
        expected = ops.pack_linear(quantize(tensors[EMBEDDING], 8))
        x = torch.randn(3, head.in_features)
        assert torch.equal(ops.linear_logits(x, head), ops.linear_logits(x, expected))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_decoder_computes_with_16_bit_weights_as_with_the_same_floats(tmp_path: Path, stored: torch.dtype) -> None:
    short = stored_as(make_checkpoint(tmp_path / "short", "qwen3"), {}, stored)
    decoder = Decoder.load(short, float_ops(), torch.float32, "cpu")
    long = tmp_path / "long"
    long.mkdir()
    for file in short.iterdir():
        (long / file.name).write_bytes(file.read_bytes())
    exact = Decoder.load(stored_as(long, {}, torch.float32), float_ops(), torch.float32, "cpu")
    assert decoder.weight_bytes < 0.6 * exact.weight_bytes
    hidden = torch.randn(5, decoder.hidden_size)
    assert torch.equal(decoder._logits(hidden), exact._logits(hidden))


def test_layers_and_the_head_are_fp8_on_load(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    tensors = load_file(folder / "model.safetensors")
    for ops in (float_ops(), kernels.ReferenceOps("cpu", torch.float32)):
        reader = reader_of(folder, ops, FP8)
        for packed, name in ((reader.linear([GATE]), GATE), (reader.head("lm_head.weight", None), "lm_head.weight")):
            x = torch.randn(3, packed.in_features)
            assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack_linear(to_fp8(tensors[name]))))


MIB = 1 << 20


@pytest.fixture
def mapped(tmp_path: Path) -> tuple[MappedFiles, torch.Tensor, torch.Tensor]:
    """Return a file of 40 MiB, a tensor in it and its values. All of it is resident."""
    values = torch.arange(10 * MIB, dtype=torch.float32).view(-1, 1024)
    save_file({"values": values, "other": torch.ones(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "weights.safetensors")
    file = tmp_path / "link.safetensors"
    tensor = safe_open(file, framework="pt", device="cpu").get_tensor("values")
    assert torch.equal(tensor, values)
    return MappedFiles([file]), tensor, values


def file_pages() -> int:
    return resident()["RssFile"]


def test_a_tensor_leaves_the_memory_and_keeps_its_values(
    mapped: tuple[MappedFiles, torch.Tensor, torch.Tensor],
) -> None:
    files, tensor, values = mapped
    before = file_pages()
    files.release(tensor[:2560])
    assert before - file_pages() == pytest.approx(10 * MIB, abs=MIB)
    files.release(tensor[:, :100])  # rows of it have gaps
    assert before - file_pages() == pytest.approx(40 * MIB, abs=MIB)
    assert torch.equal(tensor, values)
    files.release_all()
    assert before - file_pages() == pytest.approx(40 * MIB, abs=MIB)
    assert torch.equal(tensor, values)


def test_other_memory_is_left_alone(mapped: tuple[MappedFiles, torch.Tensor, torch.Tensor]) -> None:
    files, tensor, values = mapped
    copy = tensor.clone()
    files.release(copy)
    files.release(torch.empty(0))
    assert torch.equal(copy, values)


def test_a_file_that_was_written_to_is_not_released_as_a_whole(
    mapped: tuple[MappedFiles, torch.Tensor, torch.Tensor],
) -> None:
    files, tensor, _ = mapped
    tensor[5, 5] = -1
    files.release_all()
    assert float(tensor[5, 5]) == -1


def test_memory_is_returned_after_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, calls = FreeMemory(10), []
    monkeypatch.setattr(memory, "_trim", calls.append)
    for _ in range(5):
        memory.count(4)
    assert calls == [0]  # after 12
    memory.count(2)
    assert calls == [0, 0]
    memory.give_back()
    assert len(calls) == 3


def test_another_c_library_may_lack_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FreeMemory(1)
    monkeypatch.setattr(memory, "_trim", None)
    memory.count(2)


pytest.importorskip("transformers")

LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """With every bias, 4 heads and as many key-value heads, and a vocabulary that nothing divides."""
    return read_config(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama-bias"))


def parts(config: ModelConfig, size: int, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
    shards = [Shard(config, rank, size) for rank in range(size)]
    return [whole[shard.part(name)] * shard.owns_bias(name) for shard in shards]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_of_the_parts_add_up_to_those_of_the_whole(config: ModelConfig, size: int) -> None:
    shapes = config.tensor_shapes()
    made = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    x = torch.randn(3, config.hidden_size, dtype=torch.float64)

    def mlp(take: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up, down = (
            (take[f"{LAYER}.mlp.{name}_proj.weight"], take[f"{LAYER}.mlp.{name}_proj.bias"])
            for name in ("gate", "up", "down")
        )
        inner = torch.nn.functional.linear(x, *gate).tanh() * torch.nn.functional.linear(x, *up)
        return torch.nn.functional.linear(inner, *down)

    def heads(take: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v, o = (
            (take[f"{LAYER}.self_attn.{name}_proj.weight"], take[f"{LAYER}.self_attn.{name}_proj.bias"])
            for name in "qkvo"
        )
        mixed = torch.nn.functional.linear(x, *q) * torch.nn.functional.linear(x, *k)
        return torch.nn.functional.linear(mixed + torch.nn.functional.linear(x, *v), *o)

    of_ranks = [{name: parts(config, size, name, whole)[rank] for name, whole in made.items()} for rank in range(size)]
    for function in (mlp, heads):
        torch.testing.assert_close(sum(function(take) for take in of_ranks), function(made))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_parts_of_the_vocabulary_follow_each_other(config: ModelConfig, size: int) -> None:
    config = replace(config, num_heads=12, num_kv_heads=12)
    whole = torch.arange(config.vocab_size)[:, None]
    found = parts(config, size, HEAD, whole)
    assert torch.equal(torch.cat(found), whole)
    assert max(len(part) for part in found) == Shard(config, 0, size).vocab_width


def test_ranks_share_a_key_value_head_where_there_are_more_of_them(config: ModelConfig) -> None:
    config = replace(config, num_heads=8, num_kv_heads=2, head_dim=16)
    whole = torch.arange(32)[:, None]
    name = f"{LAYER}.self_attn.k_proj.weight"
    firsts = [int(part[0]) for part in parts(config, 8, name, whole)]
    assert firsts == [0, 0, 0, 0, 16, 16, 16, 16]
    local = Shard(config, 5, 8).local
    assert (local.num_heads, local.num_kv_heads, local.kv_size(0)) == (1, 1, 16)


@pytest.mark.parametrize(
    ("changes", "size", "possible"),
    [
        ({}, 3, "1, 2, 4"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "1, 3, 6"),
        ({"intermediate_size": 98}, 4, "1, 2"),
        ({"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 96}, 6, "1, 2, 4, 8"),  # 6 share the heads unequally
        ({"vocab_size": 6}, 4, "1, 2"),  # 2 each, and none for the last
        ({"num_heads": 64, "num_kv_heads": 64, "intermediate_size": 64, "vocab_size": 40}, 32, "1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_shared_equally_is_refused_with_what_can(
    config: ModelConfig, changes: dict[str, int], size: int, possible: str
) -> None:
    with pytest.raises(NotDivisible, match=f"^{size} ranks cannot share .*; {possible} can$"):
        Shard(replace(config, **changes), 0, size)


def test_a_part_of_a_checkpoint_is_as_large_as_it_must_be(tmp_path: Path) -> None:
    from quire.kernels import ReferenceOps
    from quire.worker.models.native.decoder import Decoder

    class Alone:
        """One of two, without the other."""

        rank, size = 1, 2

    path = make_checkpoint(tmp_path, "qwen3")
    seen: list[tuple[int, int]] = []
    ops = ReferenceOps("cpu", torch.float32)
    whole = Decoder.load(path, ops, torch.float32, "cpu")
    half = Decoder.load(path, ops, torch.float32, "cpu", progress=lambda *at: seen.append(at), ranks=Alone())
    assert half.kv_bytes_per_block(16) * 2 == whole.kv_bytes_per_block(16)
    embedding = whole.vocab_size * whole.config.hidden_size * 4
    assert half.weight_bytes - embedding == pytest.approx((whole.weight_bytes - embedding) / 2, rel=0.05)
    assert seen[-1][0] == seen[-1][1]  # the progress of loading ends at its end
