"""Pins of `cache_control`: blocks of the prefix cache that are evicted after all others, for a time.

A pin is a hint: it changes the order of eviction and nothing else. A pinned block without owner counts as free, so no
request waits, is refused or is preempted for a pin. Pins end with their time, with the worker, when memory is needed
that no other block can give, and at bounds: one for all pins, and one for those of an owner (an API key).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(slots=True)
class PinCounters:
    """Blocks since the start of the process: pinned, and by what ended their pins.

    dropped: for newer pins, at a bound. yielded: evicted, because nothing else could be.
    """

    pinned: int = 0
    expired: int = 0
    dropped: int = 0
    yielded: int = 0


@dataclass(slots=True)
class _Pin:
    owner: str
    ttl_s: float
    until: float


class EvictionOrder:
    """The blocks of the prefix cache without owner, in the order of their eviction, and the pins of all blocks.

    The least recently used block comes first, and pinned blocks come after all others.
    max_pins, max_owner_pins: bounds in blocks. clock: monotonic, in seconds.
    """

    def __init__(self, max_pins: int = 0, max_owner_pins: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_pins, self.max_owner_pins = max_pins, max_owner_pins
        self.counters = PinCounters()
        self.clock = clock
        # Blocks without owner, least recently used first: without a pin, and pinned.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._held: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, _Pin] = {}
        # The blocks of each owner of pins, least recently used first.
        self._of_owner: dict[str, OrderedDict[int, None]] = {}
        # No pin ends before this time.
        self._next_end = 0.0

    # --- blocks without owner -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._idle) + len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._idle or block in self._held

    def __iter__(self) -> Iterator[int]:
        return chain(self._idle, self._held)

    def __reversed__(self) -> Iterator[int]:
        return chain(reversed(self._held), reversed(self._idle))

    def add(self, block: int) -> None:
        """Add a block that has lost its last owner."""
        self._line(block)[block] = None

    def remove(self, block: int) -> None:
        """Remove a block that gets an owner, or leaves the prefix cache. A pin stays."""
        del self._line(block)[block]

    def touch(self, block: int) -> None:
        """Count a block without owner as used now."""
        self._line(block).move_to_end(block)

    def pop(self) -> int:
        """Remove and return the block that is evicted next. The caller calls `forget`."""
        self.expire()
        block, _ = (self._idle or self._held).popitem(last=False)
        return block

    def _line(self, block: int) -> OrderedDict[int, None]:
        return self._held if block in self._pins else self._idle

    # --- pins ---------------------------------------------------------------------------------------------------------

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin, with and without owner."""
        return len(self._pins)

    def is_pinned(self, block: int) -> bool:
        return block in self._pins

    def pinned(self) -> list[int]:
        """Return the blocks with a pin."""
        self.expire()
        return list(self._pins)

    def pin(self, blocks: Sequence[int], ttls_s: Sequence[float], owner: str) -> None:
        """Pin the first blocks of a prompt, each for its time, as far as the bounds allow.

        A block with a pin keeps its owner, and the longer of both times. At a bound the least recently used pins of the
        owner end first.
        """
        self.expire()
        now, most = self.clock(), min(self.max_pins, self.max_owner_pins)
        # The end of a prefix is useless without its beginning, so it counts as used before it.
        for block, ttl_s in list(zip(blocks, ttls_s, strict=True))[most - 1 :: -1] if most else ():
            pin = self._pins.get(block)
            if pin is None:
                if not self._make_room(owner):
                    continue
                pin = _Pin(owner, ttl_s, now)
                if block in self._idle:
                    del self._idle[block]
                    self._held[block] = None
                self._pins[block] = pin
                self._of_owner.setdefault(owner, OrderedDict())[block] = None
                self.counters.pinned += 1
            pin.ttl_s = max(pin.ttl_s, ttl_s)
            self._renew(block, pin, now)

    def renew(self, blocks: Sequence[int]) -> None:
        """Let the time of pinned blocks begin anew: a request uses them. blocks: the first of its prompt."""
        if not self._pins:
            return
        self.expire()
        now = self.clock()
        for block in reversed(blocks):
            if (pin := self._pins.get(block)) is not None:
                self._renew(block, pin, now)

    def forget(self, block: int) -> None:
        """End the pin of a block that leaves the prefix cache, if it has one."""
        if block in self._pins:
            self._unpin(block)
            self.counters.yielded += 1

    def expire(self) -> None:
        """End the pins whose time has passed."""
        if not self._pins or (now := self.clock()) < self._next_end:
            return
        over = [block for block, pin in self._pins.items() if pin.until <= now]
        # The end of a prefix is evicted first; it was pinned first.
        self._end(reversed(over))
        self.counters.expired += len(over)
        self._next_end = min((pin.until for pin in self._pins.values()), default=0.0)

    def _renew(self, block: int, pin: _Pin, now: float) -> None:
        pin.until = now + pin.ttl_s
        self._next_end = min(self._next_end, pin.until) if len(self._pins) > 1 else pin.until
        self._of_owner[pin.owner].move_to_end(block)

    def _make_room(self, owner: str) -> bool:
        """End pins until the owner may have one more. Returns False if it may not."""
        own: Collection[int] = self._of_owner.get(owner, ())
        if len(own) < self.max_owner_pins and len(self._pins) < self.max_pins:
            return True
        if len(own) < self.max_owner_pins:
            # All pins together are at their bound: the owner with the most gives way to one with fewer.
            largest = max(self._of_owner.values(), key=len)
            own = largest if len(largest) > len(own) + 1 else own
        if not own:
            return False
        self._end([next(iter(own))])
        self.counters.dropped += 1
        return True

    def _end(self, blocks: Iterable[int]) -> None:
        """End pins. Blocks without owner are evicted before all others: they are unused for long, or their owner pinned
        too much, which costs no other one a block.
        """
        for block in blocks:
            is_held = block in self._held
            self._unpin(block)
            if is_held:
                del self._held[block]
                self._idle[block] = None
                self._idle.move_to_end(block, last=False)

    def _unpin(self, block: int) -> None:
        owner = self._pins.pop(block).owner
        blocks = self._of_owner[owner]
        del blocks[block]
        if not blocks:
            del self._of_owner[owner]

    def check_integrity(self) -> None:
        """Raise AssertionError unless pins, owners and bounds agree."""
        owned = {block: owner for owner, blocks in self._of_owner.items() for block in blocks}
        assert owned == {block: pin.owner for block, pin in self._pins.items()}, "pins and their owners disagree"
        assert len(self._pins) <= self.max_pins, "more pins than their bound"
        most = max(map(len, self._of_owner.values()), default=0)
        assert most <= self.max_owner_pins, "an owner has too many pins"
        assert self._held.keys() <= self._pins.keys(), "a block without a pin is held"
        assert not self._idle.keys() & self._pins.keys(), "a block with a pin is not held"
