"""The verbs of operators: read the counters of a lane, and the dead-letter stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.shared.protocol.broker.lane import Lane, text
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.share import ANONYMOUS_TENANT, DEFAULT_WEIGHT, read_share


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """An entry of the dead-letter stream."""

    entry_id: str
    request_id: str
    priority_class: str
    worker: str
    emitted: int
    body: bytes
    metadata: bytes
    tenant: str = ANONYMOUS_TENANT
    weight: int = DEFAULT_WEIGHT
    user: str = ""


class OperatorVerbs(Lane):
    """Counters and the dead-letter stream."""

    async def read_totals(self) -> dict[str, int]:
        """Return the number of requests accepted, and of those ended by outcome, since Redis was empty."""
        totals: Any = await self.client.hgetall(self.keys.totals)
        counts = {text(name): int(count) for name, count in totals.items()}
        counts.pop("arrivals", None)  # the order of the requests, no outcome
        return counts

    async def read_dead(self, count: int = 100) -> list[DeadRequest]:
        """Return the newest entries of the dead-letter stream, without corrupt entries."""
        entries: Any = await self.client.xrevrange(self.keys.dead, count=count)
        requests = []
        for entry_id, fields in entries:
            try:
                requests.append(_dead_request(entry_id, fields))
            except (KeyError, ValueError) as error:
                self.note_corrupt("dead entry", text(entry_id), repr(error))
        return requests

    async def drop_dead(self, entry_id: str) -> bool:
        """Remove an entry of the dead-letter stream; False if it does not exist."""
        return bool(await self.client.xdel(self.keys.dead, entry_id))


def _dead_request(entry_id: Any, fields: dict[bytes, bytes]) -> DeadRequest:
    """Decode an entry. Raise KeyError and ValueError if it is corrupt."""
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
        fields[b"metadata"],
        *read_share(text(fields.get(b"tenant", b"")), text(fields.get(b"user", b""))),
    )
