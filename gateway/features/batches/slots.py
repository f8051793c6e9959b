"""Slots for the lines of batches that a gateway has in the queue of a model, or at its workers.

A free slot goes to the owner (an API key) that has fewest, so batches of owners take turns. A line that a limit or the
queue refuses gives its slot back, and its owner pauses: it holds up no other owner. After a pause an owner tries one
line, then twice as many with each line that is accepted, so a limit is not asked for each of its lines.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class _Owner:
    """The lines of an owner. trying: those with a slot that are not accepted yet; there are at most `width`."""

    width: int
    waiting: list[Turn] = field(default_factory=list)
    taken: int = 0
    trying: int = 0
    paused_until: float = 0.0


class LineSlots:
    """The slots of one model. `on_change` is called when an owner may begin another window."""

    def __init__(self, size: int, on_change: Callable[[], None]) -> None:
        self.size = size
        self.taken = 0
        self._on_change = on_change
        # The owner that has waited longest for a slot is first.
        self._owners: dict[str, _Owner] = {}
        self._places = count()

    def may_begin(self, owner: str) -> bool:
        """Return True if lines of another window would get slots: no line of the owner waits, and it is its turn."""
        known = self._owners.get(owner)
        return known is None or (not known.waiting and self.taken < self.size)

    def turn(self, owner: str, batch: Hashable) -> Turn:
        """Return the turn of a line, which `Turn.wait` puts behind the earlier lines of its owner."""
        return Turn(self, owner, batch, next(self._places))

    def let_go(self, batch: Hashable) -> None:
        """End the waiting of all lines of a batch that has ended."""
        for owner in list(self._owners.values()):
            for turn in [turn for turn in owner.waiting if turn.batch == batch]:
                turn.end_wait(is_granted=False)

    # --- for turns ----------------------------------------------------------------------------------------------------

    def add(self, turn: Turn) -> None:
        insort(self._owners.setdefault(turn.owner, _Owner(self.size)).waiting, turn, key=lambda queued: queued.place)
        self.grant()

    def remove(self, turn: Turn) -> None:
        owner = self._owners[turn.owner]
        owner.waiting.remove(turn)
        self._changed(turn.owner, owner)

    def accepted(self, name: str) -> None:
        owner = self._owners[name]
        owner.trying -= 1
        owner.width = min(2 * owner.width, self.size)
        self.grant()

    def release(self, name: str, *, was_accepted: bool, pause_s: float) -> None:
        owner = self._owners[name]
        self.taken -= 1
        owner.taken -= 1
        if not was_accepted:
            owner.trying -= 1
        if pause_s:
            loop = asyncio.get_running_loop()
            owner.width, owner.paused_until = 1, loop.time() + pause_s
            loop.call_later(pause_s, self._resume, name, owner)
        elif was_accepted:  # its end may be what a limit has waited for
            owner.paused_until = 0.0
        self._changed(name, owner)
        self.grant()

    def grant(self) -> None:
        """Give the free slots to the owners that have fewest."""
        now = asyncio.get_running_loop().time()
        while self.taken < self.size:
            able = [
                (name, owner)
                for name, owner in self._owners.items()
                if owner.waiting and owner.trying < owner.width and owner.paused_until <= now
            ]
            if not able:
                return
            name, owner = min(able, key=lambda item: item[1].taken)
            self._owners[name] = self._owners.pop(name)
            owner.taken += 1
            owner.trying += 1
            self.taken += 1
            owner.waiting[0].end_wait(is_granted=True)

    def _resume(self, name: str, owner: _Owner) -> None:
        if self._owners.get(name) is owner:
            self._changed(name, owner)
            self.grant()

    def _changed(self, name: str, owner: _Owner) -> None:
        if not owner.waiting:
            if not owner.taken and owner.paused_until <= asyncio.get_running_loop().time():
                del self._owners[name]
            self._on_change()


class Turn:
    """The way of one line to its slots. batch: what `LineSlots.let_go` names."""

    def __init__(self, slots: LineSlots, owner: str, batch: Hashable, place: int) -> None:
        self.owner = owner
        self.batch = batch
        self.place = place
        self.has_slot = False
        self._slots = slots
        self._is_waiting = False
        self._was_accepted = False
        self._wait: asyncio.Future[bool] | None = None

    async def wait(self) -> None:
        """Wait for a slot, or until `let_go`: then the line has none. Returns at once if the line has a slot."""
        if self.has_slot:
            return
        self._wait, self._is_waiting = asyncio.get_running_loop().create_future(), True
        self._slots.add(self)
        try:
            await self._wait
        except asyncio.CancelledError:
            if self._is_waiting:
                self._is_waiting = False
                self._slots.remove(self)
            self.give_back()
            raise

    def end_wait(self, *, is_granted: bool) -> None:
        """End the wait of this line; for its slots."""
        assert self._wait is not None
        self._slots.remove(self)
        self._is_waiting, self.has_slot, self._was_accepted = False, is_granted, False
        if not self._wait.done():
            self._wait.set_result(is_granted)

    def accepted(self) -> None:
        """Note that the queue has accepted the line."""
        if self.has_slot and not self._was_accepted:
            self._was_accepted = True
            self._slots.accepted(self.owner)

    def give_back(self, pause_s: float = 0.0) -> None:
        """Give the slot back, if there is one. pause_s: seconds for which no line of the owner is to be tried."""
        if self.has_slot:
            self.has_slot = False
            self._slots.release(self.owner, was_accepted=self._was_accepted, pause_s=pause_s)
