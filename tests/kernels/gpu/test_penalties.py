"""Penalties on logits."""

import torch

from quire.kernels.reference import penalise


def test_penalties_change_what_was_seen_and_nothing_else(ops):
    logits = torch.randn(3, 300)
    seen = [{7: 0, 9: 2, 299: 1}, {}, {i: i % 3 for i in range(280)}]
    expected = logits.double()
    repetition, presence, frequency = torch.tensor([[1.5, 2.0, 0.8], [0.5, 9.0, -0.25], [0.25, 9.0, 1.5]])
    for r, counts in enumerate(seen):
        for token, count in counts.items():
            value = expected[r, token]
            value = value / repetition[r] if value > 0 else value * repetition[r]
            expected[r, token] = value - (presence[r] + frequency[r] * count if count else 0)
    starts = torch.tensor([0, *(len(counts) for counts in seen)]).cumsum(0).int()
    ids, counts = (torch.tensor([x for row in seen for x in part(row)]).int() for part in (dict.keys, dict.values))
    ids = torch.cat([ids, torch.tensor([10**6]).int()])  # after the last row: ignored
    plain = logits.clone()
    ops.penalise(logits, starts, ids, counts, repetition, presence, frequency)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    if plain.device.type == "cpu":  # the plain function that defines the operation
        penalise(plain, starts, ids[:-1], counts, repetition, presence, frequency)
        torch.testing.assert_close(plain, logits, rtol=1e-6, atol=1e-6)
