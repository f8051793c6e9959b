"""Data of the engine: a `Sequence` is token ids over a block table; a `SequenceGroup` is a request with its sequences.

    token_ids:  | prompt tokens | output tokens |
                | computed: K and V in the cache      | remaining: this and later steps |
                0                                     ^ num_computed                    ^ len

A decoding sequence has one remaining token, the newest. The sequences of a group begin as one: the leader computes the
prompt, then the other sequences fork from it and share its blocks. After preemption by recomputation nothing is
computed; prompt and output are one new prompt (paper section 4.5), and a group forks again at the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.messages import CacheBreakpoint, PromptReport, SamplingParams
from quire.shared.protocol.messages.codec import pack_token_ids
from quire.worker.engine.seen_tokens import SeenTokens


class SizedAdapter(Protocol):
    """An adapter as `Ops.pack_adapter` returns it. The engine knows its size only."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter.

    digest: of its files, in hexadecimal; adapters with equal digests compute alike. packed: for the kernels.
    """

    name: str
    digest: str
    packed: SizedAdapter
    rank: int

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


class HiddenSum(Protocol):
    """A sum of hidden states, float64 [H]: a numpy array, or a tensor of the device."""

    def __truediv__(self, count: int, /) -> object: ...


class GrammarState(Protocol):
    """The state of a sequence in what its answer must follow: a grammar (`worker.engine.features.grammars`), and the
    end of its reasoning (`worker.engine.features.thinking`)."""

    @property
    def error(self) -> str | None: ...

    def allowed(self) -> np.ndarray | None: ...

    def forced(self) -> list[int]: ...

    def consume(self, token_ids: SequenceOf[int]) -> None: ...


class GrammarStates(Protocol):
    """The grammars of a model (`worker.engine.features.grammars`). Its methods raise RequestRefused."""

    def matcher(self, grammar: str) -> GrammarState:
        """Return the state at the beginning of an answer."""
        ...

    def resume(self, sampling: SamplingParams, outputs: dict[int, list[int]]) -> Mapping[int, GrammarState]:
        """Return the state of each choice of a request after its output so far; empty without a grammar."""
        ...


class ScoredPrompt(Protocol):
    """What a group makes of the logits of its prompt: log-probabilities (`worker.engine.features.prompt_scores`), or a
    comparison with a logged output (`worker.engine.features.replay`)."""

    num_scored: int
    records: bytearray

    @property
    def is_complete(self) -> bool: ...

    def max_tokens(self, start: int, positions: int) -> int: ...

    def num_positions(self, end: int) -> int: ...

    def take(self, ops: Any, logits: Any) -> None:
        """Take the logits of the next positions: a tensor [P, V]. ops: the operations of the model."""
        ...


class ImageSpans(Protocol):
    """The images of a prompt (`worker.engine.features.images`)."""

    def key(self, first: int, end: int) -> bytes:
        """Return what tells tokens first .. end - 1 from equal tokens with other images."""
        ...

    def max_tokens(self, first: int, count: int) -> int:
        """Return how many of the `count` tokens from `first` on a step may compute, so that the tower runs once."""
        ...

    def positions(self, first: int, end: int) -> np.ndarray:
        """Return the positions for RoPE of tokens first .. end - 1 of a sequence, int32."""
        ...

    def divided_by(self, position: int) -> tuple[int, int]:
        """Return the first token and the end of the image that a cut before this position would divide, although one
        step must compute all of it; or the position twice."""
        ...

    @property
    def offset(self) -> int:
        """The position for RoPE of a token after the prompt, less its index."""
        ...


class Search(Protocol):
    """The search of a group (`worker.engine.features.beams`)."""

    num_steps: int


# The lowest priority, that of the class `batch`.
LOWEST_PRIORITY = len(PRIORITY_CLASSES) - 1
# Placeholder for a token that the device has not returned to the host yet.
PENDING = -1
# The fault of a request whose grammar allows no token any more.
DEAD_END = "the answer cannot follow its grammar any more"


class Sequence:
    """One choice of a request, or one beam."""

    __slots__ = (
        "_num_computed",
        "block_hashes",
        "block_table",
        "choice",
        "finish_reason",
        "group",
        "held_snapshots",
        "host_table",
        "is_decoding",
        "logprob",
        "logprobs",
        "matched_stop",
        "matcher",
        "num_cached_blocks",
        "num_prompt_tokens",
        "num_stored",
        "parked_slot",
        "pooled",
        "row",
        "seen",
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
        # Number of tokens whose K and V were in the blocks when the sequence got the blocks. The number exceeds
        # num_computed only if the prefix cache had the whole prompt: the last token is then computed again for its
        # logits, and not written.
        self.num_stored = 0
        self.block_table: list[int] = []
        # Blocks in host memory, while the sequence is swapped out.
        self.host_table: list[int] = []
        # Slots of recurrent states (`worker.engine.features.states`): snapshots by number of tokens that the prefix
        # cache does not have yet, and the slot of the state while the sequence is swapped out.
        self.held_snapshots: dict[int, int] = {}
        self.parked_slot: int | None = None
        # Hash chain over the full blocks of token_ids, computed on demand. The prefix cache knows the first
        # `num_cached_blocks` blocks of the table.
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        # Row of the input batch while the sequence runs, else -1.
        self.row = -1
        self.is_decoding = False
        self.finish_reason: str | None = None
        self.matched_stop: str | None = None
        # Sum of the log-probabilities of the output; kept only for best_of and requests that ask for log-probabilities.
        self.logprob = 0.0
        # Records (`shared/protocol/logprobs.py`) of output tokens that no result has carried yet, if the
        # request asks for log-probabilities.
        self.logprobs = bytearray()
        # State of the grammar and of the reasoning, if the request bounds these.
        self.matcher: GrammarState | None = None
        # The tokens that penalties apply to, if the request has any.
        self.seen: SeenTokens | None = None
        if group.has_penalties:
            given = len(prompt) - group.num_kept
            repeated = prompt[:given] if group.sampling.repetition_penalty != 1.0 else ()
            self.seen = SeenTokens(repeated, (*prompt[given:], *output))
        # Sum of the hidden states of the computed tokens, for mean pooling (`worker.engine.features.pooling`).
        self.pooled: HiddenSum | None = None

    def copy(self, choice: int) -> Sequence:
        """Return a sequence with the same tokens and no blocks. `BlockManager.fork` shares the blocks."""
        child = Sequence(self.group, choice, ())
        child.token_ids = self.token_ids.copy()
        child.num_prompt_tokens = self.num_prompt_tokens
        child.block_hashes = self.block_hashes.copy()
        child.logprob = self.logprob
        child.seen = None if self.seen is None else self.seen.copy()
        return child

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V the model has computed. Between steps, all but the last for a decoding sequence."""
        return len(self.token_ids) - 1 if self.is_decoding else self._num_computed

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self._num_computed = count

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def take_logprobs(self) -> bytes | None:
        """Return and clear the records for the next result; None if the request does not ask for log-probabilities."""
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
    """State of a group in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"  # its blocks are in host memory
    OUT = "out"  # not in the scheduler: not added yet, or removed


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """A request in the engine.

    The sequences of a group are scheduled, preempted and resumed together (paper section 4.5).
    `priority` (0 is the highest class) and `arrival` order groups: first come, first served within a class.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: int = 0
    priority: int = 0
    # Root of the group's hash chain in the prefix cache (`blocks.cache_root`).
    cache_root: bytes = b""
    # Scope within which the group shares blocks that are not pinned (`blocks.cache_scope`).
    cache_scope: bytes = b""
    # The LoRA adapter of the request.
    adapter: Adapter | None = None
    sequences: list[Sequence] = field(default_factory=list)
    state: GroupState = GroupState.OUT
    # True if every sequence has a block table; before the fork only the leader has one.
    is_forked: bool = False
    # Free rows of the input batch reserved for sequences of this group that have not forked yet.
    num_reserved_rows: int = 0
    beams: Search | None = None
    # Name of the pinned prefix that this group computes, if it does.
    pin_as: str | None = None
    # is_streamed: results carry tokens step by step. is_single: the group streams a single sequence.
    is_streamed: bool = True
    is_single: bool = False
    # True if penalties, banned words, a grammar or a budget depend on the tokens so far.
    has_history: bool = False
    # Token sequences of `sampling.bad_words`.
    bad_words: tuple[tuple[int, ...], ...] = ()
    # Bit mask of `sampling.allowed_token_ids`, as grammars make them; None if all tokens are allowed.
    allowed_tokens: np.ndarray | None = None
    # Log-probabilities of the prompt, if the request asks for them and no earlier attempt has reported them.
    prompt_scores: ScoredPrompt | None = None
    # Tokens found in the prefix cache at the first start; -1 before.
    num_cached_tokens: int = -1
    # True once a result, perhaps of an earlier attempt, has carried the report about the prompt.
    is_reported: bool = False
    # Last tokens of the prompt that count as output, of a fork (`GenerationRequest.num_kept`).
    num_kept: int = 0
    # Added to the choices of the sequences, in the keys of random numbers.
    first_choice: int = 0
    # One of POOLINGS if the request wants the embedding of its prompt, and generates no token.
    pooling: str = ""
    images: ImageSpans | None = None
    # Places up to which the prompt is pinned once it is computed, and the owner of the pins.
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    pinned_for: str = ""
    # Tokens that this request has computed and pinned, for up to SHORT_TTL_S and for longer.
    pinned_tokens: tuple[int, int] = (0, 0)

    def start(self, outputs: Mapping[int, SequenceOf[int]] | None = None) -> None:
        """Create one sequence per choice, or a single one for a beam search, which forks at each step.

        outputs: tokens of an earlier attempt, by choice.
        """
        outputs = outputs or {}
        # Without tokens to generate, one sequence computes the prompt for all choices.
        count = 1 if self.sampling.beam_width or not self.sampling.max_tokens else self.sampling.num_sequences
        self.sequences = [Sequence(self, i, self.prompt, outputs.get(i, ())) for i in range(count)]
        self.is_streamed = self.sampling.is_streamed
        self.is_single = self.is_streamed and count == 1
        self.has_history = bool(self.has_penalties or self.bad_words or self.follows_rules)

    @property
    def kept(self) -> tuple[int, ...]:
        """The tokens of the prompt that count as output."""
        return self.prompt[len(self.prompt) - self.num_kept :]

    def take_report(self) -> PromptReport | None:
        """Return the report about the prompt, which the first result carries; None if there is nothing to report."""
        if self.is_reported:
            return None
        self.is_reported = True
        scores, self.prompt_scores = self.prompt_scores, None
        if self.num_cached_tokens <= 0 and not self.sampling.returns_prompt and not any(self.pinned_tokens):
            return None
        prompt = pack_token_ids(self.prompt) if self.sampling.returns_prompt else None
        records = bytes(scores.records) if scores is not None else None
        return PromptReport(max(0, self.num_cached_tokens), prompt, records, self.pinned_tokens)

    @property
    def max_tokens(self) -> int:
        """Longest output of each sequence, in tokens."""
        return 0 if self.pooling else self.sampling.max_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the first group is scheduled first and preempted last."""
        return self.priority, self.arrival

    @property
    def has_penalties(self) -> bool:
        s = self.sampling
        return bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)

    @property
    def follows_rules(self) -> bool:
        """True if a grammar or a budget of reasoning decides which tokens are allowed next."""
        return bool(self.sampling.grammar or self.sampling.thinking_end)

    @property
    def changes_logits(self) -> bool:
        """True if penalties, biases, bans, a grammar or a budget change the logits of the model."""
        s = self.sampling
        bans = (s.min_tokens and not s.ignore_eos) or self.bad_words
        return bool(self.has_penalties or s.logit_bias or bans or self.follows_rules or s.allowed_token_ids)

    @property
    def is_synchronous(self) -> bool:
        """True if the host needs the tokens, logits or hidden states of each step before the next one, so that no step
        runs ahead.

        A group with a prompt to score, or without tokens to generate, is synchronous until its first result. One that
        computes a pinned prefix is synchronous to its end.
        """
        s = self.sampling
        scores_prompt = s.prompt_logprobs >= 0 and not self.is_reported
        is_pinned = self.pin_as is not None
        return bool(scores_prompt or not s.max_tokens or s.beam_width or self.pooling or is_pinned)

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_generated(self) -> int:
        """Tokens that steps have computed, as of the end of a step: of all choices, or one for each beam and step.

        Pending tokens do not count.
        """
        if self.beams is not None:
            return self.beams.num_steps * self.sampling.beam_width
        return sum(sequence.num_output_tokens - sequence.token_ids[-2:].count(PENDING) for sequence in self.sequences)

    @property
    def num_emitted(self) -> int:
        """Tokens of all choices that results have carried, as of the end of a step."""
        return self.num_generated if self.is_streamed else 0

    @property
    def num_rows(self) -> int:
        """Rows of the input batch that the group needs from now on, all its sequences running."""
        return self.sampling.beam_width or len(self.unfinished)

    @property
    def needs_fork(self) -> bool:
        """True if the leader computes the prompt for sequences that will fork from it."""
        return not self.is_forked and len(self.unfinished) > 1
