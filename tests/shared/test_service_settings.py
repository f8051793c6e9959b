from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.shared.service_settings import CommonSettings, ServiceSettings
from quire.shared.settings import option, options
from quire.worker.settings import WorkerSettings

# Settings of several processes with a default or bounds of their own. `quire serve` takes several models.
OWN = {"drain_s", "max_model_len", "model", "redis_url", "served_model_name"}


def test_a_setting_of_several_processes_is_the_same_in_each() -> None:
    for one, other in combinations((ServeSettings, GatewaySettings, WorkerSettings), 2):
        ours, theirs = ({item.name: item for item in options(cls)} for cls in (one, other))
        both = ours.keys() & theirs.keys() - OWN
        assert {item.name for item in options(CommonSettings)} - OWN <= both
        assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}


def test_gateway_and_worker_find_the_same_redis_by_default() -> None:
    assert GatewaySettings().redis_url == WorkerSettings().redis_url == ServiceSettings().redis_url


def test_the_last_settings_of_a_base_come_after_those_of_a_process() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(CommonSettings):
        own: int = option(1, help="A number.")

    first = ["model", "served_model_name", "model_aliases"]
    assert [item.name for item in options(Own)] == [*first, "own", "log_level", "log_format"]
