"""Data of the engine: a `Sequence` is token ids over a block table; a `SequenceGroup` is a request with its sequences.

    token_ids:  | prompt tokens | output tokens |
                | computed: K and V in the cache      | remaining: this and later steps |
                0                                     ^ num_computed                    ^ len

A decoding sequence has one remaining token, the last one drawn. After preemption nothing is computed, and prompt and
output are one new prompt (paper section 4.5, recomputation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from shared.messages import SamplingParams


class Sequence:
    """One choice of a request."""

    __slots__ = (
        "block_table",
        "choice",
        "finish_reason",
        "group",
        "matched_stop",
        "num_computed",
        "num_prompt_tokens",
        "output_counts",
        "row",
        "token_ids",
    )

    def __init__(
        self, group: SequenceGroup, choice: int, prompt: tuple[int, ...], output: SequenceOf[int] = ()
    ) -> None:
        self.group = group
        self.choice = choice
        self.token_ids: list[int] = [*prompt, *output]
        self.num_prompt_tokens = len(prompt)
        self.num_computed = 0
        self.block_table: list[int] = []
        # Index of this sequence in the runner's persistent arrays while it runs, else -1.
        self.row = -1
        self.finish_reason: str | None = None
        self.matched_stop: str | None = None
        # How often each token was drawn; kept only where a penalty asks for it.
        self.output_counts: Counter[int] | None = Counter(output) if group.has_penalties else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose K and V are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int) -> None:
        """Take a drawn token."""
        self.token_ids.append(token_id)
        if self.output_counts is not None:
            self.output_counts[token_id] += 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.group.request_id}/{self.choice} len={len(self.token_ids)} "
            f"computed={self.num_computed} blocks={len(self.block_table)} {self.finish_reason or 'unfinished'})"
        )


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """A request in the engine. `arrival` orders groups first come, first served."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    # Tokens of all choices that were handed out as results so far.
    num_emitted: int = 0

    def start(self, outputs: Mapping[int, SequenceOf[int]] | None = None) -> None:
        """Make one sequence per choice; `outputs` are the tokens that an earlier attempt drew, by choice."""
        outputs = outputs or {}
        self.sequences = [Sequence(self, i, self.prompt, outputs.get(i, ())) for i in range(self.sampling.n)]
        self.num_emitted = sum(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def has_penalties(self) -> bool:
        s = self.sampling
        return bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)
