"""The settings of `quire bench`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.settings import option


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Load for one server or two, what is measured, and where the result goes."""

    url: str = option(
        "http://127.0.0.1:8000",
        positional=True,
        variable="QUIRE_BENCH_URL",
        metavar="URL",
        help="Base URL of the server, with or without /v1.",
    )
    against: str = option(
        "",
        variable="QUIRE_BENCH_AGAINST",
        metavar="URL",
        help="Second server, which gets the same requests in the same run, block by block in turn.",
    )
    model: str = option(
        "", variable="QUIRE_BENCH_MODEL", metavar="NAME", help="Model to ask; by default the first one of the server."
    )
    against_model: str = option(
        "",
        variable="QUIRE_BENCH_AGAINST_MODEL",
        metavar="NAME",
        help="Model of the second server; by default the one of the same name, else its first one.",
    )
    endpoint: str = option(
        "completions",
        variable="QUIRE_BENCH_ENDPOINT",
        choices=("completions", "chat"),
        help="API to call: completions or chat.",
    )
    shape: str = option(
        "sharegpt",
        variable="QUIRE_BENCH_SHAPE",
        choices=("sharegpt", "alpaca", "azure-chat", "azure-code", "prefix", "fixed"),
        help="Distribution of the lengths of prompts and answers: those of a trace; prefix: prompts share a "
        "prefix; fixed: all lengths are equal.",
    )
    input_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_INPUT_TOKENS",
        metavar="N",
        help="Tokens per prompt: by default 128 with fixed, and with prefix 32 after the prefix.",
    )
    output_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_OUTPUT_TOKENS",
        metavar="N",
        help="Tokens per answer, with fixed and prefix; 64 by default.",
    )
    prefix_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_PREFIX_TOKENS",
        metavar="N",
        help="Tokens of the prefix that all prompts share, with prefix; 512 by default.",
    )
    requests: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_REQUESTS",
        metavar="N",
        help="Number of requests sent to each server; 100 by default.",
    )
    duration_s: float | None = option(
        None,
        minimum=0.1,
        maximum=86_400,
        variable="QUIRE_BENCH_DURATION_S",
        metavar="SECONDS",
        help="Seconds during which requests are sent to each server, instead of --requests.",
    )
    concurrency: int | None = option(
        None,
        minimum=1,
        maximum=10_000,
        variable="QUIRE_BENCH_CONCURRENCY",
        metavar="N",
        help="Closed loop: number of requests that are open at all times; 16 by default.",
    )
    rate: str = option(
        "",
        variable="QUIRE_BENCH_RATE",
        metavar="R",
        help="Open loop: requests per second that arrive, whatever the server does; inf is all at once.",
    )
    burstiness: float | None = option(
        None,
        minimum=0.001,
        maximum=1000,
        variable="QUIRE_BENCH_BURSTINESS",
        metavar="K",
        help="Shape of the gamma-distributed gaps of an open loop: 1, the default, is Poisson, less comes in bursts.",
    )
    seed: int = option(
        0, minimum=0, variable="QUIRE_BENCH_SEED", help="Seed of the load: the same seed sends the same requests."
    )
    warmup: int = option(
        2,
        minimum=0,
        maximum=10_000,
        variable="QUIRE_BENCH_WARMUP",
        metavar="N",
        help="Requests sent first to warm up; they are not measured.",
    )
    rounds: int = option(
        4,
        minimum=1,
        maximum=1000,
        variable="QUIRE_BENCH_ROUNDS",
        metavar="N",
        help="Blocks into which a run with two servers is cut; the servers take turns to go first.",
    )
    slo: str = option(
        "",
        variable="QUIRE_BENCH_SLO",
        metavar="LIMITS",
        help="Latency limits that a good answer meets, such as ttft=500ms,tpot=50ms; also itl (its longest gap) "
        "and e2e.",
    )
    prompts: str = option(
        "auto",
        variable="QUIRE_BENCH_PROMPTS",
        choices=("auto", "ids", "text"),
        help="Kind of prompts: random token ids (completions only) or words; auto is ids where the server takes them.",
    )
    tokenizer: str = option(
        "",
        variable="QUIRE_BENCH_TOKENIZER",
        metavar="PATH",
        help="Folder of the model or its tokenizer.json, for word prompts of exact length; by default the "
        "server's count is used.",
    )
    context: int | None = option(
        None,
        minimum=16,
        maximum=10_000_000,
        variable="QUIRE_BENCH_CONTEXT",
        metavar="N",
        help="Longest prompt and answer together, in tokens; by default what the server says. Longer requests are cut.",
    )
    temperature: float = option(
        0.0, minimum=0, maximum=2, variable="QUIRE_BENCH_TEMPERATURE", help="Sampling temperature; 0 is greedy."
    )
    ignore_eos: bool = option(
        True,
        variable="QUIRE_BENCH_IGNORE_EOS",
        help="Ask for answers of exactly the requested length (ignore_eos); not every server takes the parameter.",
    )
    timeout_s: float = option(
        600.0,
        minimum=0.1,
        maximum=86_400,
        variable="QUIRE_BENCH_TIMEOUT_S",
        metavar="SECONDS",
        help="Seconds after which a request counts as failed.",
    )
    allow_errors: bool = option(False, variable="QUIRE_BENCH_ALLOW_ERRORS", help="Exit with 0 even if requests failed.")
    json: str = option(
        "", variable="QUIRE_BENCH_JSON", metavar="FILE", help="File to which the result is written as JSON."
    )
    html: str = option(
        "", variable="QUIRE_BENCH_HTML", metavar="FILE", help="File to which a report with plots is written."
    )
    save_requests: bool = option(
        False, variable="QUIRE_BENCH_SAVE_REQUESTS", help="Put each request and its times into the JSON."
    )
    api_key: str = option(
        "",
        variable="QUIRE_BENCH_API_KEY",
        metavar="KEY",
        secret=True,
        help="API key, sent as a bearer token; give it as a variable rather than as a flag. By default OPENAI_API_KEY.",
    )
