"""`/debug/blocks`: every block that is not free with its owners, and every sequence with its tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quire.worker.engine.engine import Engine
from quire.worker.inspect.snapshot import Snapshot, take_snapshot


@dataclass(frozen=True, slots=True)
class BlockReport:
    """The content of `/debug/blocks`. `ref_counts` are those of the block manager; owners should add up to them."""

    snapshot: Snapshot
    ref_counts: list[int]

    def render(self) -> dict[str, Any]:
        """Return the report as JSON can hold it. Takes milliseconds; any thread may call it."""
        snapshot, columns = self.snapshot, self.snapshot.columns
        usage = snapshot.usage()
        owners: dict[int, list[str]] = {}
        call_pins = set(snapshot.call_pins)
        for sequence in snapshot.sequences:
            for block in sequence.block_table:
                owners.setdefault(block, []).append(f"{sequence.request_id}/{sequence.choice}")
        return {
            "block_size": usage.block_size,
            "num_blocks": usage.blocks_total,
            "num_free": usage.blocks_free,
            "blocks": [
                {
                    "id": block,
                    "refs": self.ref_counts[block],
                    "filled": int(columns.num_filled[block]),
                    "sequences": owners.get(block, []),
                    "shared": len(owners.get(block, ())) > 1,
                    "cached": bool(columns.is_cached[block]),
                    "pinned": bool(columns.is_pinned[block]),
                    "pinned_by_calls": block in call_pins,
                }
                for block in np.flatnonzero(columns.is_used | columns.is_cached).tolist()
            ],
            "sequences": [
                {
                    "request": sequence.request_id,
                    "choice": sequence.choice,
                    "state": sequence.state,
                    "priority": sequence.priority,
                    "tokens": sequence.num_tokens,
                    "computed": sequence.num_computed,
                    "blocks": sequence.block_table,
                    "host_blocks": sequence.host_table,
                }
                for sequence in snapshot.sequences
            ],
            "usage": asdict(usage),
        }


def read_blocks(engine: Engine) -> BlockReport:
    """Call it on the engine's thread."""
    return BlockReport(take_snapshot(engine), engine.scheduler.blocks.ref_counts.copy())
