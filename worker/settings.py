"""The settings of a worker process."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from quire.shared.config.service_settings import DeviceSettings, ServiceSettings
from quire.shared.config.settings import option
from quire.shared.protocol.keys import MAX_RETENTION_S

# Default of --snapshot-tokens: a multiple of every block size.
SNAPSHOT_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(DeviceSettings, ServiceSettings):
    """One model replica. For `0` and `auto` the worker measures or derives the value at start, and logs it."""

    model_impl: str = option(
        "auto",
        choices=("auto", "quire", "transformers"),
        help="Implementation of the model; auto is Quire's own decoder if it knows the architecture, else "
        "Transformers.",
    )
    quantization: str = option(
        "none",
        choices=("none", "int8", "int4", "fp8", "fp8-dynamic"),
        help="Quantise the weights of linear layers on load. int8 and int4, CPUs only: activations are rounded to 8 "
        "bits per token. fp8: e4m3 weights with a scale per output channel; activations are not rounded. fp8-dynamic, "
        "GPUs only: the same weights, and activations are rounded to e4m3 with a scale per token.",
    )
    kv_cache_dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16", "int8", "fp8"),
        help="Type of the KV cache; auto is that of --dtype, and bfloat16 if a CPU computes in float32 with weights of "
        "16 bits. fp8 (e4m3) and int8 (with a scale for each token and head; CPU only) need half the memory of "
        "bfloat16.",
    )
    lora: str = option(
        "",
        metavar="NAME=FOLDER",
        repeatable=True,
        help="LoRA adapter in the format of PEFT, served under this name; give the flag once per adapter, or separate "
        "adapters by commas. All workers of a model need the same adapters.",
    )
    lora_dir: str = option(
        "",
        metavar="FOLDER",
        help="Folder of adapters that /admin/adapters may load at run time; by default none. All workers of a model "
        "need the same folder.",
    )
    max_lora_rank: int = option(64, minimum=1, maximum=512, help="Largest rank of an adapter.")
    max_loras: int = option(64, minimum=1, maximum=1024, help="Largest number of adapters that are loaded at once.")
    max_lora_gb: float = option(
        16.0, minimum=0.001, maximum=100_000, help="Largest memory, in GiB, of the adapters that are loaded at once."
    )
    tensor_parallel_size: int = option(
        0,
        minimum=0,
        maximum=64,
        help="GPUs of this machine that share the model, each with a part of every layer; on a CPU, processes. 0 is 1, "
        "but on CPUs with several NUMA nodes one per node if the shape of the model allows it.",
    )
    max_model_len: int = option(0, minimum=0, help="Longest context in tokens; 0 is the model's own.")
    block_size: int = option(16, choices=(8, 16, 32, 64, 128), help="Tokens per block of the KV cache.")
    gpu_memory_utilization: float = option(
        0.9,
        minimum=0.05,
        maximum=0.99,
        help="Share of a GPU's memory for weights, a step and the KV cache.",
    )
    kv_cache_gb: float = option(
        0.0, minimum=0, help="Memory for the KV cache in GiB, on each GPU; 0 derives it from the device's memory."
    )
    num_blocks: int = option(0, minimum=0, help="Number of blocks of the KV cache, instead of --kv-cache-gb.")
    swap_gb: float = option(
        1.0,
        minimum=0,
        maximum=65536,
        help="Largest host memory in GiB for swapped-out blocks; less if little is free, 0 for no swapping.",
    )
    state_gb: float = option(
        0.0,
        minimum=0,
        maximum=65536,
        help="Memory in GiB for the recurrent states of models such as Mamba: those of running sequences and snapshots "
        "of the prefix cache; 0 is half of the memory for the KV cache.",
    )
    snapshot_tokens: int = option(
        SNAPSHOT_TOKENS,
        minimum=8,
        maximum=1_048_576,
        help="Tokens of a prompt between two snapshots of recurrent states for the prefix cache, a multiple of "
        "--block-size. One more is taken at the last full block.",
    )
    prefix_caching: bool = option(True, help="Prefix caching: reuse the KV blocks of identical prompt prefixes.")
    kv_host_gb: float = option(
        0.0,
        minimum=0,
        maximum=65536,
        help="Host memory in GiB for blocks that fall out of the prefix cache; for GPUs. 0 keeps none there, or only "
        "those on their way to --kv-spill-dir.",
    )
    kv_spill_dir: str = option(
        "",
        metavar="FOLDER",
        help="Folder on a local disk for blocks that fall out of the prefix cache; a restarted worker finds them. By "
        "default they are dropped.",
    )
    kv_spill_gb: float = option(
        10.0,
        minimum=0.001,
        maximum=1_048_576,
        help="Size in GiB of this worker's file in --kv-spill-dir, allocated at start.",
    )
    pinned_prefixes: str = option(
        "",
        metavar="FILE",
        help="TOML file with prompt prefixes that are computed at start and stay in the prefix cache.",
    )
    cache_pin_share: float = option(
        0.25,
        minimum=0,
        maximum=0.9,
        help="Largest share of the KV blocks that calls pin with `cache_control`; 0 pins none. Pinned blocks are "
        "evicted after all others, but before a request has to wait.",
    )
    cache_pin_key_share: float = option(
        0.5,
        minimum=0.01,
        maximum=1,
        help="Largest part of --cache-pin-share for the calls of one API key. All calls without a key count as one.",
    )
    preemption: str = option(
        "auto",
        choices=("auto", "recompute", "swap"),
        help="Method of preemption: recompute a preempted sequence, or swap its blocks; auto swaps requests of "
        "several sequences.",
    )
    max_num_seqs: int = option(
        0, minimum=0, maximum=4096, help="Largest number of sequences that run at once; 0 is 64 on a CPU, 256 on a GPU."
    )
    max_num_batched_tokens: int = option(
        0,
        minimum=0,
        maximum=1_048_576,
        help="Token budget of one step: decodes first, then chunks of prompts; 0 is 256 on a CPU, 8192 on a GPU, "
        "and more if an image needs it.",
    )
    max_prefill_tokens: int = option(
        0,
        minimum=0,
        maximum=1_048_576,
        help="Largest number of prompt tokens in a step that also decodes; 0 is what the token budget leaves.",
    )
    itl_target_ms: float = option(
        0.0,
        minimum=0,
        maximum=60_000,
        help="Target inter-token latency in milliseconds; prefill per step is limited adaptively to meet it. 0 is off.",
    )
    threads: int = option(
        0,
        minimum=0,
        maximum=1024,
        help="Compute threads; 0 is one per physical core, within the CPU quota of the container. Slow cores of hybrid "
        "processors are left out.",
    )
    thread_binding: str = option(
        "auto",
        choices=("auto", "cores", "none"),
        help="Binding of compute threads: cores binds each to its physical core, none leaves them to Linux; auto binds "
        "them if they use all of at least 4 cores.",
    )
    kernels: str = option(
        "auto", choices=("auto", "cpu", "triton", "reference"), help="Implementation of the model's operations."
    )
    cuda_graphs: bool = option(
        True,
        help="Replay steps on a GPU as CUDA graphs. The worker captures graphs for at most 15 s before it is "
        "ready, and "
        "the rest while nothing runs.",
    )
    batch_invariant: bool = option(
        False, help="Give a request the same output bits alone, in a batch, in chunks or resumed. Slower on a GPU."
    )
    hopper_prefill: bool = option(
        False,
        help="Compute new prompts on compute capability 9.0 by warps with roles and TMA copies. It has not run on a "
        "GPU yet.",
    )
    speculation: str = option(
        "auto",
        choices=("off", "suffix", "auto"),
        help="Draft tokens from texts that an answer repeats: its prompt, itself, earlier answers of the tenant, the "
        "call's prediction. No answer changes. suffix: draft whatever may be right; auto: only as many as make steps "
        "faster, by measurement. Needs --batch-invariant on a GPU; auto is off without it.",
    )
    self_test: str = option(
        "auto",
        choices=("auto", "off", "quick", "full"),
        help="Compare the kernels with torch in float32 at start, with the shapes of the model. A wrong kernel is "
        "replaced by a slower one, or the worker does not start. auto is quick on a GPU and off on a CPU; full has "
        "longer contexts and every linear layer.",
    )
    upstream: str = option(
        "",
        metavar="URL",
        repeatable=True,
        help="Answer with the OpenAI-compatible server at this URL instead of an engine of this process; give the flag "
        "once per server, or separate them by commas. The model's folder needs tokenizer and configuration only.",
    )
    upstream_key_file: str = option(
        "", metavar="FILE", help="File with the API key for the servers of --upstream; by default they get none."
    )
    upstream_model: str = option(
        "",
        metavar="NAME",
        help="Name of the model at the servers of --upstream; by default the served name, or the only model there.",
    )
    upstream_idle_s: float = option(
        300.0,
        minimum=1,
        maximum=86400,
        help="Longest time in seconds that a server of --upstream may be silent, before the first token and between "
        "two; then its answer counts as broken.",
    )
    upstream_total_s: float = option(
        3600.0, minimum=1, maximum=864000, help="Longest time in seconds of one answer of a server of --upstream."
    )
    models_dir: str = option(
        "",
        metavar="FOLDER",
        help="Serve every model of this folder: the worker loads the one that calls ask for, and unloads the one that "
        "was used longest ago. Calls wait in Redis meanwhile. Gateways need --discover-models.",
    )
    models_max: int = option(
        1, minimum=1, maximum=64, metavar="N", help="Largest number of models of --models-dir that are loaded at once."
    )
    models_memory_gb: float = option(
        0.0,
        minimum=0,
        maximum=1_048_576,
        help="Memory in GiB for the weights of all loaded models of --models-dir; 0 is nine tenths of the free memory "
        "at start, and no limit on a GPU.",
    )
    models_idle_s: float = option(
        0.0,
        minimum=0,
        maximum=864_000,
        help="Seconds without a call after which a model of --models-dir is unloaded; 0 keeps it until another needs "
        "its place.",
    )
    models_slice_s: float = option(
        20.0,
        minimum=0.1,
        maximum=86400,
        help="Seconds for which a model of --models-dir may run calls while calls of another one wait; then its calls "
        "go back to the queue, and continue in its next turn.",
    )
    worker_id: str = option("", help="Stable name of this worker in the queue; by default the host name and slot 0.")
    drain_s: float = option(
        2.0,
        minimum=0,
        maximum=86400,
        help="Seconds that running requests may go on after the worker is told to stop; then other workers "
        "resume them.",
    )
    park_on_drain_s: int = option(
        0,
        minimum=0,
        maximum=MAX_RETENTION_S,
        help="Park the requests that still run after --drain-s for at most this many seconds, instead of handing them "
        "to other workers: for a machine that is taken away, or for the night. 0 parks none.",
    )
    lease_s: float = option(
        3.0,
        minimum=0.5,
        maximum=3600,
        help="Seconds of silence after which a worker loses its requests to other workers.",
    )
    beat_s: float = option(
        1.0,
        minimum=0.05,
        maximum=600,
        help="Seconds between two renewals of a worker's leases; must be below --lease-s.",
    )
    watchdog_s: float = option(
        30.0,
        minimum=0,
        maximum=86400,
        help="Seconds without progress of its engine after which a worker ends itself; 0 is never.",
    )
    orphan_s: float = option(
        30.0,
        minimum=0,
        maximum=86400,
        help="Seconds after which a running request whose gateway is gone is cancelled, unless a client comes "
        "back for it.",
    )

    @property
    def num_ranks(self) -> int:
        """Processes that share the model; 1 while --tensor-parallel-size 0 is not resolved."""
        return max(1, self.tensor_parallel_size)

    @property
    def spills(self) -> bool:
        """Whether blocks that the prefix cache evicts are kept."""
        return bool(self.kv_host_gb or self.kv_spill_dir)

    @property
    def name(self) -> str:
        return self.worker_id or f"{socket.gethostname()}-0"
