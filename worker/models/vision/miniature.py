"""A small model of a checkpoint's classes and configuration, with random weights, and its answers by Transformers.

It has few layers and narrow ones, and a small vocabulary. All else is that of the checkpoint: the types of its layers,
the positions of its tokens, what layers get of an image, and the files of its processor.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from quire.shared.model.folder import CONFIG
from quire.worker.models.vision.families import FILES
from quire.worker.models.vision.tower import QUANTIZED, VisionTower

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FEW = 3  # layers
HEADS = 2
# Tokens of the small vocabulary besides those that the configuration names.
NUM_TOKENS = 256
# Endings of the names of fields that have ids of tokens.
OF_IDS = ("_token_id", "_token_ids", "_token_index")
# Names that a field has in one configuration or another.
DEPTHS = ("num_hidden_layers", "depth", "num_layers")
HEAD_COUNTS = ("num_attention_heads", "num_heads", "attention_heads")
WIDTHS = ("embed_dim", "hidden_size")
# Inputs of models that tell image tokens from others.
TYPES = ("mm_token_type_ids", "token_type_ids")


class Miniature(NamedTuple):
    """A small checkpoint. tokens: ids for text."""

    folder: Path
    tokens: range


def write_miniature(checkpoint: Path, folder: Path, is_narrow: bool) -> Miniature:
    """Write a small checkpoint into an empty folder. is_narrow: the vision tower is narrower too."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    whole: Any = AutoConfig.from_pretrained(checkpoint, **LOCAL)
    fields = json.loads((checkpoint / CONFIG).read_text())
    known = _map_ids(fields, whole)
    inner = fields["text_config"] if isinstance(fields.get("text_config"), dict) else fields
    deep = getattr(whole.vision_config, "deepstack_visual_indexes", None) or ()
    width = _shrink_text(inner, whole.get_text_config(), max(FEW, len(deep) + 1))
    inner["vocab_size"] = fields["vocab_size"] = known + NUM_TOKENS
    tower = fields.setdefault("vision_config", {})
    _shrink_tower(tower, whole.vision_config, max(FEW, len(deep) + 1), is_narrow)
    if hasattr(whole.vision_config, "out_hidden_size"):
        tower["out_hidden_size"] = width
    elif hasattr(whole.vision_config, "embed_dim") and hasattr(whole.vision_config, "hidden_size"):
        tower["hidden_size"] = width
    if (chosen := getattr(whole, "vision_feature_layer", None)) is not None:
        fields["vision_feature_layer"] = [_layer(one) for one in chosen] if isinstance(chosen, list) else _layer(chosen)
    for section in (fields, inner):
        for name in QUANTIZED:
            section.pop(name, None)
        section["dtype"] = section["torch_dtype"] = "float32"
    text = json.dumps(fields)
    (folder / CONFIG).write_text(text)
    for name in FILES:
        if (checkpoint / name).exists():
            (folder / name).write_bytes((checkpoint / name).read_bytes())
    model_class: Any = AutoModelForImageTextToText
    model = model_class.from_config(AutoConfig.from_pretrained(folder, **LOCAL), dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=draw)
            else:
                parameter.normal_(std=1.5 / max(parameter.shape[-1], 16) ** 0.5, generator=draw)
    model.save_pretrained(folder)
    (folder / CONFIG).write_text(text)
    return Miniature(folder, range(known, known + NUM_TOKENS))


def _map_ids(fields: dict[str, Any], whole: Any) -> int:
    """Give small numbers to all tokens that a configuration names. Returns the first number that is left."""
    sections = [(fields, whole.to_dict())]
    for name in ("text_config", "vision_config"):
        if isinstance(fields.get(name), dict):
            sections.append((fields[name], getattr(whole, name).to_dict()))
    found = {one for _, values in sections for name in values if name.endswith(OF_IDS) for one in _ids(values[name])}
    small = {one: number for number, one in enumerate(sorted(found))}
    for section, values in sections:
        for name in [name for name in values if name.endswith(OF_IDS) and values[name] is not None]:
            ids = [small.get(one, one) for one in _ids(values[name])]
            section[name] = ids if isinstance(values[name], list) else ids[0] if ids else values[name]
    return len(small)


def _ids(value: Any) -> Iterator[int]:
    """Return the ids of a field with one or several."""
    yield from (one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one >= 0)


def _shrink_text(section: dict[str, Any], config: Any, depth: int) -> int:
    """Make a text model narrow, with at least `depth` layers: some of each type. Returns its width."""
    num_layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if types:
        depth = max(depth, *(types.index(one) + 1 for one in set(types)))
    depth = min(depth, num_layers)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    # As a dictionary: an attribute that differs between layers cannot be read.
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // heads
    values: dict[str, Any] = {"num_hidden_layers": depth, "num_attention_heads": HEADS}
    width: int = HEADS * head_dim
    values["hidden_size"] = width
    values["intermediate_size"] = 2 * width
    values["moe_intermediate_size"] = values["shared_expert_intermediate_size"] = 64
    if kv_heads is not None:
        values["num_key_value_heads"] = HEADS if kv_heads == heads else 1
    section |= {name: value for name, value in values.items() if hasattr(config, name)}
    _cut_lists(section, config, num_layers, depth)
    return width


def _shrink_tower(section: dict[str, Any], config: Any, depth: int, is_narrow: bool) -> None:
    """Leave few layers of a vision tower. is_narrow: and few heads."""
    known = config.to_dict()
    name = next(name for name in DEPTHS if name in known)
    num_layers = known[name]
    section[name] = depth = min(depth, num_layers)
    _cut_lists(section, config, num_layers, depth)
    if deep := known.get("deepstack_visual_indexes"):
        section["deepstack_visual_indexes"] = list(range(len(deep)))
    if known.get("fullatt_block_indexes"):  # the other layers have windows
        section["fullatt_block_indexes"] = [depth - 1]
    if is_narrow:
        heads = next(name for name in HEAD_COUNTS if name in known)
        width = next(name for name in WIDTHS if name in known)
        head_dim = known.get("head_dim") or known[width] // known[heads]
        section[heads], section[width] = HEADS, HEADS * head_dim
        if "intermediate_size" in known:
            section["intermediate_size"] = 2 * section[width]


def _cut_lists(section: dict[str, Any], config: Any, num_layers: int, depth: int) -> None:
    """Cut lists with a value for each layer, and what a configuration says of single layers."""
    if layers := section.get("per_layer_config"):
        section["per_layer_config"] = {index: values for index, values in layers.items() if int(index) < depth}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == num_layers:
            section[name] = value[:depth]


def _layer(index: int) -> int:
    """Return a layer of a small tower in place of one of the tower."""
    return max(index, -FEW) if index < 0 else min(index, FEW)


class ScoredAnswer(NamedTuple):
    """A greedy answer, and the log-probabilities [N, V] of all tokens in each of its places."""

    tokens: list[int]
    logprobs: torch.Tensor


def answer_by_transformers(
    folder: Path, tower: VisionTower, prompt: Sequence[int], pictures: list[Image.Image], count: int
) -> ScoredAnswer:
    """Return the greedy answer of `count` tokens to a prompt with images. tower: of the same checkpoint."""
    from transformers import AutoModelForImageTextToText

    model_class: Any = AutoModelForImageTextToText
    model = model_class.from_pretrained(folder, dtype=torch.float32, **LOCAL).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    inputs = tower.prepare(pictures) | dict.fromkeys(TYPES, (ids == tower.image_token_id).int())
    taken = inspect.signature(model.forward).parameters
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **{
            name: value.float() if value.is_floating_point() else value
            for name, value in inputs.items()
            if name in taken
        },
    )
    return ScoredAnswer(out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().log_softmax(-1))
