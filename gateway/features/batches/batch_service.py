"""Files and batches of a gateway process: the parts, and how they are wired."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from quire.gateway.features.batches.batch_meter import BatchMeter
from quire.gateway.features.batches.batch_routes import BatchRoutes
from quire.gateway.features.batches.batch_runner import BatchRunner
from quire.gateway.features.batches.batch_store import BatchStore
from quire.gateway.features.batches.files.file_routes import FileRoutes
from quire.gateway.features.batches.files.file_service import FileService
from quire.gateway.features.batches.line_endpoints import LineEndpoints, MakeEndpoint
from quire.gateway.serving.model_directory import ModelDirectory


class BatchService:
    """The storage, the store and the runner of a process, between `start` and `close`."""

    def __init__(self, directory: ModelDirectory, endpoints: Mapping[str, MakeEndpoint]) -> None:
        """Raise StartError for settings that contradict. endpoints: by path, besides chats and completions."""
        self._directory = directory
        self._endpoints = LineEndpoints(endpoints)
        settings = directory.process.settings
        self._files = FileService(settings, settings.redis_url)
        self._file_routes = FileRoutes(self._files, directory.process)
        self._batch_routes = BatchRoutes(directory, self._files)
        self.runner: BatchRunner | None = None
        self.meter = BatchMeter()
        directory.process.metrics.append(self.meter.families)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of /v1/files and /v1/batches."""
        return [*self._file_routes.routes(), *self._batch_routes.routes()]

    async def open(self, app: web.Application) -> None:
        """Open the storage, before anything else of the process. Raises StartError if it cannot be used."""
        await self._files.open()

    async def start(self, app: web.Application) -> None:
        """Run batches."""
        await self._files.start(self._directory.process.retry)
        if self._files.is_on:
            self._directory.process.images.find_file = self._files.image
            store = BatchStore(self._files.store.client)
            self.runner = BatchRunner(self._directory, self._endpoints, store, self._files.store.storage, self.meter)
            self._batch_routes.use(store, self.runner)
            self.runner.start()

    async def close(self, app: web.Application) -> None:
        if self.runner is not None:
            await self.runner.close()
        await self._files.close()


BATCHES = web.AppKey("batches", BatchService)
