"""Batches of two tenants at two gateways: whatever the batches of one wait for, those of the other run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import batches
from tests.support.faults.calls import make_key
from tests.support.faults.stack import KEYS, MODEL, FaultStack

pytestmark = [pytest.mark.faults, pytest.mark.promise, pytest.mark.timeout(300)]

OTHER = "other"
# Batches of the tenant that waits, and their lines: more than a gateway has slots.
BATCHES, LINES = 4, 300
# Longest time of a batch of three lines on a busy machine; alone it takes a quarter of a second.
SOON_S = 20.0


class Tenants:
    """Two gateways that serve every model, a worker of one model, and the key of a tenant without limits."""

    def __init__(self, stack: FaultStack, folder: Path) -> None:
        self.stack = stack
        flags = ("--files-dir", str(folder), "--discover-models", "--park-on-budget")
        self.urls = [stack.gateway(*flags)[1] for _ in range(2)]
        self.dying = stack.worker("dying", "--served-model-name", OTHER, ready=False)
        stack.worker("a", "--max-num-seqs", "32")
        self.dying.wait_for("ready: worker")
        self.key = make_key(stack.redis_server.url, "b")
        for url in self.urls:
            stack.wait(lambda url=url: batches.models(url) >= {MODEL, OTHER})

    def waiting(self, model: str = MODEL, max_tokens: int = 5, **limits: int) -> tuple[str, list[str]]:
        """Make a key with limits, and batches of it at the first gateway. Returns the key and the batches."""
        key = make_key(self.stack.redis_server.url, "a", **limits)
        lines = [batches.line(number, model=model, max_tokens=max_tokens) for number in range(LINES)]
        return key, [batches.create(self.urls[0], lines, key) for _ in range(BATCHES)]

    def assert_others_run(self, key: str, ids: list[str]) -> None:
        """Check that batches of the other tenant run at both gateways, while those of the key wait."""
        self.stack.wait(lambda: any(batches.show(self.urls[0], one, key).status == "in_progress" for one in ids), 30)
        for url in self.urls:
            began = time.monotonic()
            batch = batches.ended(url, batches.create(url, [batches.line(n) for n in range(3)], self.key), key=self.key)
            assert (batch.status, batch.request_counts.completed) == ("completed", 3)
            assert time.monotonic() - began < SOON_S
        found = [batches.show(self.urls[0], one, key) for one in ids]
        assert any(one.status not in ("completed", "failed") for one in found), "nothing waited any more"
        for one in ids:
            batches.cancel(self.urls[1], one, key)
        for one in ids:
            assert batches.ended(self.urls[1], one, 30, key).status in ("cancelled", "completed")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Tenants]:
    stack = FaultStack(tmp_path_factory.mktemp("tenants"), long_model)
    try:
        yield Tenants(stack, tmp_path_factory.mktemp("files"))
    finally:
        stack.close()


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 1}, {"concurrent_requests": 1}, {"tokens_per_minute": 100}], ids=str
)
def test_a_batch_that_waits_for_a_limit_holds_up_no_other_tenant(tenants: Tenants, limits: dict[str, int]) -> None:
    tenants.assert_others_run(*tenants.waiting(**limits))


def test_a_batch_over_its_budget_holds_up_no_other_tenant(tenants: Tenants) -> None:
    """The budget suffices for one line and for a part of the second, which is parked."""
    key, ids = tenants.waiting(max_tokens=100, tokens_per_day=150)
    tenants.stack.wait(lambda: tenants.stack.redis.zcard(KEYS.parked), 40)
    tenants.assert_others_run(key, ids)


def test_a_batch_of_a_model_without_a_worker_holds_up_no_other_tenant(tenants: Tenants) -> None:
    tenants.dying.kill()
    tenants.assert_others_run(*tenants.waiting(OTHER))
