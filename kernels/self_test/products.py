"""Cases of products: linear layers of each kind of weights, the gated activations, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.fp8_rows import FP8_DYNAMIC, MULTIPLE, fp8_linear
from quire.kernels.grouped_weight import KINDS, GroupedWeight
from quire.kernels.moe import SILU, ExpertWeights, route
from quire.kernels.ops import PackedLinear
from quire.kernels.quantization import QuantizedWeight, quantized_linear
from quire.kernels.reference_linear import ReferenceLinear, ReferenceMoE, ReferencePacked, reference_moe
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import FULL, CaseInputs
from quire.kernels.uses import ExpertsUse, LinearUse
from quire.kernels.weights import LinearWeight

# In units of the type of activations: one rounding, three in a gated activation, and more in experts.
LINEAR, GATED, EXPERTS = 1.5, 5, 8
# FP8 tensor cores keep about 13 bits of a sum.
FP8_UNIT = 2.0**-9
FP8_KERNEL = "fp8_matmul"
TOKENS = (1, 33)  # of each case: as in a decode step, and as in a prompt


def linear_cases(inputs: CaseInputs, uses: Iterable[LinearUse], gate: str) -> Iterator[KernelCase]:
    """Yield the cases of linear layers. gate: the activation of gates."""
    for use in chosen(uses, inputs.level):
        yield from _of_linear(inputs, use, gate)


def chosen(uses: Iterable[LinearUse], level: str) -> list[LinearUse]:
    """Return all uses for FULL, else the use with the most input features of each kind."""
    distinct = list(dict.fromkeys(uses))
    if level == FULL:
        return distinct
    most: dict[tuple[str, bool], LinearUse] = {}
    for use in distinct:
        key = use.kind, use.is_gate_up
        if key not in most or use.in_features > most[key].in_features:
            most[key] = use
    return list(most.values())


def _of_linear(inputs: CaseInputs, use: LinearUse, gate: str) -> Iterator[KernelCase]:
    ops, k = inputs.ops, use.in_features
    step = MULTIPLE if use.kind == FP8_DYNAMIC else 2
    columns = max(step, min(use.out_features, inputs.most_elements // k) // step * step)
    fitted = replace(use, out_features=columns)
    generator = inputs.generator(k)
    weight, exact = inputs.weight(columns, k, use.kind, generator)
    bias = inputs.normal(columns, generator=generator) if use.has_bias else None
    xs = [inputs.normal(tokens, k, generator=generator) for tokens in TOKENS]

    def product(x: Tensor) -> Tensor:
        return _exact(inputs, use, x, weight, exact, bias)

    unit = _unit(inputs, use)
    plain = ops.pack_linear(weight, bias)
    shape = f"{fitted}, {inputs.types}"
    yield KernelCase(
        "product",
        _kernel(use),
        shape,
        lambda: [ops.linear(x, plain) for x in xs],
        lambda: [product(x) for x in xs],
        LINEAR * unit,
        survives_errors=use.kind == FP8_DYNAMIC,  # torch refuses shapes and devices before it launches anything
    )
    if not use.is_gate_up:
        return
    packed = ops.pack_gate_up(weight, bias)
    name, multiply = ("silu_mul", ops.linear_silu_mul) if gate == SILU else ("gelu_mul", ops.linear_gelu_mul)
    activate: Callable[[Tensor], Tensor] = F.silu if gate == SILU else lambda x: F.gelu(x, approximate="tanh")

    def gated(x: Tensor) -> Tensor:
        gates, ups = product(x).chunk(2, dim=-1)
        return activate(gates) * ups

    yield KernelCase(
        "gated activation",
        name,
        shape,
        lambda: [multiply(x, packed) for x in xs],
        lambda: [gated(x) for x in xs],
        GATED * unit,
    )


def _kernel(use: LinearUse) -> str:
    """Return the kernel of a product: "linear" for cuBLAS or another library."""
    if use.kind == FP8_DYNAMIC:
        return FP8_KERNEL
    return "grouped_matmul" if use.kind in KINDS else "linear"


def _unit(inputs: CaseInputs, use: LinearUse) -> float:
    """Return the unit of the tolerance of a product."""
    return max(inputs.unit, FP8_UNIT) if use.kind == FP8_DYNAMIC else inputs.unit


def _exact(
    inputs: CaseInputs, use: LinearUse, x: Tensor, weight: LinearWeight, exact: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the product of x in float32. exact: the values of the weights.

    The replacement of FP8 products does not round activations.
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    if use.kind == FP8_DYNAMIC and FP8_KERNEL not in getattr(inputs.ops, "replaced", ()):
        assert isinstance(weight, GroupedWeight)
        return fp8_linear(x, weight, bias)
    return F.linear(x.float(), exact, None if bias is None else bias.float())


def logits_case(inputs: CaseInputs, use: LinearUse) -> KernelCase:
    """Return the case of the head, whose logits are not rounded."""
    ops, k = inputs.ops, use.in_features
    columns = max(2, min(use.out_features, inputs.most_elements // k))
    if use.kind == FP8_DYNAMIC:
        columns = max(MULTIPLE, columns // MULTIPLE * MULTIPLE)
    generator = inputs.generator(k + 1)
    weight, exact = inputs.weight(columns, k, use.kind, generator)
    x = inputs.normal(4, k, generator=generator)
    packed = ops.pack_linear(weight)

    return KernelCase(
        "logits",
        _kernel(use),
        f"{replace(use, out_features=columns)}, {inputs.types}",
        lambda: [ops.linear_logits(x, packed)],
        lambda: [_exact(inputs, use, x, weight, exact)],
        LINEAR * (FP8_UNIT if use.kind == FP8_DYNAMIC else min(inputs.unit, 2.0**-11)),
        survives_errors=use.kind == FP8_DYNAMIC,
    )


def experts_cases(inputs: CaseInputs, uses: Iterable[ExpertsUse]) -> Iterator[KernelCase]:
    """Yield the cases of mixtures of experts. The number of experts is the model's; their features are cut to fit."""
    for use in dict.fromkeys(uses):
        per_expert = inputs.most_elements // (3 * use.routing.num_experts)
        hidden = _cut(use.hidden, max(64, int((2 * per_expert) ** 0.5)))
        inner = _cut(use.inner, max(32, per_expert // hidden))
        yield _of_experts(inputs, replace(use, hidden=hidden, inner=inner))


def _cut(features: int, most: int) -> int:
    return features if features <= most else most // 32 * 32


def _of_experts(inputs: CaseInputs, use: ExpertsUse) -> KernelCase:
    ops, generator, routing = inputs.ops, inputs.generator(use.inner), use.routing
    router = inputs.normal(routing.num_experts, use.hidden, generator=generator, dtype=torch.float32)
    router = (router * (2 / use.hidden**0.5)).to(ops.dtype)

    def bias(width: int) -> Tensor | None:
        return inputs.normal(width, generator=generator) if use.has_biases else None

    experts, exact_experts = [], []
    for _ in range(routing.num_experts):
        gate_up, exact_gate_up = inputs.weight(2 * use.inner, use.hidden, use.kind, generator)
        down, exact_down = inputs.weight(use.hidden, use.inner, use.kind, generator)
        biases = bias(2 * use.inner), bias(use.hidden)
        experts.append(ExpertWeights(gate_up, down, *biases))
        exact_experts.append(ExpertWeights(exact_gate_up, exact_down, *biases))
    xs = [inputs.normal(tokens, use.hidden, generator=generator) for tokens in TOKENS]
    packed = ops.pack_moe(routing, ops.pack_linear(router), experts)

    def wide(weight: object, added: Tensor | None) -> ReferenceLinear:
        assert isinstance(weight, Tensor)
        return ReferenceLinear(weight, None if added is None else added.float())

    def exact_product(rows: Tensor, linear: PackedLinear) -> Tensor:
        assert isinstance(linear, ReferenceLinear)
        return F.linear(rows, linear.weight, linear.bias)

    def exact() -> Sequence[Tensor]:
        pairs: list[tuple[ReferencePacked, ReferencePacked]] = [
            (wide(expert.gate_up, expert.gate_up_bias), wide(expert.down, expert.down_bias)) for expert in exact_experts
        ]
        reference = ReferenceMoE(routing, ReferenceLinear(router, None), pairs)
        outputs = []
        for x in xs:
            ids, weights = route((x.float() @ router.float().T).to(ops.dtype), routing)
            outputs.append(reference_moe(x.float(), ids, weights, reference, exact_product))
        return outputs

    return KernelCase(
        "experts",
        "moe",
        f"{use}, {inputs.types}",
        lambda: [ops.moe(x, packed) for x in xs],
        exact,
        EXPERTS * inputs.unit,
    )
