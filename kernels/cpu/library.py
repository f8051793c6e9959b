"""The C++ libraries and their functions with their C types, read from the annotations below.

Tensors cross as addresses (`Tensor.data_ptr()`). ctypes releases the GIL during a call. Functions that check ids, slots
or block tables return 0, or 1 + the index of the first invalid one, and have then written nothing.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from types import NoneType, SimpleNamespace
from typing import Annotated, Protocol, cast, get_type_hints

from quire.kernels.ops import KernelsUnavailable

Pointer = Annotated[int | ctypes.Array[ctypes.c_void_p] | None, ctypes.c_void_p]
Size = Annotated[int, ctypes.c_size_t]
Int = Annotated[int, ctypes.c_int]
Int64 = Annotated[int, ctypes.c_int64]
Float = Annotated[float, ctypes.c_float]


class LevelFunctions(Protocol):
    """The functions that each instruction-set level has, `LEVEL_name` in its library; level_body.h defines them."""

    def linear(self, x: Pointer, t: Size, k: Size, weights: Pointer, n: Size, out: Pointer, output: Int) -> None: ...

    def moe(self, router_input: Pointer, x: Pointer, rows: Size, hidden: Size, moe: Pointer, out: Pointer) -> None: ...

    def rms_norm(
        self, x: Pointer, residual: Pointer, weight: Pointer, eps: Float, rows: Size, n: Size, out: Pointer
    ) -> None: ...

    def embed(
        self, ids: Pointer, wide: Int, rows: Size, table: Pointer, table_format: Int, vocabulary: Size, n: Size,
        out: Pointer,
    ) -> Int64: ...  # fmt: skip

    def rope_and_cache(
        self, qkv: Pointer, positions: Pointer, cos_sin: Pointer, slots: Pointer, k_cache: Pointer,
        v_cache: Pointer, q: Pointer, q_norm: Pointer, k_norm: Pointer, v_norm: Pointer, tokens: Size,
        max_position: Size, block_count: Size, block_size: Size, heads: Size, kv_heads: Size, head_dim: Size,
        eps: Float, wide_slots: Int, kv_type: Int,
    ) -> Int64: ...  # fmt: skip

    def paged_attention(
        self, q: Pointer, k_cache: Pointer, v_cache: Pointer, block_tables: Pointer, seq_lens: Pointer,
        query_start: Pointer, out: Pointer, table_width: Size, sequences: Size, tokens: Size, block_count: Size,
        heads: Int, kv_heads: Int, head_dim: Int, block_size: Int, window: Int, scale: Float,
        kv_type: Int, sinks: Pointer, softcap: Float, key_ends: Pointer,
    ) -> Int64: ...  # fmt: skip

    def cache_latent(
        self, rows: Pointer, slots: Pointer, cache: Pointer, tokens: Size, block_count: Size, block_size: Size,
        width: Size, wide_slots: Int, kv_type: Int,
    ) -> Int64: ...  # fmt: skip

    def latent_attention(
        self, q: Pointer, cache: Pointer, block_tables: Pointer, seq_lens: Pointer, query_start: Pointer, out: Pointer,
        table_width: Size, sequences: Size, tokens: Size, block_count: Size, heads: Int, width: Int, value_dim: Int,
        block_size: Int, window: Int, scale: Float, kv_type: Int,
    ) -> Int64: ...  # fmt: skip

    def linear_groups(
        self, x: Pointer, groups: Size, t: Size, k: Size, weights: Pointer, n: Size, out: Pointer
    ) -> None: ...

    def layers(self, step: Pointer) -> Int64: ...

    def adapt_embeddings(self, adapters: Pointer, ids: Pointer, embeddings: Pointer, hidden: Size) -> None: ...

    def adapt_logits(self, adapters: Pointer, x: Pointer, hidden: Size, logits: Pointer, vocabulary: Size) -> None: ...

    def argmax(self, logits: Pointer, rows: Size, n: Size, out: Pointer) -> None: ...

    def sample(
        self, logits: Pointer, rows: Size, n: Size, temperature: Pointer, top_k: Pointer, top_p: Pointer,
        min_p: Pointer, uniform: Pointer, out: Pointer,
    ) -> None: ...  # fmt: skip

    def top_logprobs(
        self, logits: Pointer, rows: Size, n: Size, count: Size, values: Pointer, ids: Pointer
    ) -> None: ...

    def logprobs_of(self, logits: Pointer, rows: Size, n: Size, ids: Pointer, out: Pointer) -> Int64: ...


class CommonFunctions(Protocol):
    """The functions that need no level, `quire_name` in the common library."""

    def supports(self, level: Int) -> Int: ...

    def set_threads(self, count: Int) -> None: ...

    def get_threads(self) -> Int: ...

    def bind_threads(self, cpus: Pointer, first: Pointer, count: Int) -> None: ...

    def interleave_memory(self, nodes: Size) -> Int: ...

    def pack(
        self, weight: Pointer, n: Size, row_bytes: Size, word_bytes: Int, gate_up: Int, panel_bytes: Size, out: Pointer
    ) -> None: ...

    def pack_nibbles(self, weight: Pointer, scales: Pointer, n: Size, k: Size, gate_up: Int, out: Pointer) -> None: ...

    def convert(self, values: Pointer, source_type: Int, out: Pointer, out_type: Int, count: Size) -> Int: ...

    def copy_blocks(
        self, caches: Pointer, count: Size, block_bytes: Size, src: Pointer, dst: Pointer, n: Size
    ) -> None: ...

    def swap_out(
        self, caches: Pointer, count: Size, block_bytes: Size, src: Pointer, dst: Pointer, n: Size, host: Pointer
    ) -> None: ...

    def swap_in(
        self, caches: Pointer, count: Size, block_bytes: Size, src: Pointer, dst: Pointer, n: Size, host: Pointer
    ) -> None: ...

    def ranks_bytes(self, size: Size) -> Size: ...

    def ranks_open(self, memory: Pointer, rank: Size, size: Size) -> Pointer: ...

    def ranks_give_up(self, ranks: Pointer) -> None: ...

    def ranks_all_reduce(self, ranks: Pointer, values: Pointer, count: Size, element_bytes: Size) -> Int: ...

    def ranks_broadcast(self, ranks: Pointer, values: Pointer, size: Size) -> Int: ...

    def ranks_gather(self, ranks: Pointer, values: Pointer, size: Size, out: Pointer) -> Int: ...


class Library:
    """The loaded libraries: `common` functions, and those of each instruction-set level."""

    def __init__(self) -> None:
        """Build and load the common library. Raises KernelsUnavailable."""
        self.common = cast(CommonFunctions, _bind(_load("common"), "quire", CommonFunctions))
        self._levels: dict[str, LevelFunctions] = {}

    def level(self, name: str) -> LevelFunctions:
        """Return the functions of the level that level_NAME.cpp defines. Raises KernelsUnavailable."""
        if name not in self._levels:
            self._levels[name] = cast(LevelFunctions, _bind(_load(name), name, LevelFunctions))
        return self._levels[name]


def _ignore(done: int, total: int) -> None:
    pass


_report_build: Callable[[int, int], None] = _ignore


def report_builds(report: Callable[[int, int], None]) -> None:
    """Call `report` with the numbers of compiled units and of all units while this process builds, or waits for one."""
    global _report_build
    _report_build = report


def _load(name: str) -> ctypes.CDLL:
    """Build the library if needed, and load it. Raises KernelsUnavailable."""
    from quire.kernels.cpu import build  # not at the top: `python -m quire.kernels.cpu.build` imports this module first

    try:
        # The common library is compiled first and quickly. The progress is that of a level.
        report = _report_build if name != build.COMMON else lambda done, total: _report_build(0, 1)
        [path] = build.build([name], report)
        return ctypes.CDLL(str(path))
    except (build.BuildError, OSError) as error:
        raise KernelsUnavailable(str(error)) from error


def _bind(library: ctypes.CDLL, prefix: str, signatures: type) -> SimpleNamespace:
    """Return the functions `PREFIX_NAME` for all methods of `signatures`, with the C types of their annotations."""
    bound = SimpleNamespace()
    for name, method in vars(signatures).items():
        if name.startswith("_"):
            continue
        types = get_type_hints(method, include_extras=True)
        result = types.pop("return")
        function = getattr(library, f"{prefix}_{name}")
        function.restype = None if result is NoneType else result.__metadata__[0]
        function.argtypes = [kind.__metadata__[0] for kind in types.values()]
        setattr(bound, name, function)
    return bound


@cache
def load() -> Library:
    """Load the common library, after building it if needed, and set as many threads as the process may use processors.

    Raises KernelsUnavailable if the library cannot be built.
    """
    library = Library()
    library.common.set_threads(len(os.sched_getaffinity(0)))
    return library


def is_loaded() -> bool:
    """Return whether this process has loaded the library."""
    return load.cache_info().currsize > 0


def num_threads() -> int:
    """Return the number of threads of the C++ kernels. Raises KernelsUnavailable."""
    return load().common.get_threads()


def set_num_threads(count: int) -> None:
    """Set the number of threads of the C++ kernels, for the whole process. Raises KernelsUnavailable or ValueError."""
    if count < 1:
        raise ValueError(f"count is {count}: it must be at least 1")
    load().common.set_threads(count)


def bind_threads(cpus_of_threads: Sequence[Sequence[int]]) -> None:
    """Bind each thread of the C++ kernels to CPUs, from its next job on. Raises KernelsUnavailable or ValueError.

    The first entry is for the thread that calls an operation, and has no effect: the caller stays where it is.
    """
    if not cpus_of_threads or not all(cpus_of_threads):
        raise ValueError("each thread needs at least one CPU")
    cpus = [cpu for own in cpus_of_threads for cpu in own]
    first = [0, *accumulate(map(len, cpus_of_threads))]
    arrays = _ints(cpus), _ints(first)
    load().common.bind_threads(ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]), len(cpus_of_threads))


def unbind_threads() -> None:
    """Let the threads of the C++ kernels run on all CPUs that this process may use. Raises KernelsUnavailable."""
    cpus = sorted(os.sched_getaffinity(0))
    arrays = _ints(cpus), _ints([len(cpus)])
    load().common.bind_threads(ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]), 0)


def interleave_memory(nodes: Sequence[int]) -> None:
    """Spread memory that this thread, and threads that it starts, touch first over NUMA nodes below 64.

    Raises KernelsUnavailable, and OSError if the system or the container refuses.
    """
    if failed := load().common.interleave_memory(sum(1 << node for node in nodes if node < 64)):
        raise OSError(failed, os.strerror(failed))


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values))(*values)
