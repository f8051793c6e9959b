from __future__ import annotations

from quire.shared.backoff import Backoff


def test_delays_double_up_to_the_limit_and_start_again_after_a_reset() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_jitter_shortens_a_delay_by_at_most_half_and_does_not_slow_the_doubling() -> None:
    delays = []
    for _ in range(50):
        backoff = Backoff(1.0, 4.0, jitter=True)
        delays.append([backoff.next() for _ in range(4)])
    for step, full in enumerate((1.0, 2.0, 4.0, 4.0)):
        drawn = [one[step] for one in delays]
        assert all(full / 2 <= delay <= full for delay in drawn)
        assert len(set(drawn)) > 1
