"""The limits that Redis has just refused a call for: the next call of the account is refused before its body is read.

Only `requests_per_minute` is remembered, because no call of the account can pass until the bucket has a call again. The
other limits depend on the size of the call, or allow a call as soon as another one ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from quire.gateway.features.keys.limit_errors import error_of
from quire.shared.protocol.broker import Admission
from quire.shared.protocol.charge import ChargedAccount, LimitReached
from quire.shared.protocol.keys import AccountKeys

LIMIT = "requests_per_minute"
# Seconds for which a refusal is remembered at most. Then Redis is asked again, with a whole call.
MEMORY_S = 1.0


class ReachedLimits:
    """Refusals that this gateway process remembers. Nothing is charged for a call that they refuse."""

    def __init__(self) -> None:
        # By account, the oldest first: the account with its limits, the end of the wait, the end of the memory.
        self._refused: dict[str, tuple[ChargedAccount, float, float]] = {}

    def note(self, reached: LimitReached, terms: Admission | None) -> None:
        """Remember a refusal by Redis."""
        # In a cluster each model has counters of its own, and the model of the next call is in its body.
        if terms is None or terms.account_prefix != AccountKeys().prefix or reached.limit != LIMIT:
            return
        account = next(account for account in terms.accounts if account.place == reached.account)
        now = time.monotonic()
        allowed_at = now + reached.wait_ms / 1000
        self._refused.pop(account.place, None)
        self._refused[account.place] = account, allowed_at, min(allowed_at, now + MEMORY_S)
        while (oldest := next(iter(self._refused))) and self._refused[oldest][2] <= now:
            del self._refused[oldest]

    def check(self, accounts: Iterable[ChargedAccount]) -> None:
        """Raise RateLimited if one of these accounts was refused, and its limits have not changed since."""
        now = time.monotonic()
        for account in accounts:
            refused, allowed_at, forgotten_at = self._refused.get(account.place, (None, 0.0, 0.0))
            if refused == account and now < forgotten_at:
                raise error_of(LimitReached(LIMIT, account.place, int(1000 * (allowed_at - now))))
