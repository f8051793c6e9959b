"""How far the client of one request is, and which part of an item is new to it.

published items:   [0, 3) [3, 5)        [7, 9)  [7, 9)
cursor:                   next = 5  ->  gap: the log has [5, 7)   ->  next = 9: a duplicate
"""

from __future__ import annotations

from quire.shared.messages import Delta, StepItem

# A request that was silent for so long is compared with its log; a fruitless look doubles the time up to the maximum.
SILENCE_S = 0.25
MAX_SILENCE_S = 4.0


class Cursor:
    """The place of one client in the tokens of one request."""

    __slots__ = ("behind", "ended", "heard_at", "is_logged", "next", "patience_s", "portion", "request_id")

    def __init__(self, request_id: str, now: float) -> None:
        self.request_id = request_id
        self.next = 0
        self.behind = False
        # Whether it is behind for another reason than that messages were lost.
        self.is_logged = False
        self.ended = False
        self.heard_at = now
        self.patience_s = SILENCE_S
        # In which portion its last item came to its client (`Outputs`).
        self.portion = -1

    def take(self, item: StepItem) -> StepItem | None:
        """The new part of an item. None if there is none, or if tokens before it are missing: `behind` is then set."""
        if self.ended:
            return None
        start, end = item.start, item.end
        if start > self.next:
            self.behind = True
            return None
        if item.outcome is None:
            if end <= self.next:
                return None
        else:
            self.ended = True
        if start < self.next:
            item = _without_first(item, self.next - start)
        if end > self.next:
            self.next = end
        return item

    def wait_longer(self) -> None:
        """Its silence meant nothing: the next one is borne for longer."""
        self.patience_s = min(2 * self.patience_s, MAX_SILENCE_S)


def weight(item: StepItem) -> int:
    """The tokens of an item, and its log-probabilities, which take as much room where they are written."""
    count = 0
    for delta in item.deltas:  # which is one nearly always
        count += len(delta.token_ids)
        if delta.logprobs:
            count += len(delta.logprobs) // 8
    return count


def cut(items: list[StepItem], size: int) -> tuple[list[StepItem], list[StepItem]]:
    """The first of these items, of about `size` in weight, and the rest; inside an item where it must be."""
    for index, item in enumerate(items):
        here = weight(item)
        if here >= size:
            parts = [item]
            # In halves first, for each part that is cut off costs as much as what is left: of a long item that is much.
            while here > 16 * size and len(halves := split(parts[0], (parts[0].start + parts[0].end) // 2)) == 2:
                parts[:1] = halves
                here = weight(parts[0])
            first, *rest = split(parts[0], item.start + max(1, size * (parts[0].end - item.start) // here))
            return [*items[:index], first], [*rest, *parts[1:], *items[index + 1 :]]
        size -= here
    return items, []


def split(item: StepItem, at: int) -> tuple[StepItem, ...]:
    """The item in two where token `at` is inside it."""
    if not item.start < at < item.end:
        return (item,)
    deltas: list[Delta] = []
    count = at - item.start
    for delta in item.deltas:
        if count < len(delta.token_ids):
            if count:
                deltas.append(delta.first(count))
            break
        deltas.append(delta)
        count -= len(delta.token_ids)
    return StepItem(item.request_id, item.start, tuple(deltas)), _without_first(item, at - item.start)


def _without_first(item: StepItem, count: int) -> StepItem:
    """The item less its first `count` tokens; finish reasons stay."""
    deltas: list[Delta] = []
    start = item.start + count
    for delta in item.deltas:
        dropped = min(count, len(delta.token_ids))
        count -= dropped
        if dropped < len(delta.token_ids) or delta.finish_reason is not None:
            deltas.append(delta.without_first(dropped))
    return StepItem(item.request_id, start, tuple(deltas), item.outcome)
