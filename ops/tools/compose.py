"""What docker-compose.yml reads from `.env` beside the settings of Quire. Its names have no QUIRE_ in front: a process
refuses variables of that prefix that it does not know, and these are not for processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable of the stack, with the default that docker-compose.yml gives it."""

    name: str
    default: str
    help: str


VARIABLES = (
    Variable("COMPOSE_PROFILES", "", "What is started besides: gpu, dashboards, or both with a comma."),
    Variable("CPU_WORKERS", "1", "Workers on the CPU, unless --scale worker=N says otherwise; 0 with the profile gpu."),
    Variable(
        "GPU_ID", "0", "The GPU of worker-gpu, by number or UUID; of QUIRE_TENSOR_PARALLEL_SIZE all, with commas."
    ),
    Variable("GATEWAY_ADDRESS", "127.0.0.1", "Where gateways listen on this machine; 0.0.0.0 is every interface."),
    Variable("GATEWAY_PORTS", "8000-8009", "Their ports: each replica takes one of the range."),
    Variable("PROMETHEUS_PORT", "9090", "Port of Prometheus, on 127.0.0.1."),
    Variable("GRAFANA_PORT", "3000", "Port of Grafana, on 127.0.0.1."),
    Variable("GRAFANA_PASSWORD", "", "Password of the user admin; Grafana does not start without one."),
    Variable("MODELS_DIR", "./models", "Folder that containers see as /models; give its models as models/NAME."),
    Variable("HF_TOKEN", "", "Token for Hugging Face, where a model asks for one."),
    Variable("REDIS_PASSWORD", "", "16 or more of letters, digits, - and _; by default one is drawn and kept."),
    Variable("REDIS_MAXMEMORY", "1gb", "Memory of the queue; a full one refuses new requests and forgets none."),
    Variable("REDIS_MEMORY_LIMIT", "2500m", "Limit of its container: twice as much and some."),
    Variable("GATEWAY_MEMORY_LIMIT", "2g", "Limit of each gateway's container."),
    Variable("WORKER_MEMORY_LIMIT", "8g", "Limit of each CPU worker's container: weights, KV cache and 1 GiB."),
    Variable("PROMETHEUS_MEMORY_LIMIT", "2g", "Limit of Prometheus' container."),
    Variable("REDIS_EXPORTER_MEMORY_LIMIT", "128m", "Limit of the container that reads Redis for Prometheus."),
    Variable("GRAFANA_MEMORY_LIMIT", "1g", "Limit of Grafana's container."),
    Variable("STOP_GRACE_PERIOD", "40s", "When `stop` kills what has not ended; above QUIRE_DRAIN_S, here 20."),
    Variable("TORCH_INDEX", "", "For builds: one more package index for torch, such as that of its CPU builds."),
    Variable("PIP_INDEX_URL", "", "For builds: the package index, if it is not the public one."),
    Variable("PIP_EXTRA_INDEX_URL", "", "For builds: one more package index."),
    Variable("PYTHON_IMAGE", "python:3.11.15-slim-bookworm", "For builds: the image below gateway and worker."),
    Variable("REDIS_IMAGE", "redis:8.8.2", "For builds: the image below Redis."),
    Variable("PROMETHEUS_IMAGE", "prom/prometheus:v3.13.2", "For builds: the image below Prometheus."),
    Variable("GRAFANA_IMAGE", "grafana/grafana:12.4.3", "The image of Grafana."),
    Variable("REDIS_EXPORTER_IMAGE", "oliver006/redis_exporter:v1.66.0-alpine", "The image that reads Redis."),
)
