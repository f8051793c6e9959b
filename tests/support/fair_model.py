"""The contract of fair sharing as a model in plain Python: who is taken next, and what the counters are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from quire.shared.protocol.share import (
    ANONYMOUS_TENANT,
    COUNTER_UNITS,
    DEFAULT_WEIGHT,
    FLOOR,
    INPUT_COST,
    OUTPUT_COST,
)


class Share(NamedTuple):
    """Who a request counts for: fields of `Admission`."""

    tenant: str = ANONYMOUS_TENANT
    user: str = ""
    weight: int = DEFAULT_WEIGHT


ANYBODY = Share()


def price(tokens: int, cost: int, weight: int) -> int:
    """Return what tokens add to a counter."""
    return tokens * int(cost * COUNTER_UNITS * DEFAULT_WEIGHT / weight + 0.5)


class Group:
    """The tenants of a class, or the users of a tenant in a class."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.floor: int | None = None
        self.waiting: set[str] = set()

    def least(self) -> str | None:
        return min(self.waiting, key=lambda name: (self.counters[name], name.encode()), default=None)

    def lift(self, name: str) -> None:
        """Raise the counter of one that does not wait to the least counter of those who do."""
        least = self.least()
        floor = self.floor or 0 if least is None else self.counters[least]
        self.counters[name] = max(self.counters.get(name, 0), floor)

    def join(self, name: str) -> None:
        if name not in self.waiting:
            self.lift(name)
            self.waiting.add(name)

    def take(self, name: str, prompt: int) -> None:
        self.floor = self.counters[name]
        self.counters[name] += prompt

    def stored(self) -> dict[str, int]:
        """Return the counters as Redis has them."""
        return self.counters | ({} if self.floor is None else {FLOOR: self.floor})


class FairModel:
    """The lines and the counters of a lane."""

    def __init__(self) -> None:
        self.tenants: defaultdict[str, Group] = defaultdict(Group)
        self.users: defaultdict[tuple[str, str], Group] = defaultdict(Group)
        # By class, tenant and user: arrival, request, share and tokens of the prompt.
        self.lines: defaultdict[tuple[str, str, str], list[tuple[int, str, Share, int]]] = defaultdict(list)

    def waits(self, name: str) -> bool:
        return bool(self.tenants[name].waiting)

    def take_at_once(self, name: str, share: Share, prompt_tokens: int) -> None:
        for group, who in self._groups(name, share):
            group.lift(who)
            group.take(who, price(prompt_tokens, INPUT_COST, share.weight))

    def join(self, name: str, share: Share, arrival: int, request_id: str, prompt_tokens: int) -> None:
        line = self.lines[name, share.tenant, share.user]
        line.append((arrival, request_id, share, prompt_tokens))
        line.sort(key=lambda place: place[0])
        for group, who in self._groups(name, share):
            group.join(who)

    def next(self, name: str) -> str | None:
        """Return the next request of a class; None if none waits in a line."""
        first = self._first(name)
        return first and first[1]

    def take(self, name: str) -> None:
        """Take the next request of a class out of its line."""
        first = self._first(name)
        assert first is not None
        _, request_id, share, prompt_tokens = first
        for group, who in self._groups(name, share):
            group.take(who, price(prompt_tokens, INPUT_COST, share.weight))
        self.leave(name, share, request_id)

    def _first(self, name: str) -> tuple[int, str, Share, int] | None:
        tenant = self.tenants[name].least()
        if tenant is None:
            return None
        user = self.users[name, tenant].least()
        assert user is not None
        return self.lines[name, tenant, user][0]

    def leave(self, name: str, share: Share, request_id: str) -> None:
        line = self.lines[name, share.tenant, share.user]
        line[:] = [place for place in line if place[1] != request_id]
        if not line:
            users = self.users[name, share.tenant].waiting
            users.discard(share.user)
            if not users:
                self.tenants[name].waiting.discard(share.tenant)

    def refund_prompt(self, name: str, share: Share, prompt_tokens: int) -> None:
        for group, who in self._groups(name, share):
            group.counters[who] -= price(prompt_tokens, INPUT_COST, share.weight)

    def charge_output(self, name: str, share: Share, tokens: int) -> None:
        if tokens:
            self.tenants[name].counters[share.tenant] += price(tokens, OUTPUT_COST, share.weight)

    def charge_user(self, name: str, share: Share, tokens: int) -> None:
        self.users[name, share.tenant].counters[share.user] += price(tokens, OUTPUT_COST, share.weight)

    def _groups(self, name: str, share: Share) -> Iterable[tuple[Group, str]]:
        return ((self.tenants[name], share.tenant), (self.users[name, share.tenant], share.user))
