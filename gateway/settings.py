"""The settings of a gateway process."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.model.naming import served_name
from quire.shared.service_settings import ListenSettings, ServiceSettings
from quire.shared.settings import option


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ListenSettings, ServiceSettings):
    """One gateway. A gateway keeps no state: any number of gateways may serve the same Redis."""

    generation_config: str = option(
        "auto",
        choices=("auto", "none"),
        help="Source of the defaults of temperature, top_p, top_k, min_p and repetition_penalty: auto reads the "
        "model's generation_config.json, none takes the defaults of the OpenAI API.",
    )
    reuse_port: bool = option(
        False, help="Allow several gateways of this machine to listen on the same port (SO_REUSEPORT)."
    )
    gateway_id: str = option("", help="Unique name of this gateway in Redis; by default a random name per start.")
    max_model_len: int = option(
        0,
        minimum=0,
        maximum=2_000_000,
        help="Longest context in tokens; 0 for the largest that model and workers allow.",
    )
    max_body_bytes: int = option(
        4 * 1024 * 1024, minimum=1024, maximum=64 * 1024 * 1024, help="Largest request body in bytes."
    )
    max_queued_requests: int = option(
        1024,
        minimum=1,
        maximum=10_000_000,
        help="Largest number of requests waiting in the queue; further calls get status 429.",
    )
    max_queued_tokens: int = option(
        2_000_000,
        minimum=1,
        maximum=10**12,
        help="Largest number of tokens in the queue: prompts plus requested output of waiting requests.",
    )
    max_n: int = option(
        16, minimum=1, maximum=128, help="Largest `n`, `best_of` or `beam_width`: sequences per prompt."
    )
    max_prompts: int = option(64, minimum=1, maximum=1024, help="Largest number of prompts in one call.")
    max_choices: int = option(
        128,
        minimum=1,
        maximum=4096,
        help="Largest number of sequences in one call: prompts times `n`, `best_of` or `beam_width`.",
    )
    default_timeout_s: float = option(
        0.0, minimum=0, maximum=86400, help="Deadline in seconds of calls that do not set one; 0 for no deadline."
    )
    max_timeout_s: float = option(
        3600.0, minimum=0.001, maximum=86400, help="Longest deadline in seconds that a call may set."
    )
    body_timeout_s: float = option(
        20.0, minimum=0.1, maximum=3600, help="Seconds that a client has to send the body of a request."
    )
    write_timeout_s: float = option(
        60.0,
        minimum=0.1,
        maximum=3600,
        help="Seconds without progress after which the connection of a client that does not read is closed.",
    )
    keepalive_s: float = option(
        15.0, minimum=0.1, maximum=3600, help="Seconds of silence after which a stream gets an SSE comment."
    )
    http_keepalive_s: float = option(
        75.0, minimum=1, maximum=3600, help="Seconds after which an idle HTTP connection is closed."
    )
    drain_s: float = option(
        20.0,
        minimum=0,
        maximum=86400,
        help="Seconds that open streams get to finish when the gateway is told to stop; 2 in `quire serve`.",
    )
    tokenizer_threads: int = option(
        2, minimum=1, maximum=64, help="Number of threads that render and tokenize prompts."
    )
    engine_view: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="Serve /engine, which shows counts and ids of what workers run, never text; auto serves it only if --host "
        "is a loopback address.",
    )
    log_prompts: bool = option(
        False, help="Log the first 4,096 characters of each prompt, and the full texts of unexpected exceptions."
    )

    @property
    def name(self) -> str:
        """The model's name in the API; the lane of the model has the same name. Raises InvalidModelName."""
        return served_name(self.model, self.served_model_name)
