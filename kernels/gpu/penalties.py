"""Penalties on the logits of tokens that a sequence has seen. Other logits of a row are not read or written."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["vocabulary"])
def penalties_kernel(logits, starts, ids, counts, repetition, presence, frequency, vocabulary, BLOCK: tl.constexpr):
    """Change logits [R, vocabulary] in place; see `penalise`. grid (R,)."""
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * vocabulary
    by, once, each = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        token = tl.load(ids + i, mask=i < end, other=-1)
        exists = (token >= 0) & (token < vocabulary)
        times = tl.load(counts + i, mask=i < end, other=0).to(tl.float32)
        value = tl.load(at + token, mask=exists, other=0.0)
        value = tl.where(value > 0, tl.div_rn(value, by), value * by)
        value -= tl.where(times > 0, once + each * times, 0.0)
        tl.store(at + token, value, mask=exists)


def penalise(
    logits: Tensor,
    starts: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Change logits [R, V] float32 in place.

    ids [n] int32: the tokens that each row has seen. The tokens of row r are at starts[r]..starts[r + 1] (starts
    [R + 1] int32), each once. counts [n] int32: how often each was drawn; 0 if it is in the prompt only. repetition,
    presence, frequency [R] float32. The repetition penalty (Hugging Face: positive logits are divided, other logits
    multiplied) applies to all tokens. Presence and frequency (OpenAI) apply to drawn tokens: logit -= presence +
    frequency * count.
    """
    rows, vocabulary = logits.shape
    if rows:
        penalties_kernel[(rows,)](
            logits, starts, ids, counts, repetition, presence, frequency, vocabulary, BLOCK=256, num_warps=2
        )
