"""`quire serve`: Redis, workers and gateways on one machine, as children of one process that supervises them.

All start at the same time. A failure before the server is ready ends the start, with the reason in one line. A child
that dies later is restarted, and accepted requests continue. Ctrl-C stops everything in order: gateways, workers,
Redis. However this process ends, its children end with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.ops.cli.settings import ServeSettings
from quire.ops.local.announcement import announcement, answers, listed_models, local_url, quire_command
from quire.ops.local.children import Child, Program, RedisProgram, ServiceProgram, start_phases
from quire.ops.local.embedded_redis import STOP_TIMEOUT_S, EmbeddedRedis
from quire.ops.local.first_key import first_key
from quire.ops.local.preconditions import EMBEDDED, check_redis, held_port, lock_state_dir
from quire.ops.local.processes import wait_all
from quire.ops.local.progress import Progress
from quire.ops.local.served_models import resolve_models
from quire.ops.local.services import MODELS_DIR, Services
from quire.ops.paths import resolve_state_dir
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import EXIT_CODE
from quire.shared.process.kill_pipe import KillRequests
from quire.shared.process.start_pipe import READY

# Time for services to stop after draining, before they are killed.
STOP_GRACE_S = 5.0
POLL_S = 0.05
# Polls per probe of the gateway. Only some polls send a probe, because the gateway logs each probe.
POLLS_PER_PROBE = 3


def serve(settings: ServeSettings, environ: Mapping[str, str]) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. Raise CommandError or SettingError before anything runs.

    environ: may hold settings of the gateway and the workers; both get these settings.
    """
    if not environ.get(MODELS_DIR):
        settings = dataclasses.replace(settings, model=resolve_models(settings.model))
    state_dir = resolve_state_dir(settings.state_dir, environ)
    lock = lock_state_dir(state_dir)
    try:
        with held_port(settings.host, settings.port) as port:
            settings = dataclasses.replace(settings, port=port)
            services = Services(settings, environ, state_dir)
            launcher = Launcher(settings, services, state_dir)
            names = ",".join(services.names)
            # For a second `quire serve` and for commands like `quire ps`. The services report a full disk better.
            with contextlib.suppress(OSError):
                lock.write(f"{os.getpid()} {launcher.url} {settings.redis_url or EMBEDDED} {names}")
            return launcher.run()
    finally:
        with contextlib.suppress(OSError):
            lock.write("")
        lock.close()


class Launcher:
    """One run of `quire serve`, from the first child to the last."""

    def __init__(self, settings: ServeSettings, services: Services, state_dir: Path) -> None:
        self.url = local_url(settings.host, settings.port)
        self._settings = settings
        self._services = services
        self._logs = state_dir / "logs"
        self._progress = Progress(sys.stderr)
        self._first_key = ""
        self._stops = 0  # requests to stop so far: the first stops in order, the second at once
        self._redis = None if settings.redis_url else EmbeddedRedis(state_dir)
        self._children: list[Child] = []
        self._gateways: list[ServiceProgram] = []
        self._workers: dict[str, Child] = {}  # by the id of the worker
        self._kills: KillRequests | None = None

    def run(self) -> int:
        """Start, serve and stop. Return the exit code. Raise CommandError if the start fails."""
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGTERM, self._on_stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, self._on_stop)
        try:
            if self._start():
                self._announce()
                self._supervise()
            return self._stop()
        finally:
            self._kill_all()

    def _on_stop(self, number: int, frame: object) -> None:
        self._stops += 1

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start everything and wait until it serves; False if told to stop meanwhile. Raise CommandError."""
        redis_url = self._settings.redis_url
        if self._redis is None:
            check_redis(redis_url)
        else:
            self._launch(RedisProgram(self._redis))
            self._redis.wait_ready(give_up=lambda: self._stops > 0)
            redis_url = self._redis.url
        count = self._services.count
        redis = "Redis (embedded)" if self._redis else "Redis"
        num_gateways = self._services.num_gateways
        gateways = f"{num_gateways} gateways" if num_gateways > 1 else "the gateway"
        what = f"{redis}, {gateways} and {f'{count} workers' if count > 1 else 'a worker'}"
        self._progress.say(f"Starting {self._services.model_name}: {what}")
        if not self._stops:
            self._first_key = first_key(self._services.gateway_settings, self._settings, redis_url, sys.stderr)
        if key := self._first_key:
            self._progress.say(f"The first API key, shown only now (`{quire_command()} keys create` makes more): {key}")
        self._kills = self._services.kill_requests()
        self._gateways = [self._services.gateway(index, redis_url, self._kills) for index in range(num_gateways)]
        for gateway in self._gateways:
            self._launch(gateway)
        workers = [self._services.worker(index, redis_url) for index in range(count)]
        for worker_id, worker in zip(self._services.worker_ids, workers, strict=True):
            self._workers[worker_id] = self._launch(worker)
        return self._wait_ready(workers)

    def _launch(self, program: Program) -> Child:
        child = Child(program)
        child.start()
        self._children.append(child)
        return child

    def _wait_ready(self, workers: Sequence[ServiceProgram]) -> bool:
        polls = 0
        while not self._stops:
            for child in self._children:
                if child.has_ended():
                    raise CommandError(f"{child.name} ended, {child.how_it_ended()} (log: {child.program.log_path})")
            polls += 1
            if polls % POLLS_PER_PROBE == 0 and self._all_listen() and self._all_ready():
                return True
            if self._progress.elapsed_s > self._settings.start_timeout_s:
                raise CommandError(
                    f"not ready after {self._settings.start_timeout_s:.0f} s (logs: {self._logs}); pass a larger "
                    "--start-timeout-s if the model is still loading"
                )
            self._progress.update(*start_phases(workers))
            time.sleep(POLL_S)
        return False

    def _all_ready(self) -> bool:
        """Return whether a gateway is ready, and serves every model if there are several."""
        models = self._services.models
        if len(models) > 1:
            return {model.name for model in models} <= listed_models(self.url)
        return answers(self.url, "/readyz")

    def _all_listen(self) -> bool:
        """Return whether every gateway listens: a probe of their common port reaches only one of them."""
        return all(gateway.phase().phase == READY for gateway in self._gateways)

    def _announce(self) -> None:
        self._progress.say(f"Ready in {self._progress.elapsed_s:.1f} s")
        if self._first_key and answers(self.url, "/"):
            self._progress.say(f"The chat page with this key: {self.url}/#key={self._first_key}")
        text = announcement(
            self.url,
            self._services.names or ["NAME"],
            self._logs,
            is_default_port=self._settings.port == 8000,
            needs_key=not self._services.gateway_settings.is_open,
        )
        with contextlib.suppress(OSError):  # a closed standard output does not end the server
            print(text, flush=True)

    # --- supervise ----------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Restart children that die, until told to stop."""
        while not self._stops:
            for child in self._children:
                if child.has_ended():
                    how = child.how_it_ended()
                    wait_s = child.schedule_restart()
                    self._progress.say(f"{child.name} ended, {how}; starting it again in {wait_s:g} s")
                elif child.is_due():
                    self._restart(child)
            self._wait_and_kill()

    def _wait_and_kill(self) -> None:
        """Wait until the next look at the children. Kill the workers that the chat page names, at once."""
        if self._kills is None:
            time.sleep(POLL_S)
            return
        for worker_id in self._kills.read(POLL_S):
            worker = self._workers[worker_id]
            worker.kill()
            self._progress.say(f"killed {worker.name}: the chat page asked for it")

    def _restart(self, child: Child) -> None:
        try:
            child.start()
        except (CommandError, OSError) as error:
            what = f": {error}" if isinstance(error, CommandError) else f" cannot be started: {error}"
            self._progress.say(f"{child.name}{what}; trying again in {child.schedule_restart():g} s")

    # --- stop ---------------------------------------------------------------------------------------------------------

    def _stop(self) -> int:
        """End gateways, workers and Redis, in this order. Return the exit code."""
        self._progress.say("Stopping (Ctrl-C again: at once)")
        for prefix in ("gateway", "worker", "redis"):
            group = [child for child in self._children if child.name.startswith(prefix)]
            running = [child.process for child in group if child.process is not None and not child.has_ended()]
            for process in running:
                process.terminate()
            timeout_s = STOP_TIMEOUT_S if prefix == "redis" else self._services.drain_s + STOP_GRACE_S
            if not wait_all(running, timeout_s, lambda: self._stops > 1):
                names = ", ".join(child.name for child in group if not child.has_ended())
                self._progress.say(f"Killing {names}, which did not end" + ("" if self._stops > 1 else " in time"))
                _kill(running)
            if self._stops > 1:
                return EXIT_CODE
        self._progress.say("Stopped")
        return 0

    def _kill_all(self) -> None:
        """Leave no process. A Redis that still runs may write out its data first, unless told to stop at once."""
        _kill([child.process for child in self._children if child.process is not None and child.name != "redis"])
        if self._redis is not None:
            if self._stops > 1 and self._redis.process is not None:
                self._redis.process.kill()
            self._redis.stop()


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill with SIGKILL, each process with its own children."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
