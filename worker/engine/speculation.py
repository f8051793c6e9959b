"""What the engine asks of speculation (`quire.worker.engine.features.drafts`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from quire.shared.protocol.messages import PredictionCounts, StepItem
from quire.worker.engine.sampling_inputs import SamplingInputs
from quire.worker.engine.sequence import SequenceGroup
from quire.worker.engine.step import Step

PREDICTION, GRAMMAR, OWN, TENANT = SOURCES = ("prediction", "grammar", "own", "tenant")


@dataclass(slots=True)
class DraftCounters:
    """Since the start of the process, by source: drafted tokens, and accepted ones. Each accepted token saved its
    sequence a step."""

    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, dict[str, int]]:
        """Return copies of the counts, each with all sources."""
        counts = {"drafted_tokens": self.drafted, "accepted_tokens": self.accepted}
        return {name: {source: count[source] for source in SOURCES} for name, count in counts.items()}


class Speculation(Protocol):
    """Drafted tokens that steps compute too. No draft changes a token."""

    counters: DraftCounters

    def expect(self, group: SequenceGroup, prediction: tuple[int, ...]) -> None:
        """Note the tokens that the caller of a request expects as its answer."""

    def forget(self, group: SequenceGroup) -> PredictionCounts | None:
        """Forget a request that has ended. Returns the counts of its prediction, if it has one."""
        ...

    def is_due(self) -> bool:
        """Return whether the next step should know all tokens, so that it can compute drafts."""
        ...

    def add_to(self, step: Step, max_tokens: int) -> None:
        """Turn decodes of a step into verifications where drafts pay. max_tokens: of the step in all."""

    def accept(
        self,
        step: Step,
        inputs: SamplingInputs,
        logits: torch.Tensor,
        sample: Callable[[SamplingInputs], list[StepItem]],
    ) -> list[StepItem]:
        """Choose the tokens of a step with verifications. Returns the items, one for each request.

        inputs: of the sequences without a draft. logits: float32 [P, V], of the verified positions. sample: chooses a
        token for each sequence, appends it, and returns items.
        """
        ...

    def drop(self, step: Step) -> None:
        """Free the blocks of drafted positions that have no known token. Afterwards the step can be dropped."""
