"""Modules of Transformers that the kernels compute: norms, linear layers, MLPs, experts and rotations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from quire import kernels
from quire.worker.models.transformers import trial
from quire.worker.models.transformers.fused import packed_bytes
from quire.worker.models.transformers.fused_experts import find_experts
from quire.worker.models.transformers.fused_linear import JoinedLinearModule, JoinedProduct, find_joins
from quire.worker.models.transformers.fused_mlp import find_mlps
from quire.worker.models.transformers.fused_norm import NormInputs, RmsNorm, fuse_norms, is_near, recognise
from quire.worker.models.transformers.fused_rotary import (
    Rotation,
    RotationProbe,
    RotationTables,
    defer,
    joined_rows,
    replace_rotations,
)
from quire.worker.models.transformers.linear import LinearUses
from quire.worker.models.transformers.parts import Parts
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import load
from tests.support.transformers_checkpoints import make_kind

NAMES = ("norms", "gated MLPs", "joined products", "rotary embeddings", "mixtures of experts")


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("gpt2", (0, 0, 0, 0, 0)),  # torch's own norms; merged projections
        ("opt", (0, 0, 3, 0, 0)),
        ("gemma3", (19, 0, 6, 3, 0)),  # GELU; weights that are offsets from 1; two kinds of rotation
        ("cohere2", (4, 3, 3, 0, 0)),  # layer norms without bias; interleaved rotation
        ("phi3", (7, 3, 0, 3, 0)),  # gate and up in one layer
        ("granite", (7, 3, 3, 3, 0)),
        ("smollm3", (7, 3, 3, 2, 0)),  # one layer does not rotate
        ("diffllama", (7, 3, 3, 0, 0)),  # rotated queries are changed before the attention
        ("llama-heads-of-20", (7, 3, 3, 0, 0)),  # the cache pads the keys
        ("llama-yarn", (7, 3, 3, 3, 0)),
        ("qwen3-moe", (13, 0, 3, 3, 3)),
        ("longcat", (9, 2, 2, 0, 0)),
    ],
)
@pytest.mark.slow
def test_one_line_says_how_many_modules_are_replaced(
    kind: str, counts: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire.worker.models.transformers.fused"):
        load(make_kind(tmp_path / kind, kind))
    expected = ", ".join(f"{count} {name}" for count, name in zip(counts, NAMES, strict=True))
    lines = [one.getMessage() for one in caplog.records if one.name.endswith("transformers.fused")]
    assert [line.partition(": ")[2] for line in lines] == [f"the kernels compute {expected}"]


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("kind", ["llama-yarn", "phi3", "olmo2", "gemma3"])
@pytest.mark.slow
def test_rows_keep_their_bits_in_any_batch(kind: str, tmp_path: Path) -> None:
    model = load(make_kind(tmp_path / kind, kind))
    assert model.is_row_invariant
    texts = trial.texts(VOCAB_SIZE, 256)
    assert torch.equal(trial.over_pages(model, texts), trial.one_by_one(model, texts))


@pytest.mark.usefixtures("cpu_kernels")
def test_the_memory_of_every_weight_is_counted_once(tmp_path: Path) -> None:
    plain = load(make_kind(tmp_path / "gelu", "llama-gelu"))
    fused = load(make_kind(tmp_path / "silu", "llama-gelu", hidden_act="silu"))
    modules, others = (one._model for one in (plain, fused))
    assert packed_bytes(others) == packed_bytes(modules)
    read = sum(one.numel() for one in modules.parameters()) * 4
    assert plain.weight_bytes >= packed_bytes(modules) + read


NORM_WIDTH = 48


class Norm(nn.Module):
    """RMSNorm with a given use of its weight."""

    def __init__(self, offset: float = 0.0, eps: float = 1e-6, centred: bool = False, power: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 1.5, NORM_WIDTH))
        self.eps, self.offset, self.centred, self.power = eps, offset, centred, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        if self.centred:
            values = values - values.mean(-1, keepdim=True)
        values = values * torch.rsqrt(values.abs().pow(self.power).mean(-1, keepdim=True) + self.eps)
        return (values * (self.offset + self.weight.float())).type_as(x)


class NoWeight(nn.Module):
    eps: float

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm", [Norm(), Norm(offset=1), Norm(eps=1e-3), Norm(centred=True)], ids=["rms", "1+w", "eps", "centred"]
)
@torch.inference_mode()
def test_a_recognised_norm_gives_the_same(norm: Norm, dtype: torch.dtype) -> None:
    module = norm.to(dtype)
    found = recognise(module, NORM_WIDTH, kernels.select_ops("cpu", dtype))
    assert found is not None
    assert isinstance(found, RmsNorm) is not norm.centred
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, NORM_WIDTH, 7, dtype=dtype, generator=draw).transpose(1, 2)  # not contiguous
    assert is_near(found(x), module(x))
    other = torch.randn(2, NORM_WIDTH, dtype=torch.float64)
    if not norm.centred:
        torch.testing.assert_close(found(other), module(other))


@pytest.mark.parametrize("norm", [Norm(offset=0.5), Norm(power=1), Norm(eps=0.5)])
def test_another_function_is_left_alone(norm: Norm) -> None:
    assert recognise(norm, NORM_WIDTH, kernels.select_ops("cpu", torch.float32)) is None


@torch.inference_mode()
def test_norms_that_were_called_with_one_width_are_replaced() -> None:
    model = nn.ModuleDict({"called": Norm(), "unused": Norm(), "two": NoWeight(), "one": NoWeight()})
    x = torch.randn(3, NORM_WIDTH)
    with NormInputs(model) as inputs:
        model["called"](x), model["two"](x), model["two"](x[:, :16]), model["one"](x)
    expected = model["one"](x)
    assert fuse_norms(inputs, kernels.select_ops("cpu", torch.float32)) == 2
    assert {name for name, one in model.items() if "forward" in vars(one)} == {"called", "one"}
    torch.testing.assert_close(model["one"](x), expected)


def test_rows_of_zeros_tell_nothing() -> None:
    assert not is_near(torch.zeros(2, 4), torch.zeros(2, 4))
    assert is_near(torch.ones(2, 4), torch.ones(2, 4))
    assert not is_near(torch.ones(2, 4), torch.ones(2, 4).bfloat16())


OPS = kernels.select_ops("cpu", torch.float32)


class Projections(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 24, bias), nn.Linear(16, 8, bias), nn.Linear(16, 8, bias)
        self.o = nn.Linear(16, 16, not bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x), self.o(x + 1)], dim=-1)


def joins_of(model: nn.Module, x: torch.Tensor, works: bool = True) -> list[Any]:
    with LinearUses(model) as uses:
        model(x)
    return list(find_joins(model, uses.with_same_input(), set(), OPS, lambda: works))


@torch.inference_mode()
def test_joined_layers_give_the_same() -> None:
    for bias in (True, False):
        model, x = nn.Sequential(Projections(bias)), torch.randn(1, 5, 16)
        expected = model(x)
        q = model[0].q
        (join,) = joins_of(model, x)
        assert [one.out_features for one in join.layers] == [24, 8, 8]
        join.pack(OPS, Parts())
        torch.testing.assert_close(model(x), expected)
        assert isinstance(model[0].q, JoinedLinearModule)
        assert type(model[0].o) is nn.Linear
        assert q.weight is None


def test_nothing_is_joined_if_the_model_fails_with_strided_rows() -> None:
    seen = []
    model, x = Projections(), torch.randn(1, 5, 16)

    def works() -> bool:
        seen.append(model.q(x).is_contiguous())
        return False

    with LinearUses(model) as uses:
        model(x)
    assert find_joins(model, uses.with_same_input(), set(), OPS, works) == []
    assert seen == [False]
    assert model.q(x).is_contiguous()
    assert find_joins(model, uses.with_same_input(), {model.k, model.v}, OPS, lambda: True) == []


def test_layers_with_other_inputs_are_not_joined() -> None:
    class Apart(Projections):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q(x), self.k(x.clone()), self.v(x * 1), self.o(x + 1)], dim=-1)

    assert joins_of(Apart(), torch.randn(1, 5, 16)) == []


@torch.inference_mode()
def test_a_product_is_computed_once_per_input_and_then_forgotten() -> None:
    weight = torch.randn(12, 16)
    product = JoinedProduct(OPS, OPS.pack_linear(weight), 2)
    x, y = torch.randn(3, 16), torch.randn(3, 16)
    first = product.output_for(0, x)
    assert product.output_for(1, x) is first
    assert product._input is None
    assert product.output_for(0, x) is not first  # called twice: the input may have changed
    torch.testing.assert_close(product.output_for(1, y), y @ weight.T)


class Mlp(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.silu, bias: bool = False) -> None:
        super().__init__()
        # The order of definition is not that of the computation.
        self.c, self.b, self.a = nn.Linear(24, 16, bias), nn.Linear(16, 24, bias), nn.Linear(16, 24, bias)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.c(self.act(self.a(x)) * self.b(x))
        return found


class Merged(nn.Module):
    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.gate_first = nn.Linear(16, 48), nn.Linear(24, 16), gate_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.inner(x).chunk(2, dim=-1)
        found: torch.Tensor = self.outer(F.silu(one) * two if self.gate_first else one * F.silu(two))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [Mlp, lambda: Mlp(bias=True), lambda: Merged(True), lambda: Merged(False)], ids=["3", "bias", "2", "up"]
)
@torch.inference_mode()
def test_a_packed_mlp_gives_the_same(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    ops, x, model = kernels.select_ops("cpu", dtype), torch.randn(2, 5, 16).to(dtype), nn.Sequential(make().to(dtype))
    expected = model(x)
    (mlp,) = find_mlps(model, set(), ops)
    assert len(mlp.layers) == len(list(model[0].children()))
    mlp.pack(ops, Parts())
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=1e-4 if dtype is torch.float32 else 2e-2)
    assert not [one for one in model.modules() if type(one) is nn.Linear]
    assert not list(model.parameters())


def test_other_activations_and_layers_that_must_stay_are_left_alone() -> None:
    ops, kept = kernels.select_ops("cpu", torch.float32), Mlp()
    assert find_mlps(nn.Sequential(Mlp(F.gelu), Mlp(torch.sigmoid)), set(), ops) == []
    assert find_mlps(nn.Sequential(kept), {kept.b}, ops) == []
    assert len(find_mlps(nn.Sequential(kept), set(), ops)) == 1
    assert find_mlps(nn.Sequential(kept.bfloat16()), set(), ops) == []


COUNT, HIDDEN, INNER = 6, 32, 24

FIELDS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_experts": COUNT,
    "num_local_experts": COUNT,
    "n_routed_experts": COUNT,
}

KINDS = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts, "nemotron_h": NemotronHExperts}


def experts(kind: str, dtype: torch.dtype) -> Any:
    """Random experts of a kind: concatenated SiLU; interleaved, transposed, with biases and limits; without gate."""
    config = AutoConfig.for_model(kind, **FIELDS)
    config._experts_implementation = "eager"
    module: Any = KINDS[kind](config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_packed_experts_give_the_same(kind: str, dtype: torch.dtype) -> None:
    module, ops = experts(kind, dtype), kernels.select_ops("cpu", dtype)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(9, HIDDEN, generator=draw).to(dtype)
    # The last expert has no rows.
    index = torch.stack([torch.randperm(COUNT - 1, generator=draw)[:2] for _ in rows])
    weights = torch.rand(9, 2, generator=draw).to(dtype)
    expected = module(rows, index, weights)
    (found,) = find_experts(module, ops)
    size = found.nbytes
    found.pack(ops, Parts())
    assert sum(one.numel() for one in module.parameters()) == 0
    assert size <= module.packed.nbytes
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(module(rows, index, weights), expected, rtol=tolerance, atol=tolerance)
    if kind != "qwen3_moe":
        return  # torch computes the activation: the last elements of a tensor may have other bits
    one_by_one = torch.cat([module(*(part[at : at + 1] for part in (rows, index, weights))) for at in range(9)])
    torch.testing.assert_close(module(rows, index, weights), one_by_one, rtol=0, atol=0)


@torch.inference_mode()
def test_rows_without_an_expert_here_are_zero() -> None:
    module, ops = experts("qwen3_moe", torch.float32), kernels.select_ops("cpu", torch.float32)
    (found,) = find_experts(module, ops)
    found.pack(ops, Parts())
    assert not module(torch.randn(2, HIDDEN), torch.full((2, 1), COUNT), torch.ones(2, 1)).any()


def test_experts_that_compute_something_else_are_left_alone() -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    module = experts("qwen3_moe", torch.float32)
    module.forward = lambda rows, index, weights: rows * weights[:, :1]
    assert find_experts(module, ops) == []
    assert find_experts(experts("qwen3_moe", torch.bfloat16), ops) == []
    module = experts("qwen3_moe", torch.float32)
    module.has_post_expert_norm = True
    assert find_experts(module, ops) == []


def test_experts_of_a_version_without_norms_after_them_are_found() -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    module = experts("qwen3_moe", torch.float32)
    del module.has_post_expert_norm
    assert len(find_experts(module, ops)) == 1


HEADS, TOKENS, WIDTH = 2, 5, 16


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat([-b, a], dim=-1) * sin.unsqueeze(unsqueeze_dim)

    return rotate(q), rotate(k)


class Attending(nn.Module):
    """Rotates, and calls an attention. `change` is what a model may do between the two."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Any, k: Any, cos: Any, sin: Any, attention: Any) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if self.change is not None:
            q = self.change(q)
        return attention.attend(self, q, k, k)


class Plain(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def inputs() -> tuple[torch.Tensor, ...]:
    angles = torch.rand(1, TOKENS, WIDTH // 2)
    both = torch.cat([angles, angles], dim=-1)
    return torch.randn(1, HEADS, TOKENS, WIDTH), torch.randn(1, 1, TOKENS, WIDTH), both.cos(), both.sin()


def recorded(module: nn.Module, *given: torch.Tensor) -> dict[nn.Module, Rotation]:
    rotations = replace_rotations(nn.ModuleList([module, Plain()]))
    assert list(rotations) == [module]
    module(*given, RotationProbe(rotations))
    return rotations


class Keeping:
    def __init__(self, tables: RotationTables) -> None:
        self.tables = tables

    def attend(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.tables.table_for(module, q, k), q, k


def test_a_direct_rotation_is_deferred_and_gives_its_table() -> None:
    module, (q, k, cos, sin) = Attending(), inputs()
    deferred = defer(recorded(module, q, k, cos, sin), {WIDTH})
    assert list(deferred) == [module]
    attention = Keeping(RotationTables(deferred))
    table, q_given, k_given = module(q, k, cos, sin, attention)
    assert q_given is q
    assert k_given is k
    half = WIDTH // 2
    assert torch.equal(table, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1))
    assert module(q, k, cos, sin, attention)[0] is table
    assert attention.tables.table_for(Plain(), q, k) is None


@pytest.mark.parametrize("case", ["changed", "interleaved", "padded", "angles differ"])
def test_other_rotations_stay_with_the_model(case: str) -> None:
    module, (q, k, cos, sin) = Attending((lambda q: q * 2) if case == "changed" else None), inputs()
    if case == "interleaved":
        rotations = replace_rotations(module)
        original = rotations[module]._original
        rotations[module]._original = lambda q, k, *more, **rest: original(q.flip(-1), k, *more, **rest)
        module(q, k, cos, sin, RotationProbe(rotations))
    else:
        rotations = recorded(module, q, k, cos, sin.cumsum(-1) if case == "angles differ" else sin)
    assert defer(rotations, {WIDTH + 16} if case == "padded" else {WIDTH}) == {}
    assert "forward" not in vars(module)


def test_queries_that_change_in_a_step_are_an_error() -> None:
    module, given = Attending(), inputs()
    deferred = defer(recorded(module, *given), {WIDTH})
    module.change = torch.clone
    with pytest.raises(RuntimeError, match="after their rotation"):
        module(*given, Keeping(RotationTables(deferred)))


def test_rows_of_one_product_are_not_copied() -> None:
    rows = torch.randn(TOKENS, (HEADS + 2) * WIDTH)
    parts = rows.split([HEADS * WIDTH, WIDTH, WIDTH], dim=-1)
    q, k, v = (part.view(1, TOKENS, -1, WIDTH).transpose(1, 2) for part in parts)
    assert joined_rows(q, k, v).data_ptr() == rows.data_ptr()
    assert torch.equal(joined_rows(q, k, v), rows)
    for apart in ((q.clone(), k, v), (q, k.clone(), v), (q, v, k)):
        expected = torch.cat([part[0].transpose(0, 1).reshape(TOKENS, -1) for part in apart], dim=-1)
        assert torch.equal(joined_rows(*apart), expected)
