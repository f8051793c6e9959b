"""Names of tensors in checkpoints of vision-language models, and the names that they have in a text model."""

from __future__ import annotations

# Prefixes of the text model's tensors, and what they are in a text model.
PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
# Beginnings of the names of tensors of a text model.
OF_TEXT = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")


def text_tensor_name(name: str) -> str:
    """Return the name that a tensor of a wrapper has in a text model; `name` itself for any other tensor."""
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def layer_spellings(name: str) -> list[str]:
    """Return the names that a layer of a text model may have: alone, and inside a wrapper of any version."""
    plain = text_tensor_name(f"{name}.")
    inside = [prefix + plain.removeprefix(own) for prefix, own in PREFIXES if plain.startswith(own)]
    return [spelling.removesuffix(".") for spelling in (f"{name}.", plain, *inside)]
