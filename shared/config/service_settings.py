"""Settings that several processes have: each is declared once, and a process's settings inherit it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from quire.shared.config.settings import option
from quire.shared.redis.url import DEFAULT_REDIS_URL, REDIS_URL_HELP
from quire.shared.telemetry.tracing import OTLP_ENDPOINT_HELP


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of `quire serve`, of a gateway and of a worker."""

    model: str = option(
        "models/demo",
        help="Folder of the checkpoint, a GGUF file, or a Hugging Face name, with the quantisation of GGUF files after "
        "a colon; the default is the model that comes with Quire. A gateway reads only the tokenizer and the "
        "configuration.",
        metavar="MODEL",
        positional=True,
    )
    served_model_name: str = option(
        "", metavar="NAME", help="Name that clients use; by default that of the folder, the file or Hugging Face."
    )
    model_aliases: str = option(
        "",
        metavar="NAMES",
        help="Other names that clients may use for the model, separated by commas. Workers register them for gateways "
        "that find their models in Redis (--discover-models).",
    )
    log_level: str = option(
        "info", choices=("debug", "info", "warning", "error"), help="Least severe level that is logged.", last=True
    )
    log_format: str = option(
        "text",
        choices=("text", "json"),
        help="Format of the log: lines for people, or one JSON object per line.",
        last=True,
    )


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(CommonSettings):
    """Settings of each process that serves requests: gateways and workers."""

    redis_url: str = option(DEFAULT_REDIS_URL, help=REDIS_URL_HELP, metavar="URL", secret=True)
    internal_host: str = option(
        "127.0.0.1",
        metavar="HOST",
        help="Address of the internal endpoints, which are for operators and not for clients: /metrics, /health and, "
        "in a worker, /debug/blocks.",
        last=True,
    )
    internal_port: int = option(
        0,
        minimum=0,
        maximum=65535,
        metavar="PORT",
        help="Port of the internal endpoints (/metrics, /health); 0 picks a free one, which the log names. In "
        "`quire serve` the first worker has this port, the next workers the ports after it, and the gateways the last.",
        last=True,
    )
    otlp_endpoint: str = option("", metavar="URL", help=OTLP_ENDPOINT_HELP, last=True)


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """The address for clients: of a gateway, and of `quire serve`."""

    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 is every interface.")
    port: int = option(8000, minimum=0, maximum=65535, help="Port to listen on; 0 picks a free one.")


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The device of a model: of a worker, and of `quire serve`."""

    device: str = option("auto", choices=("auto", "cpu", "cuda"), help="Device that runs the model.")
    dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="Type of weights and KV cache; auto is bfloat16 where the device has it, else float16 or (CPU) float32.",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
