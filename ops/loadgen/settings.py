"""The settings of `quire bench`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.config.settings import option


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The load for one server or two, the limits of a good answer, and the files for the result."""

    url: str = option(
        "http://127.0.0.1:8000",
        positional=True,
        variable="QUIRE_BENCH_URL",
        metavar="URL",
        help="URL of the server, with or without /v1.",
    )
    against: str = option(
        "",
        variable="QUIRE_BENCH_AGAINST",
        metavar="URL",
        help="URL of a second server, to compare two servers with equal requests; blocks of requests alternate.",
    )
    model: str = option(
        "", variable="QUIRE_BENCH_MODEL", metavar="NAME", help="Model to ask; by default the first model of the server."
    )
    against_model: str = option(
        "",
        variable="QUIRE_BENCH_AGAINST_MODEL",
        metavar="NAME",
        help="Model of the second server; by default the one of the same name, or else its first model.",
    )
    endpoint: str = option(
        "completions",
        variable="QUIRE_BENCH_ENDPOINT",
        choices=("completions", "chat"),
        help="API to call: /v1/completions or /v1/chat/completions.",
    )
    shape: str = option(
        "sharegpt",
        variable="QUIRE_BENCH_SHAPE",
        choices=("sharegpt", "alpaca", "azure-chat", "azure-code", "prefix", "fixed"),
        help="Lengths of prompts and answers: those of a published trace, prompts with a shared prefix, or fixed.",
    )
    input_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_INPUT_TOKENS",
        metavar="N",
        help="Tokens per prompt, with the shapes fixed (default 128) and prefix (default 32, without the prefix).",
    )
    output_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_OUTPUT_TOKENS",
        metavar="N",
        help="Tokens per answer, with the shapes fixed and prefix (default 64).",
    )
    prefix_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_PREFIX_TOKENS",
        metavar="N",
        help="Tokens of the prefix that all prompts share, with the shape prefix (default 512).",
    )
    requests: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_REQUESTS",
        metavar="N",
        help="Number of requests to each server; 100 by default.",
    )
    duration_s: float | None = option(
        None,
        minimum=0.1,
        maximum=86_400,
        variable="QUIRE_BENCH_DURATION_S",
        metavar="SECONDS",
        help="Seconds during which requests are sent to each server, instead of a number of requests.",
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
        help="Open loop: requests sent per second, whether or not the server keeps up; inf sends all at once.",
    )
    burstiness: float | None = option(
        None,
        minimum=0.001,
        maximum=1000,
        variable="QUIRE_BENCH_BURSTINESS",
        metavar="K",
        help="Shape parameter of the gamma-distributed gaps of an open loop; 1 (default) is Poisson, less is burstier.",
    )
    seed: int = option(
        0, minimum=0, variable="QUIRE_BENCH_SEED", help="Seed of the load: an equal seed sends equal requests."
    )
    warmup: int = option(
        2,
        minimum=0,
        maximum=10_000,
        variable="QUIRE_BENCH_WARMUP",
        metavar="N",
        help="Requests to each server before the measurement; they are not counted.",
    )
    rounds: int = option(
        4,
        minimum=1,
        maximum=1000,
        variable="QUIRE_BENCH_ROUNDS",
        metavar="N",
        help="Number of blocks of a run with two servers. The server that goes first alternates.",
    )
    slo: str = option(
        "",
        variable="QUIRE_BENCH_SLO",
        metavar="LIMITS",
        help="Latency limits of a good answer, such as ttft=500ms,tpot=50ms; also itl (the longest gap) and e2e.",
    )
    prompts: str = option(
        "auto",
        variable="QUIRE_BENCH_PROMPTS",
        choices=("auto", "ids", "text"),
        help="Prompts of random token ids (completions only) or of words; auto sends ids if the server accepts them.",
    )
    tokenizer: str = option(
        "",
        variable="QUIRE_BENCH_TOKENIZER",
        metavar="PATH",
        help="The model's folder or tokenizer.json, to make prompts of words with an exact number of tokens. If not "
        "set, the number is estimated from the server's own count.",
    )
    context: int | None = option(
        None,
        minimum=16,
        maximum=10_000_000,
        variable="QUIRE_BENCH_CONTEXT",
        metavar="N",
        help="Most tokens of prompt and answer together; by default as the server reports. Longer requests are cut.",
    )
    temperature: float = option(
        0.0, minimum=0, maximum=2, variable="QUIRE_BENCH_TEMPERATURE", help="Sampling temperature; 0 is greedy."
    )
    ignore_eos: bool = option(
        True,
        variable="QUIRE_BENCH_IGNORE_EOS",
        help="Request answers of exactly the given length; not every server accepts this parameter.",
    )
    timeout_s: float = option(
        600.0,
        minimum=0.1,
        maximum=86_400,
        variable="QUIRE_BENCH_TIMEOUT_S",
        metavar="SECONDS",
        help="Time limit of a request; a request that takes longer counts as failed.",
    )
    allow_errors: bool = option(False, variable="QUIRE_BENCH_ALLOW_ERRORS", help="Exit with 0 even if requests failed.")
    json: str = option("", variable="QUIRE_BENCH_JSON", metavar="FILE", help="File for the result as JSON.")
    html: str = option("", variable="QUIRE_BENCH_HTML", metavar="FILE", help="File for a report with plots.")
    save_requests: bool = option(
        False, variable="QUIRE_BENCH_SAVE_REQUESTS", help="Include every request and its times in the JSON."
    )
    api_key: str = option(
        "",
        variable="QUIRE_BENCH_API_KEY",
        metavar="KEY",
        secret=True,
        help="API key, sent as a bearer token; by default the value of OPENAI_API_KEY. Variables are safer than flags.",
    )
