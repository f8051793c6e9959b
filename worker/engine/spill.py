"""What the engine asks of the spill (`quire.worker.engine.features.spill`): blocks evicted from the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.worker.engine.blocks import CachedPrefix
from quire.worker.engine.sequence import Sequence

HOST, DISK = TIERS = ("host", "disk")
REASONS = ("corrupt", "foreign", "queue_full", "error")


def _zeros(names: tuple[str, ...]) -> Mapping[str, int]:
    return dict.fromkeys(names, 0)


@dataclass(frozen=True, slots=True)
class SpillFigures:
    """Blocks since the start of the process, and what is kept now; all 0 for an engine without a spill."""

    kept: Mapping[str, int] = field(default_factory=lambda: _zeros(TIERS))
    read: Mapping[str, int] = field(default_factory=lambda: _zeros(TIERS))
    dropped: Mapping[str, int] = field(default_factory=lambda: _zeros(REASONS))
    # Prefixes that were computed again because reading them would have taken longer, or took longer.
    slower: int = 0
    # What is kept now.
    blocks: Mapping[str, int] = field(default_factory=lambda: _zeros(TIERS))
    num_bytes: Mapping[str, int] = field(default_factory=lambda: _zeros(TIERS))


class Spill(Protocol):
    """Blocks that have fallen out of the prefix cache. No block that it gives back changes a token."""

    def save_evicted(self) -> None:
        """Keep the blocks that were evicted since the last call. Call it before anything overwrites them."""

    def save_idle(self) -> None:
        """Keep some blocks that may be evicted next, while nothing runs."""

    def delays(self, leader: Sequence, prefix: CachedPrefix, num_tokens: int) -> bool:
        """Return whether a sequence should wait, since more of its prefix is being read into the prefix cache.

        The sequence has blocks and a row to start with. prefix: what the prefix cache has of its first `num_tokens`
        tokens; it may have more after the call.
        """
        ...

    def figures(self) -> SpillFigures:
        """Return counts since the start, and what is kept now."""
        ...

    def close(self) -> None:
        """Keep what the prefix cache has now, as far as time allows, and end. Call it after the last step."""
