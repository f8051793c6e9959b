"""The settings of a worker process."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from shared.settings import option


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One model replica. `0` and `auto` mean: measured or derived at start, and said in the log."""

    model: str = option(
        "models/demo", help="Folder of the checkpoint, or its Hugging Face name.", metavar="MODEL", positional=True
    )
    served_model_name: str = option("", help="Name that clients use; by default the folder's or the Hugging Face name.")
    redis_url: str = option("redis://127.0.0.1:6379/0", help="Where the queue is.", metavar="URL", secret=True)
    device: str = option("auto", choices=("auto", "cpu", "cuda"), help="Where the model runs.")
    dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="Type of weights and KV cache; auto is bfloat16 where the processor has it, else float32.",
    )
    max_model_len: int = option(0, minimum=0, help="Longest context in tokens; 0 is the model's own.")
    block_size: int = option(16, choices=(8, 16, 32, 64, 128), help="Tokens per block of the KV cache.")
    kv_cache_gb: float = option(0.0, minimum=0, help="Memory for the KV cache in GiB; 0 chooses.")
    num_blocks: int = option(0, minimum=0, help="Blocks of the KV cache, instead of --kv-cache-gb.")
    max_num_seqs: int = option(64, minimum=1, maximum=4096, help="Sequences that run at once.")
    max_num_batched_tokens: int = option(
        256, minimum=1, maximum=1_048_576, help="Token budget of one step: decodes first, then chunks of prompts."
    )
    threads: int = option(0, minimum=0, maximum=1024, help="Threads that compute; 0 is one per core.")
    kernels: str = option("auto", choices=("auto", "cpu", "reference"), help="Implementation of the operations.")
    worker_id: str = option("", help="Stable name of this worker in the queue; by default host name and slot 0.")
    drain_s: float = option(2.0, minimum=0, maximum=86400, help="Time that running requests get when told to stop.")
    log_level: str = option("info", choices=("debug", "info", "warning", "error"), help="What is logged.")

    @property
    def name(self) -> str:
        return self.worker_id or f"{socket.gethostname()}-0"
