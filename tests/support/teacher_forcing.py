"""Compares answers with Transformers by teacher forcing: each token must be the best one after all before it.

By induction these are the tokens of greedy decoding. Each text is computed alone, without padding and without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# Two tokens whose logits differ by less than this may change places by rounding.
TIE = 1e-4


def load_reference(path: Path, model_class: Any = None, attention: str = "eager") -> Any:
    """Load a checkpoint with Transformers in float32. model_class: AutoModelForCausalLM by default."""
    from transformers import AutoModelForCausalLM

    model_class = model_class or AutoModelForCausalLM
    return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


def assert_greedy(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Check that each answer is the greedy one of a model of Transformers."""
    assert len(prompts) == len(answers)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].float()
        lost = rows.max(dim=-1).values - rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float(lost.max()) < TIE, f"prompt {number} of {len(prompt)} tokens, token {int(lost.argmax())}"
