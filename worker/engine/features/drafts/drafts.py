"""Speculation in the engine: which sequences of a step compute drafted tokens, and which of these are accepted.

A step computes the newest token of a sequence and drafted ones after it, and so has logits for all these positions.
Then tokens are chosen position by position, by the very code that chooses any token: penalties, grammars, stop strings
and the random number of the position are those of the tokens before it. The next position counts only if the chosen
token is the drafted one, since only then its logits are those of the right tokens. So a draft changes how many steps an
answer takes, and no token of it. This needs a model that gives a token the same bits alone and in any batch.

Blocks for drafted positions are taken from free blocks only, and those without a known token are free again after the
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from quire.shared.protocol.messages import PredictionCounts, StepItem
from quire.worker.engine.features.drafts.costs import StepCosts, choose_lengths, may_pay
from quire.worker.engine.features.drafts.drafter import PATIENCE, RARELY, Draft, Drafter
from quire.worker.engine.features.drafts.texts import FixedTokens, TextStores
from quire.worker.engine.groups import Groups
from quire.worker.engine.limits import MAX_SCORED_POSITIONS
from quire.worker.engine.sampling_inputs import SamplingInputs, select
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.engine.speculation import PREDICTION, DraftCounters
from quire.worker.engine.step import DecodeBatch, Step, Verification

log = logging.getLogger(__name__)

# Drafted tokens of a sequence, and of a step.
MAX_DRAFT = 32
MAX_DRAFTED = 64
# Share of the blocks that drafts leave free.
SPARED = 0.01
# On a device that runs ahead, steps after which drafts are looked for although the step before had none.
LOOK_EVERY = 8
# Answers of `may_pay` that are kept.
KEPT_ANSWERS = 4096


class AnyDrafter(Protocol):
    """A drafter of one sequence, as `Drafter` is."""

    def propose(self, sequence: Sequence, most: int) -> Draft | None: ...


@dataclass(slots=True)
class _Request:
    """The texts and counts that the drafters of a request share. drafted, accepted: of its prediction."""

    prompt: FixedTokens
    prediction: FixedTokens | None
    drafters: dict[Sequence, AnyDrafter] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0


class Drafts:
    """The drafts of an engine.

    costs: None drafts whatever may be accepted, whether it pays or not (`--speculation suffix`). drafter: makes the
    drafter of a sequence.
    """

    def __init__(self, groups: Groups, costs: StepCosts | None, drafter: Callable[..., AnyDrafter] = Drafter) -> None:
        self.costs = costs
        self._drafter = drafter
        self.counters = DraftCounters()
        self._groups = groups
        self._requests: dict[SequenceGroup, _Request] = {}
        self._predictions: dict[SequenceGroup, tuple[int, ...]] = {}
        self._stores = TextStores()
        # The drafts of the step that is computed.
        self._drafts: list[Draft] = []
        self._may_pay: dict[tuple[int, int], bool] = {}
        self._num_looks = 0
        # Steps in a row in which no sequence had a draft.
        self._num_quiet = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def expect(self, group: SequenceGroup, prediction: tuple[int, ...]) -> None:
        """Note the tokens that the caller of a request expects as its answer."""
        if prediction:
            self._predictions[group] = prediction
            self._num_quiet = 0

    def forget(self, group: SequenceGroup) -> PredictionCounts | None:
        """Forget a request that has ended, and keep its output for later ones of the tenant.

        Returns the counts of its prediction, if it has one.
        """
        counts = self.prediction_counts(group) if group in self._predictions else None
        self._predictions.pop(group, None)
        self._requests.pop(group, None)
        if may_draft(group):
            for sequence in group.sequences:
                if output := sequence.token_ids[sequence.num_prompt_tokens :]:
                    self._stores.of(_tenant(group)).add([token for token in output if token >= 0])
        return counts

    def prediction_counts(self, group: SequenceGroup) -> PredictionCounts:
        """Return how many tokens of the prediction were accepted, and how many were drafted and not accepted."""
        request = self._requests.get(group)
        accepted, drafted = (request.accepted, request.drafted) if request else (0, 0)
        return PredictionCounts(accepted, drafted - accepted)

    # --- a step -------------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return whether the next step should know all tokens, so that it can compute drafts."""
        self._num_looks += 1
        return self._num_quiet == 0 or self._num_looks % LOOK_EVERY == 0

    def add_to(self, step: Step, max_tokens: int) -> None:
        """Turn decodes of a step into verifications where drafts pay. max_tokens: of the step in all."""
        self._num_quiet += 1
        if self._num_quiet > PATIENCE and self._num_quiet % RARELY:
            return
        sequences, rows = step.decodes.sequences, step.num_tokens
        most = min(MAX_DRAFTED, max_tokens - rows, MAX_SCORED_POSITIONS - step.num_scored - len(sequences))
        if not sequences or most < 1 or not self._could_pay(len(sequences), rows, most):
            return
        drafts = {s: draft for s in sequences if may_draft(s.group) and (draft := self._propose(s, most)) is not None}
        if not drafts:
            return
        self._num_quiet = 0
        survivals = [draft.survival for draft in drafts.values()]
        if self.costs is None:
            lengths = [len(survival) for survival in survivals]
        else:
            lengths = choose_lengths(survivals, len(sequences), rows, most, self.costs)
        self._drafts = []
        verified: set[Sequence] = set()
        for (sequence, draft), length in zip(drafts.items(), lengths, strict=True):
            length = self._extend(sequence, min(length, most))
            if length:
                step.verifications.append(Verification(sequence, tuple(draft.token_ids[:length])))
                self._drafts.append(draft)
                verified.add(sequence)
                most -= length
        if verified:
            step.decodes = DecodeBatch.of([sequence for sequence in sequences if sequence not in verified])

    def accept(
        self,
        step: Step,
        inputs: SamplingInputs,
        logits: torch.Tensor,
        sample: Callable[[SamplingInputs], list[StepItem]],
    ) -> list[StepItem]:
        """Choose the tokens of a step with verifications (`Speculation.accept`)."""
        verifications = step.verifications
        for verification, draft in zip(verifications, self._drafts, strict=True):
            self._note(verification.sequence.group, draft.source, len(verification.draft))
        starts = np.cumsum([0, *(verification.num_tokens for verification in verifications)])
        first = SamplingInputs(_batch(verifications), select(logits, starts[:-1]))
        items = sample(inputs.joined(first) if inputs.batch else first)
        while going := [index for index, each in enumerate(verifications) if _is_right(each)]:
            for index in going:
                verifications[index].accepted += 1
                self._count(verifications[index].sequence.group, self._drafts[index].source)
            rows = np.array([starts[index] + verifications[index].accepted for index in going], dtype=np.int64)
            items += sample(SamplingInputs(_batch([verifications[index] for index in going]), select(logits, rows)))
        self.drop(step)
        return _one_for_each(items)

    def drop(self, step: Step) -> None:
        """Free the blocks of drafted positions that have no known token. Afterwards the step can be dropped."""
        for verification in step.verifications:
            if verification.sequence.row >= 0:
                self._groups.trim(verification.sequence)

    # --- details ------------------------------------------------------------------------------------------------------

    def _could_pay(self, num_decoding: int, num_rows: int, most: int) -> bool:
        """Return whether drafts could pay in a step like this if all were right."""
        if self.costs is None:
            return True
        key = num_decoding, num_rows
        pays = self._may_pay.get(key)
        if pays is None:
            if len(self._may_pay) >= KEPT_ANSWERS:
                self._may_pay.clear()
            pays = self._may_pay[key] = may_pay(num_decoding, num_rows, most, self.costs)
        return pays

    def _propose(self, sequence: Sequence, most: int) -> Draft | None:
        left = int(self._groups.input_batch.max_lengths[sequence.row]) - len(sequence.token_ids) - 1
        if (most := min(most, MAX_DRAFT, left)) < 1:
            return None
        group = sequence.group
        request = self._requests.get(group)
        if request is None:
            expected = self._predictions.get(group)
            prediction = FixedTokens(expected) if expected else None
            request = self._requests[group] = _Request(FixedTokens(group.prompt), prediction)
        drafter = request.drafters.get(sequence)
        if drafter is None:
            recent = self._stores.of(_tenant(group))
            drafter = self._drafter(sequence, request.prompt, request.prediction, recent)
            request.drafters[sequence] = drafter
        return drafter.propose(sequence, most)

    def _extend(self, sequence: Sequence, length: int) -> int:
        """Give a sequence blocks for drafted tokens, as far as blocks are free. Returns the number of these tokens."""
        blocks = self._groups.blocks
        free = max(0, blocks.num_free - max(1, int(SPARED * blocks.num_blocks)))
        room = (len(sequence.block_table) + free) * blocks.block_size - len(sequence.token_ids)
        if (length := min(length, room)) > 0:
            self._groups.extend(sequence, length)
        return max(0, length)

    def _note(self, group: SequenceGroup, source: str, drafted: int) -> None:
        """Count drafted tokens."""
        self.counters.drafted[source] += drafted
        if source == PREDICTION:
            self._requests[group].drafted += drafted

    def _count(self, group: SequenceGroup, source: str) -> None:
        """Count an accepted token."""
        self.counters.accepted[source] += 1
        if source == PREDICTION:
            self._requests[group].accepted += 1


def may_draft(group: SequenceGroup) -> bool:
    """Return whether sequences of a group may have drafts.

    A request that streams several choices numbers its tokens in the order of steps, and every attempt at it must number
    them alike. Beams fork at each step.
    """
    return not group.beams and (group.is_single or not group.is_streamed)


def _tenant(group: SequenceGroup) -> bytes:
    """Return what requests share that may see each other's texts: model, salt, adapter and scope of the tenant."""
    return group.cache_root + group.cache_scope


def _batch(verifications: list[Verification]) -> DecodeBatch:
    return DecodeBatch.of([verification.sequence for verification in verifications])


def _is_right(verification: Verification) -> bool:
    """Return whether the sequence goes on after its newest token, and that is the next drafted one."""
    sequence, draft, at = verification.sequence, verification.draft, verification.accepted
    return at < len(draft) and sequence.row >= 0 and sequence.token_ids[-1] == draft[at]


def _one_for_each(items: list[StepItem]) -> list[StepItem]:
    """Join the items of each request. Only requests with one streamed choice have several."""
    joined: dict[str, StepItem] = {}
    for item in items:
        before = joined.get(item.request_id)
        both = item if before is None else before.joined(item)
        assert both is not None, "items of drafted tokens have one choice"
        joined[item.request_id] = both
    return list(joined.values())
