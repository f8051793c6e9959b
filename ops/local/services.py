"""The gateway and the workers of one `quire serve`: their settings, environments and command lines."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ALL_SETTINGS, ServeSettings
from quire.ops.local.children import ServiceProgram
from quire.ops.local.gpus import of_worker
from quire.ops.paths import IMPORT_ROOT
from quire.shared.command_line import CommandError
from quire.shared.model.naming import InvalidModelName
from quire.shared.settings import FROM_FLAGS, load, options, to_environ
from quire.worker.settings import WorkerSettings

# Time for open streams to finish when gateway and workers stop, unless QUIRE_DRAIN_S is set.
DRAIN_S = 2.0
MAX_PORT = 65535


class Services:
    """Makes the programs of the gateway and the workers. All settings are checked before anything starts.

    environ: may hold settings of the gateway and the workers; both get these settings.
    redis_url: empty for the embedded Redis.
    Raises CommandError and SettingError.
    """

    def __init__(self, settings: ServeSettings, environ: Mapping[str, str], state_dir: Path) -> None:
        self.count = settings.workers
        self._state_dir = state_dir
        self._has_own_redis = not settings.redis_url
        self._environ = _service_environ(settings, environ)
        gateway = load(GatewaySettings, [], self._environ, prog="quire gateway", known=ALL_SETTINGS)
        self._worker = load(WorkerSettings, [], self._environ, prog="quire worker", known=ALL_SETTINGS)
        try:
            self.model_name = gateway.name
        except InvalidModelName as error:
            raise CommandError(str(error)) from error
        self.drain_s = max(gateway.drain_s, self._worker.drain_s)
        first_port = self._worker.internal_port
        if first_port and first_port + self.count > MAX_PORT:
            raise CommandError(
                f"--internal-port {first_port} leaves too few ports for {self.count} workers and the gateway; give "
                f"one up to {MAX_PORT - self.count}, or 0"
            )

    def gateway(self, redis_url: str) -> ServiceProgram:
        """The gateway. The internal port of the gateway follows the ports of the workers."""
        return self._program("gateway", "gateway", redis_url, self.count, {})

    def worker(self, index: int, redis_url: str) -> ServiceProgram:
        """The worker with this index, counted from 0."""
        settings = self._worker
        gpus: Mapping[str, str] = {}
        if settings.device != "cpu":
            gpus = of_worker(index, self.count, settings.tensor_parallel_size, self._environ)
        threads = settings.threads
        if not threads and self.count > 1 and settings.device != "cuda":
            threads = max(1, (os.cpu_count() or 1) // self.count)
        own = {**gpus, "QUIRE_WORKER_ID": self._worker_id(index), "QUIRE_THREADS": str(threads)}
        return self._program("worker", f"worker-{index + 1}", redis_url, index, own)

    def _program(self, command: str, name: str, redis_url: str, index: int, own: Mapping[str, str]) -> ServiceProgram:
        # Processes cannot share a port: each takes the given one plus its index.
        port = self._worker.internal_port and self._worker.internal_port + index
        environ = {**self._environ, **own, "QUIRE_REDIS_URL": redis_url, "QUIRE_INTERNAL_PORT": str(port)}
        # -P: modules in the working directory are not ours.
        words = [sys.executable, "-P", "-m", "quire", command]
        return ServiceProgram(name, words, environ, self._state_dir / "logs" / f"{name}.log")

    def _worker_id(self, index: int) -> str:
        given = self._worker.worker_id
        if given:
            return given if self.count == 1 else f"{given}-{index + 1}"
        if self._has_own_redis:
            return f"worker-{index + 1}"
        # Unique among the machines and state folders that share the Redis, and the same after a restart.
        place = hashlib.sha256(os.fsencode(self._state_dir)).hexdigest()[:8]
        return f"{socket.gethostname()}-{place}-{index + 1}"


def _service_environ(settings: ServeSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of gateway and workers: settings of `quire serve` take precedence over variables."""
    own = {item.variable for item in options(ServeSettings)}
    theirs = {item.variable for cls in (GatewaySettings, WorkerSettings) for item in options(cls)}
    decided = {name: text for name, text in to_environ(settings).items() if name in theirs}
    passed = {name: text for name, text in environ.items() if name not in own or name in theirs}
    merged = {"QUIRE_DRAIN_S": str(DRAIN_S), **passed, **decided}
    changed = [name for name, text in decided.items() if environ.get(name) != text]
    merged[FROM_FLAGS] = " ".join([environ.get(FROM_FLAGS, ""), *changed])
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(IMPORT_ROOT), environ.get("PYTHONPATH", "")]))
    return merged
