"""The parts of all ranks together are the model, and each has as much to do as the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.worker.models.config import HEAD, ModelConfig, read_config
from quire.worker.models.sharding import NotDivisible, Shard
from tests.support.checkpoints import make_checkpoint

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


def test_norms_and_embeddings_are_whole_everywhere(config: ModelConfig) -> None:
    for name in ("model.norm.weight", "model.embed_tokens.weight", f"{LAYER}.input_layernorm.weight"):
        assert all(Shard(config, rank, 4).part(name) == () for rank in range(4))


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
    from quire.worker.models.decoder import Decoder

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
