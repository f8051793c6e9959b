"""The check of a line before a batch runs: its model, what its key may use, and its parameters."""

from __future__ import annotations

from collections.abc import Callable

from quire.gateway.errors.api_errors import ApiError, refused
from quire.gateway.features.batches.batch import Batch
from quire.gateway.features.batches.line import BatchLine
from quire.gateway.features.batches.line_endpoints import LineEndpoint, LineEndpoints
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.shared.config.validators import shown


async def check_of(directory: ModelDirectory, endpoints: LineEndpoints, batch: Batch) -> Callable[[BatchLine], None]:
    """Return the check of the lines of a batch. Raises ApiError if its key is not valid any more.

    All lines of a batch must mean the same model, or LoRA adapters of it, because each window has one queue.
    """
    caller = await directory.process.keys.ring.owner(batch.owner)
    # The model and the endpoint of the lines so far, by the name in a line.
    known: dict[object, tuple[Gateway, LineEndpoint]] = {}

    def check(line: BatchLine) -> None:
        name = line.body.get("model")
        try:
            if type(name) is not str or name not in known:
                gateway = directory.choose(name, caller)
                if type(name) is str:
                    gateway.limits.check_model(name)
                endpoint = endpoints.at(batch.endpoint, gateway, batch.owner)
                if gateway.model.name != batch.lane:
                    first = repr(batch.lane) if batch.lane else "a model that this server did not have"
                    raise refused(
                        "model", f"model is {shown(name)}, and the first line means {first}; a batch has one model."
                    )
                if type(name) is str:
                    known[name] = gateway, endpoint
            else:
                _, endpoint = known[name]
            endpoint.check(line.body)
        except ApiError as error:
            if error.param:
                error.param = f"body.{error.param}"
            raise

    return check
