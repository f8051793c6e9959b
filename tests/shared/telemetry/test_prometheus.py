"""Numbers that a process keeps of itself."""

from __future__ import annotations

from quire.shared.telemetry.prometheus import Fading


def test_what_is_long_ago_counts_for_less() -> None:
    slowest = Fading(half_life_s=10)
    assert slowest.at(0) == 0
    slowest.see(8, now=100)
    slowest.see(3, now=100)
    assert (slowest.at(100), slowest.at(110), slowest.at(120)) == (8, 4, 2)
    slowest.see(3, now=110)
    assert slowest.at(110) == 4, "what was seen before still counts for more"
    slowest.see(3, now=120)
    assert (slowest.at(120), slowest.at(130)) == (3, 1.5)
