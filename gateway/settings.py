"""The settings of a gateway process."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.model.naming import served_name
from quire.shared.service_settings import ListenSettings, ServiceSettings
from quire.shared.settings import option


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ListenSettings, ServiceSettings):
    """One gateway. A gateway keeps no state of its own: any number of gateways may serve the same Redis."""

    generation_config: str = option(
        "auto",
        choices=("auto", "none"),
        help="Source of the defaults of temperature, top_p, top_k, min_p and repetition_penalty: auto reads the "
        "model's generation_config.json, none takes the defaults of the OpenAI API.",
    )
    reuse_port: bool = option(False, help="Let several gateways on this machine share the port (SO_REUSEPORT).")
    gateway_id: str = option(
        "", help="Unique name of this gateway in the queue; by default a random one, drawn at start."
    )
    max_model_len: int = option(
        0,
        minimum=0,
        maximum=2_000_000,
        help="Longest context in tokens; 0 is the longest that the model and the workers allow.",
    )
    max_body_bytes: int = option(
        4 * 1024 * 1024, minimum=1024, maximum=64 * 1024 * 1024, help="Largest request body in bytes."
    )
    max_queued_requests: int = option(
        1024,
        minimum=1,
        maximum=10_000_000,
        help="Requests that may wait in Redis; beyond this, requests get 429.",
    )
    max_queued_tokens: int = option(
        2_000_000,
        minimum=1,
        maximum=10**12,
        help="Tokens (prompts and requested output) that may wait in Redis; beyond this, requests get 429.",
    )
    max_n: int = option(
        16, minimum=1, maximum=128, help="Largest `n`, `best_of` or `beam_width`: number of sequences per prompt."
    )
    max_prompts: int = option(64, minimum=1, maximum=1024, help="Largest number of prompts in one call.")
    max_choices: int = option(
        128,
        minimum=1,
        maximum=4096,
        help="Largest number of sequences in one call: prompts times `n`, `best_of` or `beam_width`.",
    )
    default_timeout_s: float = option(
        0.0, minimum=0, maximum=86400, help="Deadline of calls that name no deadline, in seconds; 0 is no deadline."
    )
    max_timeout_s: float = option(
        3600.0, minimum=0.001, maximum=86400, help="Longest deadline in seconds that a call may set."
    )
    body_timeout_s: float = option(
        20.0, minimum=0.1, maximum=3600, help="Seconds that a client has to send the body of a request."
    )
    body_timeout_s: float = option(
        20.0, minimum=0.1, maximum=3600, help="Seconds that a client has to send the body of a request."
    )
    write_timeout_s: float = option(
        60.0, minimum=0.1, maximum=3600, help="Seconds that a client may stop reading before its stream is cut."
    )
    keepalive_s: float = option(
        15.0,
        minimum=0.1,
        maximum=3600,
        help="Silence on a stream, in seconds, after which the gateway sends an SSE comment.",
    )
    http_keepalive_s: float = option(
        75.0, minimum=1, maximum=3600, help="Seconds after which an idle connection is closed."
    )
    drain_s: float = option(
        20.0,
        minimum=0,
        maximum=86400,
        help="Seconds that open streams may go on after the gateway is told to stop; 2 in `quire serve`.",
    )
    engine_view: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="Serve the page /engine, which shows workers at work: counts and ids, never text. auto serves the page "
        "only if --host is this machine.",
    )
    log_prompts: bool = option(False, help="Log the beginning of each prompt, and the texts of unexpected exceptions.")

    @property
    def name(self) -> str:
        """The model's name in the API, which is also the name of its lane. Raises InvalidModelName."""
        return served_name(self.model, self.served_model_name)
