"""`quire serve`: Redis, workers and a gateway on one machine, as children of one process that watches over them.

All start together. What fails before the server is ready ends the start with the reason in one line; what dies later
is started again, and accepted requests go on. Ctrl-C ends everything in order: gateway, workers, Redis. However this
process ends, its children do not outlive it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.errors import CommandError
from quire.ops.local.children import Child, ChildProcess, RedisService
from quire.ops.local.embedded_redis import STOP_TIMEOUT_S, EmbeddedRedis
from quire.ops.local.gpus import of_worker
from quire.ops.local.preconditions import EMBEDDED, check_port, check_redis, lock_state_dir
from quire.ops.local.processes import wait_all
from quire.ops.local.progress import Progress
from quire.ops.paths import IMPORT_ROOT, resolve_model, resolve_state_dir
from quire.shared.model.naming import InvalidModelName
from quire.shared.settings import FROM_FLAGS, load, options, to_environ
from quire.worker.progress import READY
from quire.worker.settings import WorkerSettings

# How long the services finish open streams when told to stop, unless QUIRE_DRAIN_S says otherwise.
DRAIN_S = 2.0
# What they get on top of it before they are killed.
STOP_GRACE_S = 5.0
POLL_S = 0.05
MAX_PORT = 65535
# The gateway logs each probe.
POLLS_PER_PROBE = 3


def serve(settings: ServeSettings, environ: Mapping[str, str], known: Sequence[Any]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises CommandError and SettingError before anything runs.

    `environ` may hold settings of gateway and worker, which reach them as they are.
    """
    settings = dataclasses.replace(settings, model=resolve_model(settings.model))
    state_dir = resolve_state_dir(settings.state_dir, environ)
    lock = lock_state_dir(state_dir)
    try:
        settings = dataclasses.replace(settings, port=check_port(settings.host, settings.port))
        launcher = Launcher(settings, environ, known, state_dir)
        # For a second `quire serve` and for `quire dead`. On a full disk the services give the better error.
        with contextlib.suppress(OSError):
            lock.write(f"{os.getpid()} {launcher.url} {settings.redis_url or EMBEDDED}")
        return launcher.run()
    finally:
        with contextlib.suppress(OSError):
            lock.write("")
        lock.close()


class Launcher:
    """One run of `quire serve`, from the first child to the last."""

    def __init__(
        self, settings: ServeSettings, environ: Mapping[str, str], known: Sequence[Any], state_dir: Path
    ) -> None:
        self.url = f"http://{_url_host(settings.host)}:{settings.port}"
        self._settings = settings
        self._state_dir = state_dir
        self._progress = Progress(sys.stderr)
        self._stops = 0  # how often we were asked to stop: once is in order, twice is at once
        self._redis = None if settings.redis_url else EmbeddedRedis(state_dir)
        # Wrong settings are found before anything is started.
        base = _service_environ(settings, environ)
        gateway = load(GatewaySettings, [], base, prog="quire gateway", known=known)
        worker = load(WorkerSettings, [], base, prog="quire worker", known=known)
        try:
            self._model_name = gateway.name
        except InvalidModelName as error:
            raise CommandError(str(error)) from error
        self._drain_s = max(gateway.drain_s, worker.drain_s)
        if worker.internal_port and worker.internal_port + settings.workers > MAX_PORT:
            raise CommandError(
                f"--internal-port {worker.internal_port} leaves too few ports for {settings.workers} workers and the "
                f"gateway; give one up to {MAX_PORT - settings.workers}, or 0"
            )
        self._base_environ = base
        self._worker_settings = worker
        self._children: list[Child] = []

    def run(self) -> int:
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGTERM, self._on_stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, self._on_stop)
        try:
            if not self._start():
                return self._stopped()
            self._announce()
            self._watch()
            return self._stopped()
        finally:
            self._kill_all()

    def _on_stop(self, number: int, frame: object) -> None:
        self._stops += 1

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start everything and wait until it serves; False if we were told to stop. Raises CommandError."""
        if self._redis is None:
            check_redis(self._settings.redis_url)
        else:
            self._launch(RedisService(self._redis))
            self._redis.wait_ready(give_up=lambda: self._stops > 0)
        count = self._settings.workers
        workers = f"{count} workers" if count > 1 else "a worker"
        redis = "Redis" if self._redis is None else "Redis (embedded)"
        self._progress.say(f"Starting {self._model_name}: {redis}, the gateway and {workers}")
        services = [self._gateway(), *(self._worker(index) for index in range(count))]
        for service in services:
            self._launch(service)
        polls = 0
        while not self._stops:
            for child in self._children:
                if child.has_ended():
                    raise CommandError(f"{child.name} ended, {child.how_it_ended()} (log: {child.program.log_path})")
            polls += 1
            if polls % POLLS_PER_PROBE == 0 and _answers(self.url, "/readyz"):
                return True
            if self._progress.elapsed_s > self._settings.start_timeout_s:
                raise CommandError(
                    f"not ready after {self._settings.start_timeout_s:.0f} s (logs: {self._state_dir / 'logs'}); "
                    "pass a larger --start-timeout-s if the model is still loading"
                )
            self._progress.update(*what_workers_do(services[1:]))
            time.sleep(POLL_S)
        return False

    def _launch(self, program: RedisService | ChildProcess) -> None:
        child = Child(program)
        child.start()
        self._children.append(child)

    def _gateway(self) -> ChildProcess:
        # The workers have those before it.
        port = self._worker_settings.internal_port
        environ = {
            **self._base_environ,
            "QUIRE_REDIS_URL": self._redis_url,
            "QUIRE_INTERNAL_PORT": str(port and port + self._settings.workers),
        }
        return ChildProcess("gateway", _command("gateway"), environ, self._log_path("gateway"))

    def _worker(self, index: int) -> ChildProcess:
        settings = self._worker_settings
        name = f"worker-{index + 1}"
        if settings.worker_id:
            worker_id = settings.worker_id if self._settings.workers == 1 else f"{settings.worker_id}-{index + 1}"
        elif self._redis is not None:
            worker_id = name
        else:  # unique where other machines or state folders share the Redis, and the same after a restart
            place = hashlib.sha256(os.fsencode(self._state_dir)).hexdigest()[:8]
            worker_id = f"{socket.gethostname()}-{place}-{index + 1}"
        threads = settings.threads
        if not threads and self._settings.workers > 1 and settings.device != "cuda":
            threads = max(1, (os.cpu_count() or 1) // self._settings.workers)
        gpus: Mapping[str, str] = {}
        if settings.device != "cpu":
            gpus = of_worker(index, self._settings.workers, settings.tensor_parallel_size, self._base_environ)
        environ = {
            **self._base_environ,
            **gpus,
            "QUIRE_REDIS_URL": self._redis_url,
            "QUIRE_WORKER_ID": worker_id,
            "QUIRE_THREADS": str(threads),
            # Workers cannot share a port: a given one is that of the first.
            "QUIRE_INTERNAL_PORT": str(settings.internal_port and settings.internal_port + index),
        }
        return ChildProcess(name, _command("worker"), environ, self._log_path(name))

    @property
    def _redis_url(self) -> str:
        return self._settings.redis_url if self._redis is None else self._redis.url

    def _log_path(self, name: str) -> Path:
        return self._state_dir / "logs" / f"{name}.log"

    def _announce(self) -> None:
        request = {
            "model": self._model_name,
            "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
            "stream": True,
        }
        body = json.dumps(request).replace("'", "'\\''")
        self._progress.say(f"Ready in {self._progress.elapsed_s:.1f} s")
        lines = [f"ready: {self.url}", ""]
        if _answers(self.url, "/"):
            lines.append(f"  page   {self.url}/")
        lines += [
            f"  API    {self.url}/v1",
            f"  model  {self._model_name}",
            f"  logs   {self._state_dir / 'logs'}",
            f"  chat   {_quire()} chat" + ("" if self._settings.port == 8000 else f" --url {self.url}"),
            "  stop   Ctrl-C",
            "",
            f"curl -N {self.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        ]
        with contextlib.suppress(OSError):  # if nobody reads standard output, serving goes on
            print("\n".join(lines), flush=True)

    # --- watch --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start again what dies, until we are told to stop."""
        while not self._stops:
            for child in self._children:
                if child.has_ended():
                    how = child.how_it_ended()
                    wait_s = child.schedule_restart()
                    self._progress.say(f"{child.name} ended, {how}; starting it again in {wait_s:g} s")
                elif child.is_due():
                    try:
                        child.start()
                    except CommandError as error:
                        wait_s = child.schedule_restart()
                        self._progress.say(f"{child.name}: {error}; trying again in {wait_s:g} s")
                    except OSError as error:
                        wait_s = child.schedule_restart()
                        self._progress.say(f"{child.name} cannot be started: {error}; trying again in {wait_s:g} s")
            time.sleep(POLL_S)

    # --- stop ---------------------------------------------------------------------------------------------------------

    def _stopped(self) -> int:
        """End gateway, workers and Redis, in this order. Returns the exit code."""
        self._progress.say("Stopping (Ctrl-C again: at once)")
        groups = [
            [child for child in self._children if child.name == "gateway"],
            [child for child in self._children if child.name.startswith("worker")],
            [child for child in self._children if child.name == "redis"],
        ]
        for group in groups:
            running = [child.process for child in group if child.process is not None and not child.has_ended()]
            for process in running:
                process.terminate()
            timeout_s = STOP_TIMEOUT_S if group is groups[2] else self._drain_s + STOP_GRACE_S
            if not wait_all(running, timeout_s, lambda: self._stops > 1):
                names = ", ".join(child.name for child in group if not child.has_ended())
                self._progress.say(f"Killing {names}, which did not end" + ("" if self._stops > 1 else " in time"))
                _kill(running)
            if self._stops > 1:
                return 130
        self._progress.say("Stopped")
        return 0

    def _kill_all(self) -> None:
        """Nothing is left, whatever happened. Redis, if it still runs, may write out its data first."""
        _kill([child.process for child in self._children if child.process is not None and child.name != "redis"])
        if self._redis is not None:
            if self._stops > 1 and self._redis.process is not None:
                self._redis.process.kill()
            self._redis.stop()


def what_workers_do(workers: Sequence[ChildProcess]) -> tuple[str, str]:
    """Phases of the workers that are not ready, with and without percentages.

    Workers in the same phase are counted together, with the percentage of the slowest.
    """
    phases: dict[str, list[tuple[int, str, str]]] = {}
    for worker in workers:
        doing = worker.doing()
        if doing.phase != READY:
            phases.setdefault(doing.phase, []).append((int(doing.percent or 0), str(doing), worker.name))
    if not phases:
        return ("gateway: starting",) * 2
    texts, plain = [], []
    for phase, members in phases.items():
        who = members[0][2] if len(members) == 1 else f"{len(members)} workers"
        texts.append(f"{who}: {min(members)[1]}")
        plain.append(f"{who}: {phase}")
    return ", ".join(texts), ", ".join(plain)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill with SIGKILL, each with the children of its own."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _command(name: str) -> list[str]:
    # -P: what lies in the folder that `quire serve` was called from is none of our modules.
    return [sys.executable, "-P", "-m", "quire", name]


def _quire() -> str:
    """How the user calls us: by name, or in a checkout by the path in its virtual environment."""
    script = Path(sys.executable).with_name("quire")
    if shutil.which("quire") or not script.is_file():
        return "quire"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))


def _service_environ(settings: ServeSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of gateway and workers: what `quire serve` decides over what it was given."""
    own = {item.variable for item in options(ServeSettings)}
    theirs = {item.variable for cls in (GatewaySettings, WorkerSettings) for item in options(cls)}
    decided = {name: text for name, text in to_environ(settings).items() if name in theirs}
    passed = {name: text for name, text in environ.items() if name not in own or name in theirs}
    merged = {"QUIRE_DRAIN_S": str(DRAIN_S), **passed, **decided}
    merged[FROM_FLAGS] = " ".join(
        [environ.get(FROM_FLAGS, ""), *(n for n, t in decided.items() if environ.get(n) != t)]
    )
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(IMPORT_ROOT), environ.get("PYTHONPATH", "")]))
    return merged


def _answers(url: str, path: str) -> bool:
    """Whether a GET is answered with 200."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _url_host(host: str) -> str:
    """How this machine reaches a server that listens on `host`."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
