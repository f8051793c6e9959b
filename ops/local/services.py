"""The gateway and the workers of one `quire serve`: their settings, environments and command lines."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ALL_SETTINGS, ServeSettings
from quire.ops.local.children import ServiceProgram
from quire.ops.local.gpus import check_separate, of_worker
from quire.ops.local.served_models import read_models
from quire.ops.paths import IMPORT_ROOT
from quire.shared.config.command_line import CommandError
from quire.shared.config.service_settings import is_loopback
from quire.shared.config.settings import FROM_FLAGS, load, options, to_environ
from quire.shared.process.kill_pipe import KILL_PIPE, KillRequests
from quire.worker.device import placement, topology
from quire.worker.host.folder import scan
from quire.worker.settings import WorkerSettings

# Time for open streams to finish when gateway and workers stop, unless QUIRE_DRAIN_S is set.
DRAIN_S = 2.0
MAX_PORT = 65535
MODELS_DIR = "QUIRE_MODELS_DIR"
# Models of a folder that the announcement and the lock name.
MAX_NAMES = 16


class Services:
    """Makes the programs of the gateway and the workers. All settings are checked before anything starts.

    environ: may hold settings of the gateway and the workers; both get these settings.
    redis_url: empty for the embedded Redis.
    Raises CommandError and SettingError.
    """

    def __init__(self, settings: ServeSettings, environ: Mapping[str, str], state_dir: Path) -> None:
        self._environ = _service_environ(settings, environ)
        # With --models-dir there is one worker, which starts others, and no list of models.
        self.has_folder = bool(self._environ.get(MODELS_DIR))
        self.models = [] if self.has_folder else read_models(settings.model, settings.served_model_name)
        self._workers_per_model = settings.workers
        # Worker processes of all models.
        self.count = 1 if self.has_folder else settings.workers * len(self.models)
        self.num_gateways = settings.gateways
        self._state_dir = state_dir
        self._has_own_redis = not settings.redis_url
        if self.has_folder:
            self._check_folder(settings)
        if self.serves_several:
            self._environ |= {"QUIRE_MODEL": "models/demo", "QUIRE_SERVED_MODEL_NAME": ""}
            self._environ["QUIRE_DISCOVER_MODELS"] = "true"
        if not self._environ.get("QUIRE_FILES_DIR") and not self._environ.get("QUIRE_FILES_BUCKET"):
            self._environ["QUIRE_FILES_DIR"] = str(state_dir / "files")
        # The settings of each gateway, without the URL of Redis.
        self.gateway_settings = load(GatewaySettings, [], self._environ, prog="quire gateway", known=ALL_SETTINGS)
        self._worker = load(WorkerSettings, [], self._environ, prog="quire worker", known=ALL_SETTINGS)
        self.model_name = ", ".join(model.name for model in self.models)
        if self.has_folder:
            self.model_name = f"the models of {self._worker.models_dir}"
        if len(self.models) > 1:
            self._check_several()
        self._num_cores = placement.place(topology.read_topology(), binding="none").threads
        gateway = self.gateway_settings
        self.drain_s = max(gateway.shutdown_delay_s + gateway.drain_s, self._worker.drain_s)
        first_port = self._worker.internal_port
        last = MAX_PORT + 1 - self.count - self.num_gateways
        if first_port > last:
            gateways = "the gateway" if self.num_gateways == 1 else f"{self.num_gateways} gateways"
            raise CommandError(
                f"--internal-port {first_port} leaves too few ports for {self.count} workers and {gateways}; give one "
                f"up to {last}, or 0"
            )
        if self.num_gateways > 1 and not hasattr(socket, "SO_REUSEPORT"):
            raise CommandError("--gateways: this system cannot share a port among processes (SO_REUSEPORT); give 1")
        self._gateway_id = self.gateway_settings.gateway_id
        # Gateways with the same key log the same hash of a user.
        self._user_hash_key = self.gateway_settings.user_hash_key or secrets.token_hex(16)

    @property
    def names(self) -> list[str]:
        """The names of the models; of a folder those that it has now and that may be served, at most MAX_NAMES."""
        if not self.has_folder:
            return [model.name for model in self.models]
        entries = scan(Path(self._worker.models_dir), {}).values()
        return [entry.name for entry in entries if not entry.fault][:MAX_NAMES]

    @property
    def serves_several(self) -> bool:
        """True if the gateways find their models in Redis."""
        return self.has_folder or len(self.models) > 1

    def _check_folder(self, settings: ServeSettings) -> None:
        """Raise CommandError for settings that do not fit --models-dir, and make its path absolute."""
        if settings.model != ServeSettings.model:
            raise CommandError(f"MODEL {settings.model} and --models-dir: give one of them")
        if settings.workers != 1:
            raise CommandError(
                f"--workers {settings.workers} and --models-dir: each model gets one worker; --models-max says how "
                "many models are loaded at once"
            )
        if settings.served_model_name:
            raise CommandError("--served-model-name and --models-dir: each model has the name of its folder or file")
        folder = Path(self._environ[MODELS_DIR]).expanduser().absolute()
        if not folder.is_dir():
            raise CommandError(f"--models-dir {folder}: there is no such folder; make it, or name another one")
        self._environ[MODELS_DIR] = str(folder)

    def _check_several(self) -> None:
        """Raise CommandError for settings that several models cannot share."""
        for flag, value in (
            ("--lora", self._worker.lora),
            ("--lora-dir", self._worker.lora_dir),
            ("--model-aliases", self._worker.model_aliases),
            ("--pinned-prefixes", self._worker.pinned_prefixes),
        ):
            if value:
                raise CommandError(
                    f"{flag} belongs to one model, and `quire serve` was given {len(self.models)}; leave it out, or "
                    "start the workers of that model with `quire worker`"
                )
        has_own_memory = self._worker.kv_cache_gb or self._worker.num_blocks
        if self._worker.device != "cpu" and not has_own_memory:
            check_separate(self.count, self._worker.num_ranks, self._environ)

    @property
    def worker_ids(self) -> list[str]:
        """The ids of the workers, in the order of their indices."""
        return [self._worker_id(index) for index in range(self.count)]

    def kill_requests(self) -> KillRequests | None:
        """Return a pipe through which the gateways can have workers killed, for the chat page's demonstration.

        Return None unless only this machine reaches the gateways, and they need no API keys.
        """
        settings = self.gateway_settings
        return KillRequests(self.worker_ids) if settings.is_open and is_loopback(settings.host) else None

    def gateway(self, index: int, redis_url: str, kills: KillRequests | None = None) -> ServiceProgram:
        """Return the gateway with this index, from 0. The internal ports of gateways follow those of the workers."""
        place = self.count + index
        given = (kills.environ, [kills.writing]) if kills else ({}, [])
        if self.num_gateways == 1:
            return self._program("gateway", "gateway", redis_url, place, *given)
        own = {"QUIRE_REUSE_PORT": "true", "QUIRE_USER_HASH_KEY": self._user_hash_key, **given[0]}
        if self._gateway_id:
            own["QUIRE_GATEWAY_ID"] = f"{self._gateway_id}-{index + 1}"
        return self._program("gateway", f"gateway-{index + 1}", redis_url, place, own, given[1])

    def worker(self, index: int, redis_url: str) -> ServiceProgram:
        """Return the worker with this index, counted from 0."""
        settings = self._worker
        gpus: Mapping[str, str] = {}
        if settings.device != "cpu":
            gpus = of_worker(index, self.count, settings.num_ranks, self._environ)
        threads = settings.threads
        if not threads and self.count > 1 and settings.device != "cuda":
            threads = max(1, self._num_cores // self.count)
        own = {**gpus, "QUIRE_WORKER_ID": self._worker_id(index), "QUIRE_THREADS": str(threads)}
        if len(self.models) > 1:
            model = self.models[index // self._workers_per_model]
            own |= {"QUIRE_MODEL": model.place, "QUIRE_SERVED_MODEL_NAME": model.name, "QUIRE_DISCOVER_MODELS": ""}
        return self._program("worker", f"worker-{index + 1}", redis_url, index, own)

    def _program(
        self,
        command: str,
        name: str,
        redis_url: str,
        index: int,
        own: Mapping[str, str],
        keep: Sequence[int] = (),
    ) -> ServiceProgram:
        # Processes cannot share a port: each takes the given port plus its index.
        port = self._worker.internal_port and self._worker.internal_port + index
        environ = {**self._environ, **own, "QUIRE_REDIS_URL": redis_url, "QUIRE_INTERNAL_PORT": str(port)}
        # -P: modules in the working directory are not ours.
        words = [sys.executable, "-P", "-m", "quire", command]
        return ServiceProgram(name, words, environ, self._state_dir / "logs" / f"{name}.log", keep)

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
    """Return the environment of gateway and workers: settings of `quire serve` take precedence over variables."""
    own = {item.variable for item in options(ServeSettings)}
    theirs = {item.variable for cls in (GatewaySettings, WorkerSettings) for item in options(cls)}
    decided = {name: text for name, text in to_environ(settings).items() if name in theirs}
    passed = {name: text for name, text in environ.items() if name not in own or name in theirs}
    passed.pop(KILL_PIPE, None)  # only this `quire serve` gives its gateways one
    merged = {"QUIRE_DRAIN_S": str(DRAIN_S), "QUIRE_SHUTDOWN_DELAY_S": "0", **passed, **decided}
    changed = [name for name, text in decided.items() if environ.get(name) != text]
    merged[FROM_FLAGS] = " ".join([environ.get(FROM_FLAGS, ""), *changed])
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(IMPORT_ROOT), environ.get("PYTHONPATH", "")]))
    return merged
