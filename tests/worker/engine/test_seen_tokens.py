"""Seen tokens: each distinct token once, with the number of times that it was generated."""

from __future__ import annotations

import random
from collections import Counter

from quire.worker.engine.seen_tokens import SeenTokens


def counted(seen: SeenTokens) -> dict[int, int]:
    assert len(seen) == len(seen.ids) == len(set(seen.ids.tolist()))
    return dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))


def test_tokens_of_the_prompt_count_only_what_was_generated() -> None:
    seen = SeenTokens((4, 4, 6), (9, 2, 9, 6))
    assert counted(seen) == {4: 0, 6: 1, 9: 2, 2: 1}
    assert counted(SeenTokens((), ())) == {}


def test_counts_are_those_of_all_tokens_however_many_are_added() -> None:
    draw = random.Random(1)
    seen, expected = SeenTokens((1, 2), (2,)), Counter({1: 0, 2: 1})
    for _ in range(500):
        token = draw.randrange(200)
        seen.add(token)
        expected[token] += 1
        assert counted(seen) == expected


def test_a_copy_counts_on_its_own() -> None:
    seen = SeenTokens((1,), (2,))
    copied = seen.copy()
    copied.add(2)
    copied.add(3)
    seen.add(1)
    assert counted(seen) == {1: 1, 2: 1}
    assert counted(copied) == {1: 0, 2: 2, 3: 1}
