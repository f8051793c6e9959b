"""Data of the engine: a `Sequence` is token ids over a block table; a `SequenceGroup` is a request with its sequences.

    token_ids:  | prompt tokens | output tokens |
                | computed: K and V in the cache      | remaining: this and later steps |
                0                                     ^ num_computed                    ^ len

A decoding sequence has one remaining token, the last one drawn. The sequences of a group begin as one: the leader
computes the prompt, then the others fork from it and share its blocks. After preemption by recomputation nothing is
computed, prompt and output are one new prompt (paper section 4.5), and a group forks again behind the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from quire.shared.messages import SamplingParams

if TYPE_CHECKING:
    from quire.worker.engine.beams import BeamSearch
    from quire.worker.engine.grammars import Matcher


# A token that is drawn and not yet known to the host.
PENDING = -1


class Sequence:
    """One choice of a request, or one beam."""

    __slots__ = (
        "_num_computed",
        "block_hashes",
        "block_table",
        "choice",
        "finish_reason",
        "group",
        "host_table",
        "is_decoding",
        "logprob",
        "logprobs",
        "matched_stop",
        "matcher",
        "num_cached_blocks",
        "num_prompt_tokens",
        "num_stored",
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
        self._num_computed = 0
        # Tokens whose K and V were in the blocks when the sequence got them. More than num_computed only where a whole
        # prompt was found in the prefix cache: its last token is computed once more for its logits, and not written.
        self.num_stored = 0
        self.block_table: list[int] = []
        # Blocks in host memory that hold the sequence while it is swapped out.
        self.host_table: list[int] = []
        # The hash chain over the full blocks of token_ids, computed as far as it was needed. The prefix cache knows the
        # first `num_cached_blocks` blocks of the table.
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        # Index of this sequence in the persistent arrays while it runs, else -1.
        self.row = -1
        self.is_decoding = False
        self.finish_reason: str | None = None
        self.matched_stop: str | None = None
        # Sum of the log-probabilities of the drawn tokens; kept only where best_of or the request asks for them.
        self.logprob = 0.0
        # The records (`quire.shared.logprobs`) of drawn tokens that have not left, where the request asks for them.
        self.logprobs = bytearray()
        # Which tokens may come next, where the request asks for a grammar.
        self.matcher: Matcher | None = None
        # How often each token was drawn; kept only where a penalty asks for it.
        self.output_counts: Counter[int] | None = Counter(output) if group.has_penalties else None

    def copy(self, choice: int) -> Sequence:
        """A sequence with the same tokens and no blocks: the data half of a fork."""
        child = Sequence(self.group, choice, ())
        child.token_ids = self.token_ids.copy()
        child.num_prompt_tokens = self.num_prompt_tokens
        child.block_hashes = self.block_hashes.copy()
        child.logprob = self.logprob
        child.output_counts = None if self.output_counts is None else self.output_counts.copy()
        return child

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V the model has computed; of a decoding sequence, between steps, all but the last."""
        return len(self.token_ids) - 1 if self.is_decoding else self._num_computed

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self._num_computed = count

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def take_logprobs(self) -> bytes | None:
        """The records of tokens that leave now; None where the request does not ask for them."""
        if not self.group.sampling.logprobs:
            return None
        records = bytes(self.logprobs)
        self.logprobs.clear()
        return records

    def __repr__(self) -> str:
        return (
            f"Sequence({self.group.request_id}/{self.choice} len={len(self.token_ids)} "
            f"computed={self.num_computed} blocks={len(self.block_table)} {self.finish_reason or 'unfinished'})"
        )


class GroupState(Enum):
    """Where a group is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    OUT = "out"


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """A request in the engine. Its sequences are scheduled, preempted and resumed together (paper section 4.5).

    `priority` (0 is the highest class) and `arrival` order groups: first come, first served within a class.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: int = 0
    priority: int = 0
    # Where the hash chain of the prefix cache starts: model, adapter and salt.
    cache_root: bytes = b""
    sequences: list[Sequence] = field(default_factory=list)
    state: GroupState = GroupState.OUT
    # Whether every sequence has blocks of its own; before that only the leader has.
    is_forked: bool = False
    # Rows of the persistent arrays that are kept free for sequences of this group that are yet to fork.
    num_reserved_rows: int = 0
    beams: BeamSearch | None = None
    # Name under which the blocks of the prompt stay in the cache for ever.
    pin_as: str | None = None
    # Whether tokens leave step by step; and whether there is one sequence only, whose tokens do.
    is_streamed: bool = True
    is_single: bool = False

    def start(self, outputs: Mapping[int, SequenceOf[int]] | None = None) -> None:
        """Make one sequence per choice; `outputs` are the tokens that an earlier attempt drew, by choice.

        A beam search begins with one sequence and forks by itself.
        """
        outputs = outputs or {}
        count = 1 if self.sampling.beam_width else self.sampling.num_sequences
        self.sequences = [Sequence(self, i, self.prompt, outputs.get(i, ())) for i in range(count)]
        self.is_streamed = self.sampling.is_streamed
        self.is_single = self.is_streamed and count == 1

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first, and who gives way last."""
        return self.priority, self.arrival

    @property
    def has_penalties(self) -> bool:
        s = self.sampling
        return bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_emitted(self) -> int:
        """Tokens of all choices that left as results, between steps; those that are not known yet did not."""
        if not self.is_streamed:
            return 0
        return sum(one.num_output_tokens - one.token_ids[-2:].count(PENDING) for one in self.sequences)

    @property
    def num_rows(self) -> int:
        """Sequences that the group may run at once from now on."""
        return self.sampling.beam_width or len(self.unfinished)

    @property
    def needs_fork(self) -> bool:
        """Whether the leader computes the prompt for sequences that have no blocks yet."""
        return not self.is_forked and len(self.unfinished) > 1
