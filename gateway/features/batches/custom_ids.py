"""Finds a `custom_id` that occurs twice among millions, in a few bytes for each."""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

_LEAST = 1 << 10


class CustomIds:
    """A hash table of 64-bit hashes with open addressing.

    The hash has a random key, so no client can choose ids that meet. The chance that two of a million ids meet by
    accident is below one in thirty million.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._slots = array("Q", bytes(8 * _LEAST))
        self._count = 0

    def add(self, custom_id: str) -> bool:
        """Add an id. Returns False if it was added before."""
        digest = blake2b(custom_id.encode(), digest_size=8, key=self._key).digest()
        # 0 stands for a free slot.
        if not _insert(self._slots, int.from_bytes(digest, "little") or 1):
            return False
        self._count += 1
        if 3 * self._count > 2 * len(self._slots):
            larger = array("Q", bytes(16 * len(self._slots)))
            for value in self._slots:
                if value:
                    _insert(larger, value)
            self._slots = larger
        return True


def _insert(slots: array[int], value: int) -> bool:
    mask = len(slots) - 1
    at = value & mask
    while (slot := slots[at]) != 0:
        if slot == value:
            return False
        at = (at + 1) & mask
    slots[at] = value
    return True
