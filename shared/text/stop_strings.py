"""Stop strings in streamed text: the text ends exactly before the first match, and no part of a match is emitted.

Gateway and worker run the same code over the same text: the worker decides the finish reason, the gateway cuts the
text.
"""

from __future__ import annotations


class StopStringFilter:
    """Passes text through, and holds back a tail that may be the beginning of a stop string.

    After a match, `matched` is the stop string and no further text is emitted. If several strings match, the string
    that is complete first wins; among those, the string that starts first. With `includes_match` the stop string itself
    is emitted, too.
    """

    def __init__(self, stop: tuple[str, ...] | list[str], includes_match: bool = False) -> None:
        # Longer strings come first: if two matches end at the same character, the longer match started first and wins.
        self._stop = tuple(sorted(stop, key=len, reverse=True))
        self._held = ""
        self._includes_match = includes_match
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append text, and return the text that cannot be part of a stop string."""
        if not self._stop:
            return text
        released = ""
        # One character at a time, so that the output does not depend on how the text is split into calls.
        for character in text:
            if self.matched is not None:
                break
            released += self._push_character(character)
        return released

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held if self.matched is None else ""

    def _push_character(self, character: str) -> str:
        self._held += character
        for stop in self._stop:
            if self._held.endswith(stop):
                self.matched = stop
                released, self._held = self._held if self._includes_match else self._held[: -len(stop)], ""
                return released
        keep = self._longest_prefix_held()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def _longest_prefix_held(self) -> int:
        """Return the length of the longest tail of the held text that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
