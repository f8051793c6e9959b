"""The variables that docker-compose.yml reads from `.env` in addition to the settings of Quire.

The names of these variables do not begin with QUIRE_: the processes refuse unknown variables with that prefix.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable of the stack, with the default that docker-compose.yml gives it."""

    name: str
    default: str
    help: str


VARIABLES = (
    Variable("COMPOSE_PROFILES", "", "Profiles to start in addition: gpu, dashboards, or gpu,dashboards."),
    Variable(
        "CPU_WORKERS", "1", "Number of CPU workers; --scale worker=N overrides it. Set it to 0 with the profile gpu."
    ),
    Variable(
        "GPU_ID", "0", "GPU of worker-gpu, by number or UUID; with QUIRE_TENSOR_PARALLEL_SIZE a list with commas."
    ),
    Variable("GATEWAY_ADDRESS", "127.0.0.1", "Address on which gateways listen; 0.0.0.0 means every interface."),
    Variable("GATEWAY_PORTS", "8000-8009", "Range of ports for gateways; each replica takes one."),
    Variable("PROMETHEUS_PORT", "9090", "Port of Prometheus, on 127.0.0.1."),
    Variable("GRAFANA_PORT", "3000", "Port of Grafana, on 127.0.0.1."),
    Variable("GRAFANA_PASSWORD", "", "Password of Grafana's user admin; Grafana does not start without it."),
    Variable(
        "MODELS_DIR", "./models", "Folder that is mounted at /models in containers; name a model in it as models/NAME."
    ),
    Variable("AWS_ACCESS_KEY_ID", "", "Key of the bucket that QUIRE_FILES_BUCKET names."),
    Variable("AWS_SECRET_ACCESS_KEY", "", "Secret of that key."),
    Variable("AWS_DEFAULT_REGION", "", "Region of that bucket."),
    Variable("HF_TOKEN", "", "Hugging Face token, for models that require one."),
    Variable(
        "REDIS_PASSWORD",
        "",
        "Password of Redis: 16 or more letters, digits, - and _; by default a random one is generated and kept.",
    ),
    Variable(
        "REDIS_MAXMEMORY",
        "1gb",
        "Memory limit of the queue. A full queue refuses new requests; no accepted request is lost.",
    ),
    Variable("REDIS_MEMORY_LIMIT", "2500m", "Memory limit of the container of Redis: more than twice REDIS_MAXMEMORY."),
    Variable("GATEWAY_MEMORY_LIMIT", "2g", "Memory limit of each gateway's container."),
    Variable("WORKER_MEMORY_LIMIT", "8g", "Memory limit of each CPU worker's container: weights, KV cache and 1 GiB."),
    Variable("PROMETHEUS_MEMORY_LIMIT", "2g", "Memory limit of the container of Prometheus."),
    Variable("REDIS_EXPORTER_MEMORY_LIMIT", "128m", "Memory limit of the container of redis_exporter."),
    Variable("GRAFANA_MEMORY_LIMIT", "1g", "Memory limit of the container of Grafana."),
    Variable(
        "STOP_GRACE_PERIOD", "40s", "Time until `stop` kills a container; must exceed QUIRE_DRAIN_S (20 in this stack)."
    ),
    Variable(
        "TORCH_INDEX", "", "For builds: an additional package index for torch, such as the index of its CPU builds."
    ),
    Variable("PIP_INDEX_URL", "", "For builds: URL of a package index to use instead of the public one."),
    Variable("PIP_EXTRA_INDEX_URL", "", "For builds: URL of an additional package index."),
    Variable("PYTHON_IMAGE", "python:3.11.15-slim-bookworm", "For builds: base image of gateway and worker."),
    Variable("REDIS_IMAGE", "redis:8.8.2", "For builds: base image of Redis."),
    Variable("PROMETHEUS_IMAGE", "prom/prometheus:v3.13.2", "For builds: base image of Prometheus."),
    Variable("GRAFANA_IMAGE", "grafana/grafana:12.4.3", "The image of Grafana."),
    Variable("REDIS_EXPORTER_IMAGE", "oliver006/redis_exporter:v1.66.0-alpine", "The image of redis_exporter."),
)
