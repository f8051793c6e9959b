"""Examines a model that Transformers computes: its attention calls, its recurrent states, and what positions change."""

from __future__ import annotations

from typing import Any

import torch

from quire.worker.models.transformers import attention, trial
from quire.worker.models.transformers.attention import AttentionProbe, AttentionRecorder, UnsupportedAttention
from quire.worker.models.transformers.config import TransformersConfig
from quire.worker.models.transformers.shapes import AttentionShape
from quire.worker.models.transformers.sparse_attention import compressed_keys
from quire.worker.models.transformers.states import RecurrentStates, StateProbe
from quire.worker.models.transformers.written_attention import is_written_out, replace_attention

# Largest relative distance of the logits in the trial, by the type of the cache: with few bits a router may choose
# another expert. A wrong computation differs by more.
FAR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25, torch.float8_e4m3fn: 0.3, torch.int8: 0.3}


def examine(
    model: Any, config: TransformersConfig, text: torch.Tensor, dtype: torch.dtype, max_model_len: int
) -> tuple[list[AttentionShape], RecurrentStates | None, list[Any]]:
    """Record the parameters of each attention call, and replace the model's attention. Raises UnsupportedAttention.

    Returns the states of layers that keep some, too, and None if no layer does; and the module of each call.
    """
    if why := compressed_keys(model.config.get_text_config()):
        raise UnsupportedAttention(why)
    attention.register()
    probe = AttentionProbe(dtype, max_model_len)
    replace_attention(model, attention.EXAMINED)
    with attention.running(probe):
        trial.by_transformers(model, [text])
    replace_attention(model, attention.PAGED)
    states = None
    if config.may_keep_states or len(probe.shapes) < config.num_layers:
        states = examine_states(model, text, max_model_len)
    shapes = probe.shapes
    if len(shapes) < config.num_layers and states is None:
        raise UnsupportedAttention(
            f"{config.num_layers - len(shapes)} of its {config.num_layers} layers have no attention"
        )
    pasts = (None, trial.long_past()) if states is None else (StateProbe(model), StateProbe(model, trial.LONG))
    if not ignores_the_past(model, text, FAR[dtype], max_model_len, pasts):
        raise UnsupportedAttention("it takes positions from the cache of Transformers, which is not used")
    return shapes, states, probe.modules


def examine_states(model: Any, text: torch.Tensor, max_model_len: int) -> RecurrentStates | None:
    """Record the recurrent states of the layers. Returns None if no layer keeps a state."""
    probe = StateProbe(model)
    with attention.running(AttentionRecorder()), probe.watching():
        trial.at_the_end(model, text, max_model_len, probe)
    return RecurrentStates.of(probe)


def ignores_the_past(model: Any, text: torch.Tensor, far: float, max_model_len: int, pasts: tuple[Any, Any]) -> bool:
    """Return whether the model takes the positions of tokens only from the argument for them.

    Some models also count the tokens in the cache of Transformers, and scale scores of long contexts by that. Without
    such a cache they would count the tokens of a step.
    """
    if is_written_out(type(model)):  # its adapter takes no positions from a cache
        return True
    results = []
    for past in pasts:
        recorder = AttentionRecorder()
        with attention.running(recorder):
            last = trial.at_the_end(model, text, max_model_len, past)
        results.append([*recorder.given, last])
    return all(apart(here, there) < far for here, there in zip(*results, strict=True))


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative distance of two rows: |actual - expected| / |expected|."""
    differ = (actual - expected).float().norm(dim=-1)
    return float((differ / expected.float().norm(dim=-1).clamp(min=1e-30)).max())
