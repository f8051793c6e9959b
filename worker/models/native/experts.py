"""Mixtures of experts of a checkpoint: their configuration, and the names and shapes of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire.kernels.ops import CLAMPED, GELU, Routing
from quire.shared.model.fields import REQUIRED, Fields
from quire.worker.models.native.families import Family

MAX_EXPERTS = 1024


@dataclass(frozen=True)
class Style:
    """The names of the tensors of an architecture, after the name of the layer."""

    block: str
    router: str
    gate: str
    up: str
    down: str
    is_stacked: bool = False  # all experts are one tensor, transposed; gates and ups alternate
    has_biases: bool = False
    is_added: bool = False  # Gemma 4: the layer adds up an MLP and stacked experts, with gates before ups


STYLES = {
    "mixtral": Style("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "qwen3_moe": Style("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    "gpt_oss": Style("mlp", "router", "gate_up_proj", "gate_up_proj", "down_proj", is_stacked=True, has_biases=True),
    "gpt_oss_single": Style("mlp", "router", "gate_proj", "up_proj", "down_proj", has_biases=True),
    "gemma4": Style("", "router.proj", "gate_up_proj", "gate_up_proj", "down_proj", is_added=True),
}
# After the name of a layer: the scales of the router's input and of the experts, and their norms.
ROUTER_SCALE, EXPERT_SCALES = "router.scale", "router.per_expert_scale"
EXPERTS_NORM, MLP_OUTPUT_NORM, EXPERTS_OUTPUT_NORM = (
    f"{name}.weight"
    for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
)


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a model. `layers` has an entry per layer: True if the layer has experts instead of one MLP."""

    style: Style
    routing: Routing
    intermediate_size: int  # inner features of one expert
    layers: tuple[bool, ...]

    def split(self, size: int) -> ExpertsConfig:
        """Return the part of one of `size` ranks: each has a part of the inner features of every expert."""
        return replace(self, intermediate_size=self.intermediate_size // size)

    def tensor_shapes(self, layer: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a layer by name. layer: such as `model.layers.0`."""
        style, inner, count = self.style, self.intermediate_size, self.routing.num_experts
        if style.is_added:
            return {
                f"{layer}.{style.router}.weight": (count, hidden),
                f"{layer}.experts.{style.gate}": (count, 2 * inner, hidden),
                f"{layer}.experts.{style.down}": (count, hidden, inner),
                f"{layer}.{ROUTER_SCALE}": (hidden,),
                f"{layer}.{EXPERT_SCALES}": (count,),
                **{f"{layer}.{name}": (hidden,) for name in (EXPERTS_NORM, MLP_OUTPUT_NORM, EXPERTS_OUTPUT_NORM)},
            }
        shapes: dict[str, tuple[int, ...]] = {f"{layer}.{style.block}.{style.router}.weight": (count, hidden)}
        if style.has_biases:
            shapes[f"{layer}.{style.block}.{style.router}.bias"] = (count,)
        if style.is_stacked:
            experts = f"{layer}.{style.block}.experts"
            return shapes | {
                f"{experts}.{style.gate}": (count, hidden, 2 * inner),
                f"{experts}.{style.gate}_bias": (count, 2 * inner),
                f"{experts}.{style.down}": (count, inner, hidden),
                f"{experts}.{style.down}_bias": (count, hidden),
            }
        for expert in range(count):
            at = f"{layer}.{style.block}.experts.{expert}"
            shapes[f"{at}.{style.gate}.weight"] = shapes[f"{at}.{style.up}.weight"] = (inner, hidden)
            shapes[f"{at}.{style.down}.weight"] = (hidden, inner)
            if style.has_biases:
                shapes[f"{at}.{style.gate}.bias"] = shapes[f"{at}.{style.up}.bias"] = (inner,)
                shapes[f"{at}.{style.down}.bias"] = (hidden,)
        return shapes


def parse_experts(fields: Fields, family: Family, num_layers: int, are_single: bool = False) -> ExpertsConfig | None:
    """Read the fields of a mixture of experts; None for a family without. Raises CheckpointError.

    are_single: each expert can be read alone, also those that the family stores as one tensor.
    """
    if not family.experts or (family.experts == "gemma4" and not fields.flag("enable_moe_block", False)):
        return None
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None]
    if len(names) == 2 and fields.get(names[0]) != fields.get(names[1]):
        raise fields.fault(names[0], f"the value of num_local_experts, which is {fields.get(names[1])}")
    name = names[0] if names else "num_experts"
    num_experts = fields.integer(name, _required(family.default("num_experts")), maximum=MAX_EXPERTS)
    chosen = "top_k_experts" if family.experts == "gemma4" else "num_experts_per_tok"
    top_k = fields.integer(chosen, _required(family.default(chosen)), maximum=num_experts)
    if family.experts == "gemma4":
        inner = fields.integer("moe_intermediate_size")
        routing, layers = Routing(num_experts, top_k, normalised=True, activation=GELU), (True,) * num_layers
    elif family.experts == "mixtral":
        inner = fields.integer("intermediate_size")
        routing, layers = Routing(num_experts, top_k, normalised=True), (True,) * num_layers
    elif family.experts == "gpt_oss":
        inner = fields.integer("intermediate_size")
        routing, layers = Routing(num_experts, top_k, normalised=True, activation=CLAMPED), (True,) * num_layers
    else:
        inner = fields.integer("moe_intermediate_size", family.default("moe_intermediate_size"))
        routing = Routing(num_experts, top_k, normalised=fields.flag("norm_topk_prob", False))
        layers = _layers_with_experts(fields, num_layers)
    style = f"{family.experts}_single" if are_single else family.experts
    return ExpertsConfig(STYLES.get(style, STYLES[family.experts]), routing, inner, layers)


def _required(default: Any) -> Any:
    return REQUIRED if default is None else default


def _layers_with_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(not isinstance(at, int) or isinstance(at, bool) for at in dense):
        raise fields.fault("mlp_only_layers", "a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
