"""Log-probabilities of the tokens of a prompt, computed chunk by chunk while the prompt is computed.

The logits of position p score the token at p + 1, so the last position of a prompt scores nothing and the first token
has no score. A preempted group keeps its scores: positions that were scored are computed again without logits, or
found in the prefix cache. Positions without scores are never taken from the cache, because it has no logits.
"""

from __future__ import annotations

import torch

from quire.kernels import Ops
from quire.worker.engine.scoring import ScoredPositions, prompt_records


class PromptScores(ScoredPositions):
    """The scores of one prompt.

    prompt: its tokens. top: the number of most probable tokens whose log-probabilities are recorded, too.
    """

    def __init__(self, prompt: tuple[int, ...], top: int) -> None:
        super().__init__(0, len(prompt) - 1)
        self.prompt = prompt
        self.top = top

    def take(self, ops: Ops, logits: torch.Tensor) -> None:
        """Append the records of the next positions. logits: float32 [P, V]."""
        targets = list(self.prompt[self.num_scored + 1 :][: len(logits)])
        self.records += prompt_records(ops, logits, targets, self.top).tobytes()
        self.num_scored += len(logits)
