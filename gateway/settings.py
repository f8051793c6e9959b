"""The settings of a gateway process."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.model.naming import served_name
from quire.shared.redis.url import REDIS_URL_HELP
from quire.shared.settings import option
from quire.shared.telemetry.tracing import OTLP_ENDPOINT_HELP


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """One gateway. It keeps no state of its own: any number of them may serve the same Redis."""

    model: str = option(
        "models/demo",
        help="Folder of the checkpoint, or its Hugging Face name; only tokenizer and configuration are read.",
        metavar="MODEL",
        positional=True,
    )
    served_model_name: str = option("", help="Name that clients use; by default the folder's or the Hugging Face name.")
    generation_config: str = option(
        "auto",
        choices=("auto", "none"),
        help="Where the defaults of temperature, top_p, top_k, min_p and repetition_penalty come from: auto reads the "
        "model's generation_config.json, none takes those of the OpenAI API.",
    )
    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 is every interface.")
    port: int = option(8000, minimum=0, maximum=65535, help="Port to listen on; 0 takes a free one.")
    reuse_port: bool = option(False, help="Let several gateways of this machine share the port (SO_REUSEPORT).")
    redis_url: str = option("redis://127.0.0.1:6379/0", help=REDIS_URL_HELP, metavar="URL", secret=True)
    gateway_id: str = option("", help="Name of this gateway in the queue, unique; by default drawn at start.")
    max_model_len: int = option(
        0, minimum=0, maximum=2_000_000, help="Longest context in tokens; 0 is what model and workers allow."
    )
    max_body_bytes: int = option(
        4 * 1024 * 1024, minimum=1024, maximum=64 * 1024 * 1024, help="Largest request body in bytes."
    )
    max_queued_requests: int = option(
        1024, minimum=1, maximum=10_000_000, help="Requests that may wait in Redis before new ones get 429."
    )
    max_queued_tokens: int = option(
        2_000_000, minimum=1, maximum=10**12, help="Tokens (prompts and what they ask for) that may wait in Redis."
    )
    max_n: int = option(
        16, minimum=1, maximum=128, help="Largest `n`, `best_of` or `beam_width`: sequences of one prompt."
    )
    max_prompts: int = option(64, minimum=1, maximum=1024, help="Longest list of prompts in one call.")
    max_choices: int = option(
        128,
        minimum=1,
        maximum=4096,
        help="Largest number of sequences in one call: prompts times `n`, `best_of` or `beam_width`.",
    )
    default_timeout_s: float = option(
        0.0, minimum=0, maximum=86400, help="Deadline of calls that name none, in seconds; 0 is none."
    )
    max_timeout_s: float = option(
        3600.0, minimum=0.001, maximum=86400, help="Longest deadline that a call may name, in seconds."
    )
    body_timeout_s: float = option(20.0, minimum=0.1, maximum=3600, help="Time that a client has to send its body.")
    write_timeout_s: float = option(
        60.0, minimum=0.1, maximum=3600, help="Time that a client may stall before its stream is cut."
    )
    keepalive_s: float = option(
        15.0, minimum=0.1, maximum=3600, help="A stream that is silent for so long gets an SSE comment."
    )
    http_keepalive_s: float = option(75.0, minimum=1, maximum=3600, help="An idle connection is closed after so long.")
    drain_s: float = option(
        20.0, minimum=0, maximum=86400, help="Time that open streams get when told to stop; 2 in `quire serve`."
    )
    internal_host: str = option(
        "127.0.0.1", help="Address of /metrics, /health and (worker) /debug/blocks: for operators, not for clients."
    )
    internal_port: int = option(
        0,
        minimum=0,
        maximum=65535,
        help="Their port; 0 takes a free one, which the log names. In `quire serve` the first worker has it, then come "
        "the other workers, then the gateway.",
    )
    tokenizer_threads: int = option(2, minimum=1, maximum=64, help="Threads that render and tokenize prompts.")
    engine_view: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="Whether /engine shows workers at work: counts and ids, never text; auto is only where --host is this "
        "machine.",
    )
    log_level: str = option("info", choices=("debug", "info", "warning", "error"), help="What is logged.")
    log_format: str = option(
        "text", choices=("text", "json"), help="How it is logged: lines for people, or one JSON object per line."
    )
    log_prompts: bool = option(
        False, help="Whether the log has the beginning of every prompt, and the texts of unexpected exceptions."
    )
    otlp_endpoint: str = option("", metavar="URL", help=OTLP_ENDPOINT_HELP)

    @property
    def name(self) -> str:
        """The model's name for clients, which is also the lane. Raises InvalidModelName."""
        return served_name(self.model, self.served_model_name)
