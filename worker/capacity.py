"""The capacity of an engine, from settings and free memory: KV cache blocks, host blocks, sequences and tokens."""

from __future__ import annotations

import logging

import torch

from quire.shared.process.errors import StartError
from quire.worker.device import devices
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.paged_model import IMAGE_SHARE, PagedModel
from quire.worker.host_memory import available_memory
from quire.worker.settings import SNAPSHOT_TOKENS, WorkerSettings

log = logging.getLogger(__name__)

GIB = 1024**3
# On a CPU the KV cache shares memory with all other programs of the machine.
CPU_CACHE_LIMIT = 2 * GIB
CPU_CACHE_SHARE = 0.3
# Share of the memory that is free besides the KV cache for blocks that are swapped out.
HOST_BLOCKS_SHARE = 0.2
# Slots for recurrent states per running sequence, its own among them, unless --state-gb says how many.
SLOTS_PER_SEQUENCE = 16


def choose_limits(
    settings: WorkerSettings, model: PagedModel, device: torch.device, memory: tuple[int, int, int] | None = None
) -> EngineLimits:
    """Choose the limits of the engine. Raises StartError if one sequence of the maximum length does not fit.

    memory: of a CUDA device, the bytes for the KV cache, the free bytes, and the largest number of tokens in a step.
    """
    max_model_len = model.max_model_len
    # A block takes this many bytes on each rank. All ranks share the host's memory; on a CPU it holds the KV cache.
    bytes_per_block = model.kv_bytes_per_block(settings.block_size)
    bytes_on_all_ranks = bytes_per_block * settings.num_ranks
    if device.type == "cpu":
        bytes_per_block = bytes_on_all_ranks
    sequences, tokens = devices.max_num_seqs(settings, device), devices.max_num_batched_tokens(settings, device)
    max_prefill_tokens = settings.max_prefill_tokens
    if not settings.max_num_batched_tokens and model.least_step(sequences) > tokens:
        # Steps are larger for whole images alone.
        max_prefill_tokens, tokens = max_prefill_tokens or tokens, model.least_step(sequences)
    if memory is not None:
        budget, free, tokens = memory
        fp8 = "take --kv-cache-dtype fp8, " if settings.kv_cache_dtype == "auto" and devices.has_fp8(device) else ""
        remedy = f"raise --gpu-memory-utilization, {fp8}lower --max-num-batched-tokens (now {tokens})"
        num_state_slots = 0
    else:
        longest = -(-max_model_len // settings.block_size)
        available = available_memory()
        free = available - min(model.image_bytes, available // IMAGE_SHARE)
        budget = min(CPU_CACHE_LIMIT, int(CPU_CACHE_SHARE * free))
        sequences, num_state_slots = choose_state_slots(settings, model.state_bytes, sequences, budget, free)
        budget -= min(budget // 2, num_state_slots * model.state_bytes)
        budget = min(budget, sequences * longest * bytes_per_block)
        int8 = ", take --kv-cache-dtype int8" if settings.kv_cache_dtype == "auto" else ""
        remedy = f"raise --kv-cache-gb{int8}"
    num_blocks = choose_num_blocks(settings, bytes_per_block, max_model_len, budget, remedy)
    free -= num_state_slots * model.state_bytes
    if num_blocks * bytes_per_block > free:
        asked = f"--num-blocks {num_blocks}" if settings.num_blocks else f"--kv-cache-gb {settings.kv_cache_gb:g}"
        raise StartError(
            f"{asked}: that takes {num_blocks * bytes_per_block / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free; "
            "lower it, or leave the setting out to have the size chosen"
        )
    num_device_bytes = num_blocks * bytes_per_block if device.type == "cpu" else 0
    num_device_bytes += num_state_slots * model.state_bytes
    # A block is of no use to a model with recurrent states unless a snapshot at its end stays as long.
    max_pinned = 0 if num_state_slots else int(settings.cache_pin_share * num_blocks)
    return EngineLimits(
        num_blocks=num_blocks,
        num_host_blocks=choose_num_host_blocks(
            settings, bytes_on_all_ranks, num_device_bytes, sequences, max_model_len
        ),
        block_size=settings.block_size,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        prefix_caching=settings.prefix_caching,
        max_prefill_tokens=max_prefill_tokens,
        preemption=settings.preemption,
        num_state_slots=num_state_slots,
        snapshot_interval=settings.snapshot_tokens,
        max_pinned_blocks=max_pinned,
        max_owner_pinned_blocks=int(settings.cache_pin_key_share * max_pinned),
    )


def choose_state_slots(
    settings: WorkerSettings, state_bytes: int, sequences: int, budget: int, free: int
) -> tuple[int, int]:
    """Choose how many sequences run at once and the number of slots for their recurrent states.

    state_bytes: memory of a slot; 0 if the model keeps no such states. budget, free: bytes for all caches, and free
    bytes. At least half of the slots are left for snapshots. Raises StartError.
    """
    if not state_bytes:
        if settings.state_gb:
            raise StartError(f"--state-gb {settings.state_gb:g}: the model keeps no recurrent states; leave it out")
        if settings.snapshot_tokens != SNAPSHOT_TOKENS:
            what = f"--snapshot-tokens {settings.snapshot_tokens}"
            raise StartError(f"{what}: the model keeps no recurrent states; leave it out")
        return sequences, 0
    if settings.snapshot_tokens % settings.block_size:
        raise StartError(
            f"--snapshot-tokens {settings.snapshot_tokens} must be a multiple of --block-size {settings.block_size}"
        )
    most = (int(settings.state_gb * GIB) or budget // 2) // state_bytes
    rows = min(sequences, most if not settings.prefix_caching else max(1, most // 2))
    asked = f"--state-gb {settings.state_gb:g}" if settings.state_gb else "half of the memory for caches"
    if most < 1 or (settings.max_num_seqs and most < sequences):
        raise StartError(
            f"{asked} has room for the recurrent states of {most} sequences of {state_bytes / 2**20:.1f} MiB: raise "
            "--state-gb" + (f", or lower --max-num-seqs to {most}" if most else "")
        )
    if settings.max_num_seqs:
        rows = sequences
    elif rows < sequences:
        log.warning("%s has room for the recurrent states of %d sequences at once; raise --state-gb", asked, rows)
    slots = most if settings.state_gb else min(most, rows * SLOTS_PER_SEQUENCE)
    if slots * state_bytes > free:
        raise StartError(f"--state-gb {settings.state_gb:g}: {free / GIB:.2f} GiB are free; lower it")
    return rows, slots


def choose_num_blocks(
    settings: WorkerSettings, bytes_per_block: int, max_model_len: int, budget: int, remedy: str
) -> int:
    """Return the number of blocks of the KV cache: as set, else as many as fit into `budget` bytes.

    Raises StartError if one sequence of the maximum length does not fit.
    """
    longest = -(-max_model_len // settings.block_size)
    if settings.num_blocks:
        blocks, remedy = settings.num_blocks, "raise --num-blocks"
    elif settings.kv_cache_gb:
        blocks = int(settings.kv_cache_gb * GIB) // bytes_per_block
    else:
        blocks = budget // bytes_per_block
    if blocks < longest:
        need = longest * bytes_per_block / GIB
        raise StartError(
            f"a KV cache of {blocks} blocks is too small for one sequence of {max_model_len} tokens, which needs "
            f"{longest} blocks ({need:.2f} GiB): {remedy}"
            + (f", or lower --max-model-len to {blocks * settings.block_size}" if blocks else "")
        )
    return blocks


def choose_num_host_blocks(
    settings: WorkerSettings, bytes_per_block: int, taken: int, sequences: int, max_model_len: int
) -> int:
    """Return the number of host blocks for swapping; 0 if nothing is ever swapped.

    The number is the least of three: the blocks that fit in --swap-gb, the blocks that fit in a share of the memory
    that is free after `taken` bytes, and the blocks that all sequences need at their maximum length.
    """
    if settings.preemption == "recompute" or not settings.swap_gb:
        return 0
    asked = int(settings.swap_gb * GIB) // bytes_per_block
    free = int(HOST_BLOCKS_SHARE * max(0, available_memory() - taken)) // bytes_per_block
    longest = -(-max_model_len // settings.block_size)
    if free < min(asked, sequences * longest):
        log.warning("--swap-gb %g is more than memory allows: %.2f GiB", settings.swap_gb, free * bytes_per_block / GIB)
    return min(asked, free, sequences * longest)


def log_limits(model: PagedModel, limits: EngineLimits, ranks: int = 1) -> None:
    """Log the memory of weights, KV cache and host blocks, and the limits of a step."""
    bytes_per_block = model.kv_bytes_per_block(limits.block_size)
    log.info(
        "%s%.0f MiB of weights; KV cache of %d blocks of %d tokens, %.0f MiB; host memory for %d blocks, %.0f MiB; "
        "context %d tokens; at most %d sequences and %d tokens in a step",
        f"on each of {ranks} ranks " if ranks > 1 else "",
        model.weight_bytes / 2**20,
        limits.num_blocks,
        limits.block_size,
        limits.num_blocks * bytes_per_block / 2**20,
        limits.num_host_blocks,
        limits.num_host_blocks * bytes_per_block / 2**20,
        limits.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )
    if model.image_bytes:
        log.info("images: %.0f MiB for embeddings and for a run of the vision tower", model.image_bytes / 2**20)
    if limits.num_state_slots:
        log.info(
            "recurrent states: %d slots, %.0f MiB, for running sequences and for snapshots every %d tokens of a prompt",
            limits.num_state_slots,
            limits.num_state_slots * model.state_bytes / 2**20,
            limits.snapshot_interval,
        )
