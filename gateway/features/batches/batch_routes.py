"""The endpoints below /v1/batches: create, show, list and cancel batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from quire.gateway.api.caller import Caller, caller_of
from quire.gateway.api.parameters import read
from quire.gateway.api.parsing import read_object
from quire.gateway.errors.api_errors import (
    ApiError,
    BrokerDown,
    NotFound,
    StorageDown,
    TooManyBatches,
    refused,
)
from quire.gateway.features.batches.batch import PREFIX, Batch
from quire.gateway.features.batches.batch_parameters import BATCHES, BATCHES_QUERY, window_s
from quire.gateway.features.batches.batch_runner import BatchRunner
from quire.gateway.features.batches.batch_store import BatchStore, LinePlace
from quire.gateway.features.batches.files.file_service import FileService, not_found
from quire.gateway.features.batches.files.file_store import BATCH, StoredFile, new_file_id, read_id
from quire.gateway.features.batches.files.file_store import PREFIX as FILE_PREFIX
from quire.gateway.features.batches.jsonl import RawLine, read_lines
from quire.gateway.features.batches.line import call_id_of, read_line
from quire.gateway.serving.model_directory import ModelDirectory
from quire.shared.config.validators import shown

PATH = "/v1/batches"
MAX_BODY_BYTES = 65_536
# Lines that are cancelled in Redis at the same time.
CANCELLATIONS = 32


class BatchRoutes:
    """Handlers of one gateway process. A caller finds only the batches that its key has made."""

    def __init__(self, directory: ModelDirectory, files: FileService) -> None:
        self._directory = directory
        self._settings = directory.process.settings
        self._files = files
        self._batches: BatchStore | None = None
        self._runner: BatchRunner | None = None

    def use(self, store: BatchStore, runner: BatchRunner) -> None:
        """Note store and runner, which exist once the process has started."""
        self._batches, self._runner = store, runner

    @property
    def _store(self) -> BatchStore:
        """The store. Raises FilesAreOff without a storage."""
        self._files.check_on()
        assert self._batches is not None, "the process has started"
        return self._batches

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. Without a storage each answers with the error that names the setting."""
        batch_path = f"{PATH}/{{id}}"
        return [
            web.post(PATH, self.create),
            web.get(PATH, self.all, allow_head=False),
            web.get(batch_path, self.show, allow_head=False),
            web.post(f"{batch_path}/cancel", self.cancel),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/batches: creates a batch of an uploaded file. Its validation begins at once."""
        store, caller, settings = self._store, caller_of(request), self._settings
        given = read(await read_object(request, MAX_BODY_BYTES, settings.body_timeout_s), BATCHES, unsupported={})
        endpoint, window = given["endpoint"], given["completion_window"]
        file = await self._files.find(given["input_file_id"], caller.owner)
        if file.purpose != BATCH:
            raise refused("input_file_id", f"input_file_id names a file of the purpose {file.purpose}, not {BATCH}.")
        lane, model = await self._model_of(file, endpoint, caller)
        batch_id = new_file_id()
        reply = await self._files.retry(
            partial(
                store.add,
                batch_id,
                caller.owner,
                file.id,
                settings.max_batches,
                window_s(window),
                endpoint=endpoint,
                window=window,
                lane=lane,
                model=model,
                output=new_file_id(),
                errors_file=new_file_id(),
                metadata=json.dumps(dict(given["metadata"])) if "metadata" in given else "",
                output_expires_s=given.get("output_expires_after", settings.file_retention_s),
            )
        )
        if reply == "unknown":
            raise not_found(FILE_PREFIX + file.id)
        if reply == "full":
            raise TooManyBatches(
                f"{settings.max_batches} batches have not ended, as many as this server's setting --max-batches "
                "allows; wait for the end of one, or cancel one.",
                headers={"Retry-After": "60"},
            )
        assert self._runner is not None
        self._runner.look()
        return web.json_response((await self._find(PREFIX + batch_id, caller)).shown())

    async def _model_of(self, file: StoredFile, endpoint: str, caller: Caller) -> tuple[str, str]:
        """Return the lane and the model that the first line of a file names; both empty if it names none.

        The validation reports the errors of the line.
        """
        most = self._settings.max_body_bytes
        try:
            async for raw in read_lines(self._files.content(file), most, LinePlace(0, 1)):
                if not isinstance(raw, RawLine):
                    break
                name = read_line(raw, endpoint, most).body.get("model")
                return self._directory.choose(name, caller).model.name, name if type(name) is str else ""
        except (StorageDown, BrokerDown):
            raise
        except ApiError:
            pass
        return "", ""

    async def all(self, request: web.Request) -> web.Response:
        """GET /v1/batches: the batches of the caller in pages, the newest first."""
        store, owner = self._store, caller_of(request).owner
        query = BATCHES_QUERY.read(request)
        after = read_id(query.after, PREFIX) or "-" if query.after else ""
        page = await self._files.retry(partial(store.page, owner, query.limit, after))
        if page is None:
            raise refused("after", f"after names no batch: {shown(query.after)}.")
        data = []
        for batch_id in page.ids:
            batch = await self._files.retry(partial(store.get, batch_id, owner))
            if batch is None:
                await self._files.retry(partial(store.forget, owner, batch_id))
            else:
                data.append(batch.shown())
        return web.json_response(
            {
                "object": "list",
                "data": data,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
                "has_more": page.has_more,
            }
        )

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/batches/{id}: a batch as it is now."""
        return web.json_response((await self._find(request.match_info["id"], caller_of(request))).shown())

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/batches/{id}/cancel: stops a batch; the answers until then are kept. One that has ended stays."""
        store, caller = self._store, caller_of(request)
        batch = await self._find(request.match_info["id"], caller)
        _, windows = await self._files.retry(partial(store.cancel, batch.id, caller.owner))
        assert self._runner is not None
        # The lines of this gateway first; then those of others, which notice the cancellation a moment later.
        await self._runner.cancelled(batch.id)
        await self._cancel_lines(batch, windows)
        return web.json_response((await self._find(PREFIX + batch.id, caller)).shown())

    async def _cancel_lines(self, batch: Batch, windows: Sequence[tuple[LinePlace, LinePlace]]) -> None:
        gateway = self._directory.find(batch.lane)
        if gateway is None:
            return
        ids = [call_id_of(batch.id, number) for begin, end in windows for number in range(begin.number, end.number)]
        for at in range(0, len(ids), CANCELLATIONS):
            some = ids[at : at + CANCELLATIONS]
            await asyncio.gather(*(gateway.retry(partial(gateway.broker.cancel, id_)) for id_ in some))

    async def _find(self, public_id: str, caller: Caller) -> Batch:
        store, batch_id = self._store, read_id(public_id, PREFIX)
        batch = await self._files.retry(partial(store.get, batch_id, caller.owner)) if batch_id else None
        if batch is None:
            raise NotFound(f"No such Batch object: {public_id[:80]}.", param="id")
        return batch
