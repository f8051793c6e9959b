"""Mixtures of experts of a checkpoint: their configuration, and the names and shapes of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.moe import CLAMPED, Routing
from quire.worker.models.families import Family
from quire.worker.models.fields import Fields

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


STYLES = {
    "mixtral": Style("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "qwen3_moe": Style("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    "gpt_oss": Style("mlp", "router", "gate_up_proj", "gate_up_proj", "down_proj", is_stacked=True),
}


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
        """Shapes of the tensors of a layer by name. layer: such as `model.layers.0`."""
        style, inner = self.style, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            f"{layer}.{style.block}.{style.router}.weight": (self.routing.num_experts, hidden)
        }
        if style.is_stacked:
            count, experts = self.routing.num_experts, f"{layer}.{style.block}.experts"
            return shapes | {
                f"{layer}.{style.block}.{style.router}.bias": (count,),
                f"{experts}.{style.gate}": (count, hidden, 2 * inner),
                f"{experts}.{style.gate}_bias": (count, 2 * inner),
                f"{experts}.{style.down}": (count, inner, hidden),
                f"{experts}.{style.down}_bias": (count, hidden),
            }
        for expert in range(self.routing.num_experts):
            at = f"{layer}.{style.block}.experts.{expert}"
            shapes[f"{at}.{style.gate}.weight"] = shapes[f"{at}.{style.up}.weight"] = (inner, hidden)
            shapes[f"{at}.{style.down}.weight"] = (hidden, inner)
        return shapes


def parse_experts(fields: Fields, family: Family, num_layers: int) -> ExpertsConfig | None:
    """Read the fields of a mixture of experts; None for a family without. Raises CheckpointError."""
    if not family.experts:
        return None
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None]
    if len(names) == 2 and fields.get(names[0]) != fields.get(names[1]):
        raise fields.fault(names[0], f"the value of num_local_experts, which is {fields.get(names[1])}")
    name = names[0] if names else "num_experts"
    num_experts = fields.integer(name, family.default("num_experts"), maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", family.default("num_experts_per_tok"), maximum=num_experts)
    if family.experts == "mixtral":
        inner = fields.integer("intermediate_size")
        routing, layers = Routing(num_experts, top_k, normalised=True), (True,) * num_layers
    elif family.experts == "gpt_oss":
        inner = fields.integer("intermediate_size")
        routing, layers = Routing(num_experts, top_k, normalised=True, activation=CLAMPED), (True,) * num_layers
    else:
        inner = fields.integer("moe_intermediate_size", family.default("moe_intermediate_size"))
        routing = Routing(num_experts, top_k, normalised=fields.flag("norm_topk_prob", False))
        layers = _layers_with_experts(fields, num_layers)
    return ExpertsConfig(STYLES[family.experts], routing, inner, layers)


def _layers_with_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(not isinstance(at, int) or isinstance(at, bool) for at in dense):
        raise fields.fault("mlp_only_layers", "a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
