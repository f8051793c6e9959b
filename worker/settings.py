"""The settings of a worker process."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from quire.shared.redis.url import REDIS_URL_HELP
from quire.shared.settings import option
from quire.shared.telemetry.tracing import OTLP_ENDPOINT_HELP


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One model replica. `0` and `auto` mean: measured or derived at start, and said in the log."""

    model: str = option(
        "models/demo", help="Folder of the checkpoint, or its Hugging Face name.", metavar="MODEL", positional=True
    )
    served_model_name: str = option("", help="Name that clients use; by default the folder's or the Hugging Face name.")
    redis_url: str = option("redis://127.0.0.1:6379/0", help=REDIS_URL_HELP, metavar="URL", secret=True)
    model_impl: str = option(
        "auto",
        choices=("auto", "quire", "transformers"),
        help="What computes the model; auto is Quire's own decoder where that knows its kind, else Transformers.",
    )
    device: str = option("auto", choices=("auto", "cpu", "cuda"), help="Where the model runs.")
    dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="Type of weights and KV cache; auto is bfloat16 where the device has it, else float16 or (CPU) float32.",
    )
    kv_cache_dtype: str = option(
        "auto",
        choices=("auto", "fp8"),
        help="Type of the KV cache; auto is --dtype, fp8 (e4m3, CUDA) is half as large.",
    )
    tensor_parallel_size: int = option(
        1,
        minimum=1,
        maximum=64,
        help="GPUs of this machine that share the model, each with a part of every layer; on a CPU processes.",
    )
    max_model_len: int = option(0, minimum=0, help="Longest context in tokens; 0 is the model's own.")
    block_size: int = option(16, choices=(8, 16, 32, 64, 128), help="Tokens per block of the KV cache.")
    gpu_memory_utilization: float = option(
        0.9, minimum=0.05, maximum=0.99, help="Share of a GPU's memory for weights, a step and the KV cache."
    )
    kv_cache_gb: float = option(0.0, minimum=0, help="Memory for the KV cache in GiB, on each GPU; 0 chooses.")
    num_blocks: int = option(0, minimum=0, help="Blocks of the KV cache, instead of --kv-cache-gb.")
    swap_gb: float = option(
        1.0,
        minimum=0,
        maximum=65536,
        help="Host memory in GiB for blocks that are swapped out, at most; less where little is free, 0 for none.",
    )
    prefix_caching: bool = option(True, help="Whether requests share the blocks of beginnings that are the same.")
    pinned_prefixes: str = option(
        "", metavar="FILE", help="TOML file with beginnings that are computed at start and stay in the cache for ever."
    )
    preemption: str = option(
        "auto",
        choices=("auto", "recompute", "swap"),
        help="How sequences come back that had to give way; auto swaps requests of several sequences.",
    )
    max_num_seqs: int = option(
        0, minimum=0, maximum=4096, help="Sequences that run at once; 0 is 64 on a CPU, 256 on a GPU."
    )
    max_num_batched_tokens: int = option(
        0,
        minimum=0,
        maximum=1_048_576,
        help="Token budget of one step: decodes first, then chunks of prompts; 0 is 256 on a CPU, 8192 on a GPU.",
    )
    max_prefill_tokens: int = option(
        0,
        minimum=0,
        maximum=1_048_576,
        help="Prompt tokens of a step in which others decode, at most; 0 is what the token budget leaves.",
    )
    itl_target_ms: float = option(
        0.0,
        minimum=0,
        maximum=60_000,
        help="Time between two tokens of a stream that prompts beside it must keep to, learned from step to step; 0 is "
        "off.",
    )
    threads: int = option(0, minimum=0, maximum=1024, help="Threads that compute; 0 is one per core.")
    kernels: str = option(
        "auto", choices=("auto", "cpu", "triton", "reference"), help="Implementation of the operations."
    )
    cuda_graphs: bool = option(
        True,
        help="Whether steps on a GPU are replayed as graphs. They are captured before the worker is ready, for 15 s at "
        "most; what is left follows while nothing runs.",
    )
    batch_invariant: bool = option(
        False, help="Same bits for a request alone, in a batch, in chunks or resumed. On a GPU that costs speed."
    )
    worker_id: str = option("", help="Stable name of this worker in the queue; by default host name and slot 0.")
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
    drain_s: float = option(
        2.0,
        minimum=0,
        maximum=86400,
        help="Time that running requests get when told to stop; then other workers go on with them.",
    )
    lease_s: float = option(
        3.0, minimum=0.5, maximum=3600, help="A worker that is silent for so long loses its requests to others."
    )
    beat_s: float = option(
        1.0, minimum=0.05, maximum=600, help="How often a worker renews its leases; below --lease-s."
    )
    watchdog_s: float = option(
        30.0, minimum=0, maximum=86400, help="A worker whose engine stands still for so long ends itself; 0 is never."
    )
    orphan_s: float = option(
        30.0,
        minimum=0,
        maximum=86400,
        help="A running request whose gateway is gone is cancelled after so long, unless a client comes back for it.",
    )
    log_level: str = option("info", choices=("debug", "info", "warning", "error"), help="What is logged.")
    log_format: str = option(
        "text", choices=("text", "json"), help="How it is logged: lines for people, or one JSON object per line."
    )
    otlp_endpoint: str = option("", metavar="URL", help=OTLP_ENDPOINT_HELP)

    @property
    def name(self) -> str:
        return self.worker_id or f"{socket.gethostname()}-0"
