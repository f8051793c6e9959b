"""A real Prometheus and a real redis_exporter for a running stack, and the queries that Grafana would send."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from quire.ops.local.ports import free_port
from quire.shared.process.processes import dying_with_parent
from tests.support.boards import RULES

EXPORTER = "prometheus-redis-exporter"
MISSING = [name for name in ("prometheus", EXPORTER) if shutil.which(name) is None]
# The values that Grafana would fill in for its variables. Scrapes are a second apart.
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$model": ".*"}

# The points of a series: (time, value).
Points = list[tuple[float, float]]


class Monitoring:
    """Prometheus scrapes `targets` (ports by job) every second and evaluates our rules; `close` ends it."""

    def __init__(self, folder: Path, targets: Mapping[str, list[int]], redis_url: str) -> None:
        folder.mkdir()
        port, exporter_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        jobs = {**targets, "redis": [exporter_port]}
        self.num_targets = sum(map(len, jobs.values()))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in RULES],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
                for job, ports in jobs.items()
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        commands = {
            "exporter": [EXPORTER, "-redis.addr", redis_url, "-web.listen-address", f"127.0.0.1:{exporter_port}"],
            "prometheus": [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        }
        self.started_at = time.time()
        self._processes = []
        for name, command in commands.items():
            command[0] = shutil.which(command[0]) or command[0]
            with (folder / f"{name}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(dying_with_parent(command), stdout=log, stderr=log))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)

    def _get(self, path: str, **parameters: Any) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as response:
            return json.load(response)["data"]

    def now(self, expr: str) -> list[float]:
        """The value of each series now; none while Prometheus does not answer."""
        try:
            return [float(one["value"][1]) for one in self._get("query", query=expr)["result"]]
        except OSError:
            return []

    def is_complete(self) -> bool:
        """Return True if all targets answer."""
        return self.now("sum(up)") == [self.num_targets]

    def since_the_start(self, expr: str) -> list[Points]:
        """The series of a panel's query from the start until now, a point for each second."""
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        found = self._get("query_range", query=expr, start=self.started_at, end=time.time(), step=1)["result"]
        return [[(at, float(value)) for at, value in one["values"]] for one in found]

    def firing(self) -> set[str]:
        """The names of alerts that fire or are about to."""
        return {one["labels"]["alertname"] for one in self._get("alerts")["alerts"]}
