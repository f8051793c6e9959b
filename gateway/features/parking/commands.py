"""The command about parked requests: its settings, what its `--help` says, and which code runs it.

This module stays light: `--help` must not load the Redis client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.shared.config.command_line import Command
from quire.shared.config.settings import option
from quire.shared.protocol.keys import MAX_RETENTION_S, PARKING_S
from quire.shared.redis.url import DEFAULT_REDIS_URL


@dataclass(frozen=True, kw_only=True)
class ParkingSettings:
    """The settings of `quire-parking`: the action on requests, and the Redis that holds them."""

    action: str = option(
        "list",
        positional=True,
        variable="QUIRE_PARKING_ACTION",
        metavar="ACTION",
        choices=("list", "park", "unpark"),
        help="List parked requests; park requests that wait or run; or queue parked ones again.",
    )
    id: str = option(
        "",
        variable="QUIRE_PARKING_ID",
        metavar="ID",
        help="Park or unpark only this request, as `list`, the logs and the header X-Quire-Request-Id name it; by "
        "default all.",
    )
    worker: str = option(
        "", variable="QUIRE_PARKING_WORKER", metavar="NAME", help="Park only the requests that this worker runs."
    )
    retention_s: int = option(
        PARKING_S,
        minimum=1,
        maximum=MAX_RETENTION_S,
        variable="QUIRE_PARKING_SECONDS",
        metavar="SECONDS",
        help="Seconds for which `park` parks a request; then it ends as if its deadline had passed.",
    )
    redis_url: str = option(DEFAULT_REDIS_URL, help="Redis that holds the requests.", metavar="URL", secret=True)
    served_model_name: str = option("", metavar="NAME", help="Only requests of this model; by default of all models.")
    count: int = option(
        100, minimum=1, maximum=100_000, variable="QUIRE_PARKING_COUNT", metavar="N", help="Requests to list at most."
    )
    json: bool = option(False, variable="", help="Print the result as JSON.")


def run_parking(settings: ParkingSettings, environ: Mapping[str, str]) -> int:
    """Carry out one action on parked requests."""
    from quire.gateway.features.parking.parked_requests import run

    return run(settings, environ)


PARKING = Command(
    "List parked requests, park requests, or queue them again.",
    "A parked request keeps its tokens while no worker computes it, and continues at the same token once it is queued "
    "again. The action `park` parks every request that waits or runs, of one model, or of one worker; `unpark` queues "
    "parked requests again.",
    (
        "{prog}",
        "{prog} park --served-model-name qwen --retention-s 43200",
        "{prog} park --worker gpu-7",
        "{prog} unpark",
    ),
    ParkingSettings,
    run_parking,
)
