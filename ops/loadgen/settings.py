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
        help="The server, with or without /v1.",
    )
    against: str = option(
        "",
        variable="QUIRE_BENCH_AGAINST",
        metavar="URL",
        help="Another server that gets the same requests in the same run, block by block in turn.",
    )
    model: str = option(
        "", variable="QUIRE_BENCH_MODEL", metavar="NAME", help="Model to ask; by default the first that the server has."
    )
    against_model: str = option(
        "",
        variable="QUIRE_BENCH_AGAINST_MODEL",
        metavar="NAME",
        help="Model of the other server; by default the one of the same name, else its first.",
    )
    endpoint: str = option(
        "completions",
        variable="QUIRE_BENCH_ENDPOINT",
        choices=("completions", "chat"),
        help="Which of the two APIs is called.",
    )
    shape: str = option(
        "sharegpt",
        variable="QUIRE_BENCH_SHAPE",
        choices=("sharegpt", "alpaca", "azure-chat", "azure-code", "prefix", "fixed"),
        help="Lengths of prompts and answers, as in these traces; prefix: prompts begin alike; fixed: all the same.",
    )
    input_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_INPUT_TOKENS",
        metavar="N",
        help="Length of a prompt: with fixed 128 by default, with prefix 32, behind the prefix.",
    )
    output_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_OUTPUT_TOKENS",
        metavar="N",
        help="Length of an answer, with fixed and prefix; 64 by default.",
    )
    prefix_tokens: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_PREFIX_TOKENS",
        metavar="N",
        help="Length of what all prompts share, with prefix; 512 by default.",
    )
    requests: int | None = option(
        None,
        minimum=1,
        maximum=1_000_000,
        variable="QUIRE_BENCH_REQUESTS",
        metavar="N",
        help="How many are sent, to each server; 100 by default.",
    )
    duration_s: float | None = option(
        None,
        minimum=0.1,
        maximum=86_400,
        variable="QUIRE_BENCH_DURATION_S",
        metavar="SECONDS",
        help="For how long requests are sent, to each server, instead of a number of them.",
    )
    concurrency: int | None = option(
        None,
        minimum=1,
        maximum=10_000,
        variable="QUIRE_BENCH_CONCURRENCY",
        metavar="N",
        help="Closed loop: so many requests are open at all times; 16 by default.",
    )
    rate: str = option(
        "",
        variable="QUIRE_BENCH_RATE",
        metavar="R",
        help="Open loop: so many requests per second arrive, whatever the server does; inf is all at once.",
    )
    burstiness: float | None = option(
        None,
        minimum=0.001,
        maximum=1000,
        variable="QUIRE_BENCH_BURSTINESS",
        metavar="K",
        help="Shape of the gamma-distributed gaps of an open loop: 1, the default, is Poisson, less comes in bursts.",
    )
    seed: int = option(0, minimum=0, variable="QUIRE_BENCH_SEED", help="The same seed sends the same requests again.")
    warmup: int = option(
        2, minimum=0, maximum=10_000, variable="QUIRE_BENCH_WARMUP", metavar="N", help="Requests before, not counted."
    )
    rounds: int = option(
        4,
        minimum=1,
        maximum=1000,
        variable="QUIRE_BENCH_ROUNDS",
        metavar="N",
        help="Blocks into which a run with two servers is cut; they go first in turn.",
    )
    slo: str = option(
        "",
        variable="QUIRE_BENCH_SLO",
        metavar="LIMITS",
        help="What a good answer keeps to, such as ttft=500ms,tpot=50ms; also itl (its longest gap) and e2e.",
    )
    prompts: str = option(
        "auto",
        variable="QUIRE_BENCH_PROMPTS",
        choices=("auto", "ids", "text"),
        help="Random token ids (completions only) or words; auto: ids where the server takes them.",
    )
    tokenizer: str = option(
        "",
        variable="QUIRE_BENCH_TOKENIZER",
        metavar="PATH",
        help="The model's folder or tokenizer.json, for words of exact length; otherwise the server's count is asked.",
    )
    context: int | None = option(
        None,
        minimum=16,
        maximum=10_000_000,
        variable="QUIRE_BENCH_CONTEXT",
        metavar="N",
        help="Longest prompt and answer together; by default what the server says. Longer lengths are cut.",
    )
    temperature: float = option(0.0, minimum=0, maximum=2, variable="QUIRE_BENCH_TEMPERATURE", help="0 is greedy.")
    ignore_eos: bool = option(
        True,
        variable="QUIRE_BENCH_IGNORE_EOS",
        help="Ask for answers of exactly the asked length; not every server takes the parameter.",
    )
    timeout_s: float = option(
        600.0,
        minimum=0.1,
        maximum=86_400,
        variable="QUIRE_BENCH_TIMEOUT_S",
        metavar="SECONDS",
        help="A request that takes longer is an error.",
    )
    allow_errors: bool = option(False, variable="QUIRE_BENCH_ALLOW_ERRORS", help="Exit with 0 even if requests failed.")
    json: str = option("", variable="QUIRE_BENCH_JSON", metavar="FILE", help="Write the result there as JSON.")
    html: str = option("", variable="QUIRE_BENCH_HTML", metavar="FILE", help="Write a report with plots there.")
    save_requests: bool = option(
        False, variable="QUIRE_BENCH_SAVE_REQUESTS", help="Put every request and its times into the JSON."
    )
    api_key: str = option(
        "",
        variable="QUIRE_BENCH_API_KEY",
        metavar="KEY",
        secret=True,
        help="Sent as a bearer token; better as a variable than as a flag. Else OPENAI_API_KEY, if that is set.",
    )
