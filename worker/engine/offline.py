"""The engine without a queue: one call takes prompts and returns complete outputs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

from quire.shared.protocol.logprobs import TokenLogprobs, read_records
from quire.shared.protocol.messages import Delta, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from quire.worker.engine.engine import Engine


class Completion(NamedTuple):
    """One finished choice. score: its rank value under best_of or beam search. logprobs: empty unless requested."""

    token_ids: tuple[int, ...]
    finish_reason: str
    score: float | None
    logprobs: list[TokenLogprobs]


def generate(
    engine: Engine, prompts: SequenceOf[tuple[int, ...]], sampling: SamplingParams | list[SamplingParams]
) -> list[list[list[int]]]:
    """Run all prompts together to their end. Returns the output ids, [prompt][choice][token]."""
    return [[list(choice.token_ids) for choice in choices] for choices in complete(engine, prompts, sampling)]


def complete(
    engine: Engine, prompts: SequenceOf[tuple[int, ...]], sampling: SamplingParams | list[SamplingParams]
) -> list[list[Completion]]:
    """Run all prompts together to their end. Returns the choices of each prompt, best first if ranked."""
    params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    deltas: dict[str, list[list[Delta]]] = {}
    for i, (prompt, own_sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add(GenerationRequest(str(i), "offline", tuple(prompt), own_sampling))
        deltas[str(i)] = [[] for _ in range(own_sampling.n)]
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                deltas[item.request_id][delta.choice].append(delta)
    return [[_join(choice) for choice in deltas[str(i)]] for i in range(len(prompts))]


def _join(deltas: list[Delta]) -> Completion:
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    records = b"".join(delta.logprobs or b"" for delta in deltas)
    logprobs = read_records(records, len(token_ids)) if records else []
    return Completion(token_ids, deltas[-1].finish_reason or "", deltas[-1].score, logprobs)
