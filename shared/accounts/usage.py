"""The usage that the scripts count when requests end: requests, tokens and costs by day, key and model."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

from quire.shared.accounts.limits import money
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.keys import USAGE_S
from quire.shared.redis.clock import unix_time

DAY_S = 86_400
MAX_DAYS = USAGE_S // DAY_S
AMOUNTS = ("requests", "prompt", "completion", "cost", "pinned")
COLUMNS = ("date", "key", "model", "requests", "prompt_tokens", "completion_tokens", "cost", "cache_creation_tokens")


@dataclass(slots=True)
class UsageRow:
    """The usage of one key and model on one day (UTC), by the day of acceptance.

    cost: in billionths. pinned: tokens of prompts that `cache_control` has pinned; they are also among `prompt`.
    """

    date: str
    key: str
    model: str
    requests: int = 0
    prompt: int = 0
    completion: int = 0
    cost: int = 0
    pinned: int = 0

    def shown(self) -> dict[str, Any]:
        """Return the row for clients."""
        counts = (self.requests, self.prompt, self.completion, money(self.cost), self.pinned)
        return dict(zip(COLUMNS, (self.date, self.key, self.model, *counts), strict=True))


async def read_usage(client: Redis, prefix: str, days: int, key: str = "") -> list[UsageRow]:
    """Return the usage of the last `days` days, today included, sorted by day, key and model.

    prefix: of the accounts' keys. key: only this key; all by default.
    """
    today = int(await unix_time(client)) // DAY_S
    numbers = range(today - days + 1, today + 1)
    pipe = client.pipeline(transaction=False)
    for number in numbers:
        pipe.hgetall(f"{prefix}usage:{number}")
    rows: dict[tuple[int, str, str], UsageRow] = {}
    for number, amounts in zip(numbers, await pipe.execute(), strict=True):
        for name, amount in amounts.items():
            owner, _, rest = text(name).partition(" ")
            model, _, what = rest.rpartition(" ")
            if what not in AMOUNTS or (key and owner != key):
                continue
            date = (datetime.fromtimestamp(0, UTC) + timedelta(days=number)).date().isoformat()
            row = rows.setdefault((number, owner, model), UsageRow(date, owner, model))
            setattr(row, what, int(amount))
    return [rows[place] for place in sorted(rows)]


def as_csv(rows: Sequence[UsageRow]) -> str:
    """Return rows as CSV with a header. No spreadsheet takes a name for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = [str(value) for value in row.shown().values()]
        writer.writerow([f"'{value}" if value[:1] in "=+-@\t" and value[:1] else value for value in values])
    return out.getvalue()
