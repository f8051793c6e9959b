"""The keys of a lane."""

from __future__ import annotations

from tests.support.broker_calls import KEYS


def test_all_keys_of_a_lane_share_one_hash_tag() -> None:
    keys = [
        KEYS.queue(),
        KEYS.request("r"),
        KEYS.output("r"),
        KEYS.conversation("r"),
        KEYS.load,
        KEYS.totals,
        KEYS.workers,
    ]
    keys += [KEYS.worker("w"), KEYS.mailbox("w"), KEYS.channel("g")]
    assert all(key.startswith("quire:{lane}:") for key in keys)
