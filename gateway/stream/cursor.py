"""The position of one client in the tokens of one request, and the part of an item that is new to that client.

published items:   [0, 3) [3, 5)        [7, 9)  [7, 9)
cursor:                   next = 5  ->  gap: the log has [5, 7)   ->  next = 9: a duplicate
"""

from __future__ import annotations

from quire.shared.protocol.messages import Delta, StepItem

# Seconds without items after which a request is compared with its log. Each fruitless comparison doubles the time.
SILENCE_S = 0.25
MAX_SILENCE_S = 4.0


class Cursor:
    """The position of one client in the tokens of one request."""

    __slots__ = ("behind", "ended", "expects_log", "generation", "heard_at", "next", "request_id", "silence_s")

    def __init__(self, request_id: str, now: float) -> None:
        self.request_id = request_id
        # The first token that the client does not have.
        self.next = 0
        # True if the log has, or may have, tokens from `next` on that the client can get only from the log.
        self.behind = False
        # True if the cursor is behind for a reason other than lost messages; reads of the log then do not count as
        # repairs.
        self.expects_log = False
        self.ended = False
        # Time of the last item, or of the last check for silence, on the loop's clock.
        self.heard_at = now
        # Seconds of silence after which the request is compared with its log.
        self.silence_s = SILENCE_S
        # The generation of the `OutputBuffer` to which the last item was added.
        self.generation = -1

    def take(self, item: StepItem) -> StepItem | None:
        """Return the new part of an item.

        Returns None if no token of the item is new, or if tokens before the item are missing; then `behind` is set.
        """
        if self.ended:
            return None
        # This runs for every token: `item.end` is written out for one delta.
        start, deltas = item.start, item.deltas
        end = start + len(deltas[0].token_ids) if len(deltas) == 1 else item.end
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
        """Double the allowed silence, up to MAX_SILENCE_S: the last silence meant nothing."""
        self.silence_s = min(2 * self.silence_s, MAX_SILENCE_S)


def weight(item: StepItem) -> int:
    """Return the number of tokens of an item plus the number of its log-probabilities, also those of its prompt.

    A log-probability counts as a token, because it is as large when it is written.
    """
    count = 0
    for delta in item.deltas:  # nearly always one
        count += len(delta.token_ids)
        if delta.logprobs:
            count += len(delta.logprobs) // 8
    if item.report is not None and item.report.records:
        count += len(item.report.records) // 8
    return count


def cut(items: list[StepItem], size: int) -> tuple[list[StepItem], list[StepItem]]:
    """Split a list of items into a first part of about `size` in weight and the rest, inside an item if necessary."""
    for index, item in enumerate(items):
        here = weight(item)
        if here >= size:
            parts = [item]
            # Cutting a part off copies the remainder. That is slow for a long item, so it is halved first.
            while here > 16 * size and len(halves := split(parts[0], (parts[0].start + parts[0].end) // 2)) == 2:
                parts[:1] = halves
                here = weight(parts[0])
            first, *rest = split(parts[0], item.start + max(1, size * (parts[0].end - item.start) // here))
            return [*items[:index], first], [*rest, *parts[1:], *items[index + 1 :]]
        size -= here
    return items, []


def split(item: StepItem, at: int) -> tuple[StepItem, ...]:
    """Split an item before token `at`; return it alone if `at` is not inside it."""
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
    return StepItem(item.request_id, item.start, tuple(deltas), report=item.report), _without_first(
        item, at - item.start
    )


def _without_first(item: StepItem, count: int) -> StepItem:
    """Return the item without its first `count` tokens; finish reasons stay."""
    deltas: list[Delta] = []
    start = item.start + count
    for delta in item.deltas:
        dropped = min(count, len(delta.token_ids))
        count -= dropped
        if dropped < len(delta.token_ids) or delta.finish_reason is not None:
            deltas.append(delta.without_first(dropped))
    return StepItem(item.request_id, start, tuple(deltas), item.outcome)
