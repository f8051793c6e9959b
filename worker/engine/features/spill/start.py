"""Starts the spill of an engine, and measures what it costs to read a block and to compute one again."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from quire.kernels import PinningFailed
from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.spill.block_file import BlockFile, block_key
from quire.worker.engine.features.spill.block_spill import BlockSpill, SpillCosts
from quire.worker.engine.features.spill.blocks import SpillingBlockManager
from quire.worker.engine.features.spill.fingerprint import fingerprint_of
from quire.worker.engine.features.spill.host_pool import CachePool, HostPool
from quire.worker.engine.offline import generate
from quire.worker.engine.paged_model import PagedModel
from quire.worker.host_memory import available_memory

__all__ = ["SpillingBlockManager", "start_spill"]

log = logging.getLogger(__name__)

GIB = 2**30
# Host memory for blocks on their way to the file and back, if --kv-host-gb does not say more.
TRANSIT_BYTES = 128 * 2**20
LEAST_PLACES = 8
PROBES = 3
PROBE_BLOCKS = 4


def why_no_spill(model: PagedModel, prefix_caching: bool) -> str:
    """Return why the blocks of an engine cannot be kept, with the remedy; "" if they can."""
    if not prefix_caching:
        return "only blocks of the prefix cache are kept; take --prefix-caching"
    if model.state_bytes:
        return "the model keeps recurrent states, without which its blocks are of no use; take another model"
    if model.num_ranks > 1:
        return f"each of {model.num_ranks} ranks has a part of every block; take --tensor-parallel-size 1"
    return ""


def start_spill(
    engine: Engine, host_gb: float, folder: Path | None, file_gb: float, checkpoint: Path, parts: Mapping[str, str]
) -> None:
    """Have an idle engine keep blocks that its prefix cache evicts: in host memory, and in a file of a folder if given.

    checkpoint, parts: of `fingerprint_of`. Raises StartError.
    """
    flag = f"--kv-host-gb {host_gb:g}" if folder is None else f"--kv-spill-dir {folder}"
    model, limits = engine.runner.model, engine.limits
    if why := why_no_spill(model, limits.prefix_caching):
        raise StartError(f"{flag}: {why}, or leave it out")
    block_bytes = model.kv_bytes_per_block(limits.block_size)
    if host_gb and host_gb * GIB > available_memory():
        raise StartError(f"--kv-host-gb {host_gb:g}: {available_memory() / GIB:.2f} GiB are free; lower it")
    size = int(host_gb * GIB) or TRANSIT_BYTES
    try:
        pool = CachePool(engine.runner.kv_cache, max(LEAST_PLACES, size // block_bytes))
    except PinningFailed as error:
        raise StartError(f"{flag}: {error}; lower --kv-host-gb, or leave both out") from error
    # Blocks in memory are of this process alone.
    fingerprint, file = bytes(32), None
    costs = SpillCosts(0.0, measure_compute(engine))
    if folder is not None:
        fingerprint = fingerprint_of(parts, checkpoint, limits, pool.block_bytes)
        file = BlockFile.open(folder, fingerprint, pool.block_bytes, int(file_gb * GIB))
        costs = SpillCosts(measure_read(file, pool), costs.compute_s)
        log.info(
            "blocks that the prefix cache evicts go to %s: %d of %d places are filled; reading a block takes %.2f ms, "
            "computing it %.2f ms",
            file.path,
            len(file),
            file.num_places,
            1e3 * costs.read_s,
            1e3 * costs.compute_s,
        )
    log.info("host memory for %d blocks that the prefix cache has evicted", pool.num_places)
    spill = BlockSpill(engine.groups, pool, model.ops.device, fingerprint, file, costs)
    engine.scheduler.spill = engine.runner.spill = spill


def measure_compute(engine: Engine) -> float:
    """Return the seconds in which the engine computes the tokens of a block, at the beginning of a text. It is idle."""
    limits, blocks = engine.limits, engine.groups.blocks
    count = min(PROBE_BLOCKS * limits.block_size, limits.max_num_batched_tokens, limits.max_model_len - 1)
    prompt = tuple(997 * (index + 1) % engine.vocab_size for index in range(count))
    seconds = []
    blocks.prefix_caching = False  # this text is to leave nothing in the cache
    try:
        for _ in range(PROBES):
            began = time.perf_counter()
            generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
            seconds.append(time.perf_counter() - began)
    finally:
        blocks.prefix_caching = True
    return min(seconds) * limits.block_size / count


def measure_read(file: BlockFile, pool: HostPool) -> float:
    """Return the seconds in which a block is read from the disk. The blocks that are written for it are removed again.

    Raises OSError if the file cannot be used.
    """
    keys = [block_key(bytes(32), bytes([number])) for number in range(min(PROBES, file.num_places - len(file)))]
    for key in keys:
        file.write(key, pool.block(0))
    file.forget_pages()
    seconds = []
    for key in keys:
        began = time.perf_counter()
        file.read(key, pool.block(0))
        seconds.append(time.perf_counter() - began)
        file.remove(key)
    return statistics.median(seconds) if seconds else 0.0
