"""Cases of the kernels over logits: the most probable token, a draw, log-probabilities and penalties.

Tokens are compared exactly. So the inputs keep a distance from every place where rounding decides: the uniform number
of a draw falls into the middle of the share of its token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.kernels.reference import ReferenceOps
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import CaseInputs

LOGPROBS = 2.0**-16  # log-probabilities are float32, with the sum in float64
TOP = 5
# A row each: temperature, top_k, top_p, min_p.
PARAMETERS = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.8, 40, 0.95, 0.02)]
LEAST_SHARE = 0.004  # of the mass, of a token that is drawn


def logits_cases(inputs: CaseInputs, vocab_size: int) -> Iterator[KernelCase]:
    """Yield the cases for the vocabulary of a model."""
    ops, generator = inputs.ops, inputs.generator(vocab_size)
    shape = f"{len(PARAMETERS)} x {vocab_size} logits"
    logits = inputs.normal(len(PARAMETERS), vocab_size, generator=generator, dtype=torch.float32) * 4
    reference = ReferenceOps(ops.device, torch.float32)
    tied = logits.clone()
    tied[0, -1] = tied[0, vocab_size // 2] = tied[0].max() + 1
    tied[1, 0] = float("nan")
    yield KernelCase("argmax", "argmax", shape, lambda: [ops.argmax(tied)], lambda: [reference.argmax(tied)], 0.0)

    parameters, uniform, tokens = draws(logits)
    yield KernelCase("draw", "sample", shape, lambda: [ops.sample(logits, *parameters, uniform)], lambda: [tokens], 0.0)

    count = min(TOP, vocab_size)

    def ids() -> Sequence[Tensor]:
        return [ops.top_logprobs(logits, count)[1]]

    yield KernelCase("best tokens", "best_ids", shape, ids, lambda: [reference.top_logprobs(logits, count)[1]], 0.0)

    chosen = logits.argsort(dim=-1, descending=True)[:, min(2, vocab_size - 1)].int()
    yield KernelCase(
        "log-probabilities",
        "logprobs_of",
        shape,
        lambda: [ops.logprobs_of(logits, chosen)],
        lambda: [reference.logprobs_of(logits, chosen)],
        LOGPROBS,
    )
    seen = _seen(inputs, len(logits), vocab_size)

    def penalised(which: ReferenceOps | None) -> Sequence[Tensor]:
        values = logits.clone()
        (ops if which is None else which).penalise(values, *seen)
        return [values]

    yield KernelCase("penalties", "penalise", shape, lambda: penalised(None), lambda: penalised(reference), LOGPROBS)


def _seen(inputs: CaseInputs, rows: int, vocab_size: int) -> tuple[Tensor, ...]:
    """Return the tokens that each row has seen, and its penalties: the last arguments of `Ops.penalise`."""
    per_row = min(3, vocab_size)
    ids = [(step * (vocab_size // per_row)) for _ in range(rows) for step in range(per_row)]
    factors = [torch.full((rows,), value, device=inputs.ops.device) for value in (1.25, 0.5, 0.25)]
    return (
        inputs.integers(range(0, rows * per_row + 1, per_row)),
        inputs.integers(ids),
        inputs.integers([at % 3 for at in range(len(ids))]),
        *factors,
    )


def draws(logits: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Return parameters, uniform numbers and the tokens that `Ops.sample` must draw with them.

    logits: a row for each of PARAMETERS.
    """
    temperature, top_k, top_p, min_p = zip(*PARAMETERS, strict=True)
    device = logits.device
    given = (
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, device=device),
        torch.tensor(min_p, device=device),
    )
    uniforms, tokens = [], []
    for row, parameters in zip(logits, PARAMETERS, strict=True):
        mass = kept_mass(row, *parameters)
        share = mass / mass.sum()
        # The last token with a fair share: draws of the first ones need no sum over the vocabulary.
        token = int((share >= min(LEAST_SHARE, float(share.max()))).nonzero()[-1])
        uniforms.append(float(share[:token].sum() + share[token] / 2))
        tokens.append(token)
    return (
        given,
        torch.tensor(uniforms, dtype=torch.float64, device=device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
    )


def kept_mass(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the mass of each token of a row of logits [V] after the filters of `Ops.sample`, in float64."""
    shifted = (row.double() - row.double().max()) / temperature
    mass = shifted.exp()
    ordered = mass.sort(descending=True).values
    if 0 < top_k < len(row):
        mass = torch.where(mass >= ordered[top_k - 1], mass, 0.0)
    if top_p < 1:
        ordered = mass.sort(descending=True).values
        crossing = int((ordered.cumsum(0) < top_p * ordered.sum()).sum())
        mass = torch.where(mass >= ordered[min(crossing, len(row) - 1)], mass, 0.0)
    return torch.where(mass >= min_p * mass.max(), mass, 0.0)
