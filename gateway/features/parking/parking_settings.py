"""The settings of the command about parked requests."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.config.settings import option
from quire.shared.protocol.keys import MAX_RETENTION_S, PARKING_S


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
    redis_url: str = option(
        "redis://127.0.0.1:6379/0", help="Redis that holds the requests.", metavar="URL", secret=True
    )
    served_model_name: str = option("", metavar="NAME", help="Only requests of this model; by default of all models.")
    count: int = option(
        100, minimum=1, maximum=100_000, variable="QUIRE_PARKING_COUNT", metavar="N", help="Requests to list at most."
    )
