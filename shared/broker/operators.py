"""What operators ask of a lane: what it has counted, and the requests that were given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.shared.broker.lane import Lane, text
from quire.shared.keys import PRIORITY_CLASSES


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """An entry of the dead stream."""

    entry_id: str
    request_id: str
    priority_class: str
    worker: str
    emitted: int
    body: bytes
    about: bytes


class OperatorVerbs(Lane):
    """Counters and the dead stream."""

    async def read_totals(self) -> dict[str, int]:
        """How many requests of this lane were accepted, and ended, by outcome, since Redis was empty."""
        totals: Any = await self.client.hgetall(self.keys.totals)
        return {text(name): int(count) for name, count in totals.items()}

    async def read_recoveries(self) -> dict[str, int]:
        """What recovery did in this lane since Redis was empty: migrations, fenced, repairs and corrupt.

        migrations: claims of requests that an earlier attempt had begun. fenced: items of attempts that were over.
        repairs: see `note_repairs`. corrupt: requests that ended as errors since what Redis had of them was corrupt.
        """
        counts: Any = await self.client.hgetall(self.keys.recoveries)
        return {text(name): int(count) for name, count in counts.items()}

    async def read_dead(self, count: int = 100) -> list[DeadRequest]:
        """The newest entries of the dead stream; those that are corrupt are left out."""
        entries: Any = await self.client.xrevrange(self.keys.dead, count=count)
        found = []
        for entry_id, fields in entries:
            try:
                found.append(_dead_request(entry_id, fields))
            except (KeyError, ValueError) as error:
                self.note_corrupt("dead entry", text(entry_id), repr(error))
        return found

    async def drop_dead(self, entry_id: str) -> bool:
        """Remove an entry of the dead stream; False if there is none."""
        return bool(await self.client.xdel(self.keys.dead, entry_id))


def _dead_request(entry_id: Any, fields: dict[bytes, bytes]) -> DeadRequest:
    """Raises KeyError and ValueError."""
    priority_class = fields[b"class"].decode()
    if priority_class not in PRIORITY_CLASSES:
        raise ValueError(f"class {priority_class[:64]!r}")
    return DeadRequest(
        text(entry_id),
        fields[b"id"].decode(),
        priority_class,
        fields[b"worker"].decode(),
        int(fields[b"emitted"]),
        fields[b"body"],
        fields[b"about"],
    )
