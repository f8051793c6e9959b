"""The settings of a gateway process."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.shared.config.service_settings import ListenSettings, ServiceSettings, is_loopback
from quire.shared.config.settings import option
from quire.shared.model.naming import read_aliases, served_name
from quire.shared.process.errors import StartError
from quire.shared.protocol.keys import MAX_RETENTION_S, PARKING_S
from quire.shared.protocol.sampling_params import MAX_OUTPUT_TOKENS, PARAMETERS

# The names of the formats of tool calls and of reasoning. Settings are read by every command of Quire, and the formats
# themselves import grammars, which take a tenth of a second.
TOOL_CALL_FORMATS = (
    "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "mistral_args", "deepseek", "deepseek_v31",
    "kimi_k2", "glm", "minimax_m2", "gemma4", "cohere", "granite", "harmony", "json",
)  # fmt: skip
REASONING_FORMATS = ("think", "mistral", "seed", "cohere", "gemma")


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """Where a gateway stores files, how many, and how many lines of batches it runs."""

    files_dir: str = option(
        "",
        metavar="FOLDER",
        help="Folder for files and batches (/v1/files, /v1/batches), which all gateways of a Redis share; in `quire "
        "serve` a folder in its state folder. By default there are none.",
    )
    files_bucket: str = option(
        "",
        metavar="URL",
        help="Bucket for files and batches instead of a folder: s3://BUCKET/PREFIX. Credentials and region come from "
        "the environment, as for AWS' own programs.",
    )
    files_bucket_endpoint: str = option(
        "", metavar="URL", help="Endpoint of the bucket, such as that of a MinIO; by default that of AWS."
    )
    max_file_bytes: int = option(
        2**30, minimum=1024, maximum=2**36, help="Largest file that a client may upload, in bytes."
    )
    max_stored_file_bytes: int = option(
        2**36, minimum=0, maximum=2**60, help="Largest size of all files together, in bytes; 0 for no limit."
    )
    max_key_file_bytes: int = option(
        -1,
        minimum=-1,
        maximum=2**60,
        help="Largest size of the files of one API key, in bytes; 0 for no limit, -1 for a quarter of "
        "--max-stored-file-bytes.",
    )
    file_retention_s: int = option(
        30 * 86_400,
        minimum=0,
        maximum=10 * 366 * 86_400,
        help="Seconds after which a file without `expires_after` is deleted; 0 for never.",
    )
    max_batches: int = option(
        64, minimum=1, maximum=10_000, help="Largest number of batches of one API key that have not ended."
    )
    max_batch_lines: int = option(
        50_000, minimum=1, maximum=5_000_000, help="Largest number of lines in the input of a batch."
    )
    batch_lines_in_flight: int = option(
        128,
        minimum=1,
        maximum=4096,
        help="Largest number of lines of batches that a gateway has in the queue of a model or at its workers.",
    )

    @property
    def key_file_bytes(self) -> int:
        """The largest size of the files of one API key; 0 for no limit."""
        return self.max_stored_file_bytes // 4 if self.max_key_file_bytes < 0 else self.max_key_file_bytes

    @property
    def has_files(self) -> bool:
        """True if files can be stored. Raises StartError for two settings that contradict."""
        if self.files_dir and self.files_bucket:
            raise StartError("--files-dir and --files-bucket are both given; give one of them")
        return bool(self.files_dir or self.files_bucket)


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The limits of the images in calls, and of their checks."""

    max_images: int = option(100, minimum=1, maximum=1000, help="Largest number of images in one call.")
    max_image_bytes: int = option(
        20 * 1024 * 1024,
        minimum=1024,
        maximum=64 * 1024 * 1024,
        help="Largest file of an image in bytes. A call with images in base64 must fit --max-body-bytes too.",
    )
    max_image_pixels: int = option(
        25_000_000, minimum=1024, maximum=2**28, help="Largest number of pixels of an image: width times height."
    )
    image_hosts: str = option(
        "",
        metavar="HOSTS",
        help="Hosts from which the gateway fetches images that calls name by http(s) addresses, separated by commas: "
        "images.example.com, *.example.com, images.example.com:8443. Their addresses must be public. By default none.",
    )
    image_processes: int = option(
        2,
        minimum=1,
        maximum=64,
        help="Number of processes that check images, each with 17 MB; the check of an image takes up to 24 bytes per "
        "pixel more.",
    )


# --max-body-bytes by default, without an image.
BODY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ImageSettings, FileSettings, ListenSettings, ServiceSettings):
    """One gateway. A gateway keeps no state: any number of gateways may serve the same Redis."""

    discover_models: bool = option(
        False,
        help="Serve every model that a worker registers in Redis, without its folder; MODEL is not read. A new model "
        "needs no restart.",
    )
    max_models: int = option(
        32, minimum=1, maximum=256, help="Largest number of models that a gateway with --discover-models serves."
    )
    no_worker_timeout_s: float = option(
        120.0,
        minimum=1,
        maximum=86400,
        help="Seconds for which a call waits if no worker of its model is alive; then it gets status 503.",
    )
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
        0,
        minimum=0,
        maximum=64 * 1024 * 1024,
        help="Largest request body in bytes; 0 for 4 MiB, and with images for the base64 of one of --max-image-bytes "
        "more. The images of a call that are not in its body may have as many bytes.",
    )
    max_bodies_bytes: int = option(
        256 * 1024 * 1024,
        minimum=1024 * 1024,
        maximum=2**40,
        help="Largest size in bytes of all request bodies that are read and parsed at the same time; further ones wait "
        "for --body-timeout-s, and then get status 503. Memory for about three times this size is needed.",
    )
    max_queued_requests: int = option(
        1024,
        minimum=1,
        maximum=10_000_000,
        help="Largest number of requests waiting in the queue; further calls get status 429. While several tenants "
        "wait, one that has less than its part may queue up to twice this number.",
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
    max_embedding_inputs: int = option(
        2048,
        minimum=1,
        maximum=2048,
        help="Largest number of inputs in one embedding call, and of documents in one rerank or score call.",
    )
    score_tokens: str = option(
        "",
        metavar="TOKENS",
        help="Tokens whose logits after the prompt make a score (/v1/rerank, /v1/score): one, or two of which the "
        "second means yes, such as no,yes. By default those that the files of the model name.",
    )
    score_template: str = option(
        "",
        metavar="TEMPLATE",
        help="Prompts of scores: the file of a Jinja template for messages of the roles query and document; "
        "qwen3-reranker; or pair, the two texts as the tokenizer joins them. By default the chat template if it writes "
        "such messages, qwen3-reranker for models that name it or with --score-tokens no,yes, and else pair.",
    )
    max_choices: int = option(
        128,
        minimum=1,
        maximum=4096,
        help="Largest number of sequences in one call: prompts times `n`, `best_of` or `beam_width`.",
    )
    tool_call_format: str = option(
        "auto",
        choices=("auto", *TOOL_CALL_FORMATS),
        help="Form in which the model writes tool calls; auto takes it from the chat template, or json if the template "
        "does not know tools.",
    )
    enforce_tools: bool = option(
        True,
        help="Hold tool calls to a grammar. Without it the model writes calls as it can: for workers with --upstream, "
        "whose servers do not take such grammars. Strict tools, and calls that must be made, are held to it in any "
        "case.",
    )
    reasoning_format: str = option(
        "auto",
        choices=("auto", "none", *REASONING_FORMATS),
        help="Marks around the model's reasoning, which answers show apart; auto takes them from the chat template.",
    )
    thinking_token_budget: int = option(
        -1,
        minimum=-1,
        maximum=MAX_OUTPUT_TOKENS,
        help="Most tokens of reasoning in a chat; then the model has to end it and to answer. A call may set a lower "
        "number. -1 for any number.",
    )
    repetition_detection: str = option(
        "",
        metavar="SIZE:COUNT",
        help="End an answer that repeats a part of at most SIZE tokens COUNT times in a row, such as 64:8, unless the "
        "call sets repetition_detection. By default none is ended.",
    )
    control_tokens_in_messages: bool = option(
        False,
        help="Tokenize control tokens in the texts of messages as such: whoever writes a text can forge messages then.",
    )
    max_tools: int = option(128, minimum=1, maximum=1024, help="Largest number of tools in one call.")
    max_schema_bytes: int = option(
        65_536,
        minimum=256,
        maximum=524_288,
        help="Largest JSON schema of a tool or an answer, in characters; of an answer never more than 65,536.",
    )
    max_schema_depth: int = option(
        64,
        minimum=4,
        maximum=512,
        help="Deepest nesting of objects and arrays in a JSON schema of a tool or an answer.",
    )
    response_retention_s: int = option(
        86_400,
        minimum=1,
        maximum=MAX_RETENTION_S,
        help="Seconds for which a stored response (/v1/responses) can be read after its end, unless --max-stored-bytes "
        "is reached.",
    )
    max_stored_bytes: int = option(
        256 * 1024 * 1024,
        minimum=0,
        maximum=2**50,
        help="Memory of Redis for the stored, background and parked calls of a model, in bytes. Beyond it, responses "
        "that ended more than ten minutes ago go, the oldest of the API key with the most bytes first; if that is not "
        "enough, a call gets status 429. 0 for no limit.",
    )
    max_key_share: float = option(
        0.25,
        minimum=0.001,
        maximum=1,
        help="Largest share of --max-stored-bytes and of --max-parked-requests that the calls of one API key may take.",
    )
    parking_retention_s: int = option(
        PARKING_S,
        minimum=1,
        maximum=MAX_RETENTION_S,
        help="Seconds for which a call may be parked; then it ends as if its deadline had passed.",
    )
    max_parked_requests: int = option(
        10_000,
        minimum=0,
        maximum=10_000_000,
        help="Largest number of parked requests of a model; further ones get status 429. 0 for any number.",
    )
    park_on_budget: bool = option(
        False,
        help="Accept a call if the budgets of its API key suffice for a part of the answer, and park it when they are "
        "used up. Without this flag such a call gets status 402.",
    )
    max_conversation_bytes: int = option(
        4 * 1024 * 1024,
        minimum=1024,
        maximum=64 * 1024 * 1024,
        help="Largest conversation of a stored response in bytes of JSON, with those of all previous responses.",
    )
    default_timeout_s: float = option(
        0.0, minimum=0, maximum=86400, help="Deadline in seconds of calls that do not set one; 0 for no deadline."
    )
    deadline_admission: bool = option(
        True,
        help="Refuse calls whose deadline cannot be met, and drop waiting requests once theirs cannot be met any more. "
        "--no-deadline-admission runs them until their deadline.",
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
    shutdown_delay_s: float = option(
        3.0,
        minimum=0,
        maximum=3600,
        help="Seconds after SIGTERM for which the gateway still accepts calls while /readyz answers 503, so that load "
        "balancers notice; 0 in `quire serve`. Open streams get --drain-s after it.",
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
    tokenizer_info: bool = option(
        False,
        help="Serve /tokenizer_info, which shows clients the tokenizer's configuration and the chat template.",
    )
    engine_view: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="Serve /engine, which shows counts and ids of what workers run, never text, to every client; auto serves "
        "it only if --host is a loopback address and calls need no API key.",
    )
    cors_origins: str = option(
        "",
        metavar="ORIGINS",
        help="Origins whose web pages may call the API, separated by commas: https://app.example.com, or * for all. By "
        "default none (no CORS headers).",
    )
    user_hash_key: str = option(
        "",
        metavar="KEY",
        secret=True,
        help="Key of the hash by which logs name the `user` of a call. Gateways with the same key log the same hash; "
        "by default a random key per start.",
    )
    allow_anonymous: bool = option(
        False,
        help="Accept calls without an API key although --host is not a loopback address. Without this flag such a "
        "gateway refuses to start before there is a key or an admin key (docs/how-to/keys.md).",
    )
    require_keys: bool = option(
        False,
        help="Refuse calls without an API key also if --host is a loopback address, for example with a "
        "proxy in front of it.",
    )
    prefix_cache_scope: str = option(
        "organisation",
        choices=("organisation", "project", "key", "all"),
        help="Calls that share the prefix cache: those of an organisation, a project or an API key, or all calls. "
        "`cached_tokens` and the time to the first token tell a client whether another one of its scope sent the same "
        "beginning. Calls without a key are one scope; pinned prefixes are shared by all.",
    )
    prefix_affinity_ms: int = option(
        20,
        minimum=0,
        maximum=10_000,
        help="Milliseconds for which a request is left to the worker that holds a prefix of its prompt; 0 for never.",
    )
    prices: str = option(
        "",
        metavar="PRICES",
        repeatable=True,
        help="Prices of models for budgets in money, as MODEL=INPUT:OUTPUT for a million tokens, separated by commas: "
        "qwen=0.25:1.25.",
    )
    admin_key: str = option(
        "",
        metavar="KEY",
        secret=True,
        help="Key of the admin API (/admin/adapters, /admin/keys), at least 16 characters, which clients send as a "
        "bearer token. By default the admin API is off.",
    )
    admin_key_file: str = option("", metavar="FILE", help="File with the key of the admin API, instead of --admin-key.")
    log_prompts: bool = option(
        False, help="Log the first 4,096 characters of each prompt, and the full texts of unexpected exceptions."
    )

    @property
    def is_open(self) -> bool:
        """True if calls without an API key are accepted. Raises StartError for two settings that contradict."""
        if self.allow_anonymous and self.require_keys:
            raise StartError("--allow-anonymous and --require-keys are both given; give one of them")
        return self.allow_anonymous or (is_loopback(self.host) and not self.require_keys)

    def with_body_bytes(self, *, takes_images: bool) -> GatewaySettings:
        """Return the settings with the value of `max_body_bytes` that its default stands for."""
        image = math.ceil(self.max_image_bytes / 3) * 4 if takes_images else 0
        return replace(self, max_body_bytes=self.max_body_bytes or BODY_BYTES + image)

    @property
    def max_key_stored_bytes(self) -> int:
        """Largest number of bytes of one API key; 0 for no limit."""
        return math.ceil(self.max_key_share * self.max_stored_bytes)

    @property
    def max_key_parked_requests(self) -> int:
        """Largest number of parked requests of one API key; 0 for any number."""
        return math.ceil(self.max_key_share * self.max_parked_requests)

    @property
    def name(self) -> str:
        """The model's name in the API; the lane of the model has the same name. Raises InvalidModelName."""
        return served_name(self.model, self.served_model_name)

    @property
    def repetition(self) -> tuple[int, ...]:
        """`repetition_detection` as requests have it. Raises StartError."""
        if not self.repetition_detection:
            return ()
        size, _, count = self.repetition_detection.partition(":")
        try:
            given = {"max_pattern_size": int(size), "min_count": int(count)}
            limits: tuple[int, ...] = PARAMETERS["repetition_detection"].read("--repetition-detection", given)
            return limits
        except ValueError as error:
            raise StartError(
                f"--repetition-detection is {self.repetition_detection!r}; it must be like 64:8, for a part of at most "
                f"64 tokens that comes 8 times in a row ({error})"
            ) from None

    @property
    def score_texts(self) -> tuple[str, ...]:
        """The texts of `score_tokens`. Raises StartError."""
        texts = tuple(self.score_tokens.split(",")) if self.score_tokens else ()
        if len(texts) > 2 or not all(texts):
            raise StartError(f"--score-tokens is {self.score_tokens!r}; it must be one token, or two such as no,yes")
        return texts

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the model. Raises InvalidModelName."""
        return read_aliases(self.model_aliases, self.name)
