"""RoPE frequencies that depend on the length of the context, for models of Transformers: chosen once, at load.

Transformers chooses them by the longest text of each step. The keys of a paged cache outlive a step, so all texts have
the frequencies of the longest context here. With longrope (Phi-3) these are those of `short_factor`, and of
`long_factor` for contexts beyond the original length. vLLM chooses alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.transformers.config import TransformersConfig


def keep_frequencies(model: nn.Module, config: TransformersConfig, max_model_len: int) -> None:
    """Make each RoPE module keep its frequencies, those for contexts of `max_model_len` tokens.

    Otherwise Transformers reads the positions of each step on the host. Raises NotSupported if a module changes its
    results with the length nevertheless.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            if max_model_len > config.max_position_embeddings:
                raise _refusal(config, "has RoPE of several kinds")
            module.rope_type = dict.fromkeys(kinds, "default")
        elif isinstance(kinds, str):
            if max_model_len > config.max_position_embeddings:
                _lengthen(module, config, max_model_len)
            module.rope_type = "default"


def _lengthen(module: Any, config: TransformersConfig, max_model_len: int) -> None:
    """Give a module with longrope its frequencies of long contexts, and check that it keeps them."""
    last, few = torch.tensor([[1, max_model_len - 1]]), torch.tensor([[1]])
    try:
        with torch.inference_mode():
            long = module(torch.zeros(1), last)
            kind, module.rope_type = module.rope_type, "default"
            short = module(torch.zeros(1), few)
            module.rope_type = kind
    except Exception as error:  # any line of a model's code can raise anything
        raise _refusal(config, f"cannot be asked for its RoPE ({type(error).__name__})") from error
    is_same = isinstance(long, tuple) and all(torch.equal(a[:, :1], b) for a, b in zip(long, short, strict=True))
    if not is_same:
        raise _refusal(config, "chooses the scale of RoPE by the length of each step")


def _refusal(config: TransformersConfig, why: str) -> CheckpointError:
    limit = config.max_position_embeddings
    what = f"{config.architecture} {why}, so its contexts end at the original length"
    return NotSupported(config.folder, what, f"give --max-model-len {limit} or less")
