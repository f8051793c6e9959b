"""Copies of cache blocks in all layers with one launch, within the device and to and from pinned host memory.

Caches are found through a table of addresses, so a stack of any depth is one launch: the alternative, a call per cache,
costs more than the copy itself when few blocks move. Host memory is read and written by the kernel in place: pinned
memory has an address on the device, and a block of the host is contiguous over all layers, so that whole bursts cross
the bus. All of it happens in the order of the stream, and the host sees a swapped block once the stream has passed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # int64 of one program


@triton.jit(do_not_specialize_on_alignment=["src", "dst"])  # halves of one tensor: their alignment varies
def move_kernel(
    src_caches,
    dst_caches,
    src,
    dst,
    src_stride,
    dst_stride,
    words,
    BLOCK: tl.constexpr,
):
    """Block dst[i] of every cache c at dst_caches[c] becomes block src[i] of that at src_caches[c].

    src_caches, dst_caches [caches] int64: addresses; strides and words (of one block in one cache) in int64 words.
    grid (n, caches, cdiv(words, BLOCK)).
    """
    i, cache = tl.program_id(0), tl.program_id(1)
    word = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(src_caches + cache).to(tl.pointer_type(tl.int64)) + tl.load(src + i) * src_stride
    target = tl.load(dst_caches + cache).to(tl.pointer_type(tl.int64)) + tl.load(dst + i) * dst_stride
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)  # bytes: caches and blocks are aligned
    tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


class BlockTable:
    """The addresses of all caches of a stack, k before v in each layer, as the layers of a host block lie."""

    def __init__(self, caches: list[Tensor]) -> None:
        first = caches[0]
        self.device = first.device
        self.words = first[0].nbytes // 8
        self.addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=self.device)
        self._host: tuple[int, Tensor] | None = None  # the host memory of the last move, and the addresses in it

    def host_addresses(self, host: Tensor) -> Tensor:
        base = host.data_ptr()
        if self._host is None or self._host[0] != base:
            at = torch.arange(len(self.addresses), dtype=torch.int64, device="cpu") * (self.words * 8) + base
            self._host = base, self._to_device(at)
        return self._host[1]

    def _to_device(self, values: Tensor) -> Tensor:
        """Without waiting for the stream, which a copy from pageable memory would do."""
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values

    def move(self, src_at: Tensor, dst_at: Tensor, src: Tensor, dst: Tensor, src_blocks: int, dst_blocks: int) -> None:
        """src_blocks, dst_blocks: caches that lie side by side in one block, 1 on the device and all on the host."""
        if len(src):
            ids = self._to_device(torch.stack([src, dst]))
            grid = len(src), len(self.addresses), -(-self.words // WORDS)
            strides = src_blocks * self.words, dst_blocks * self.words
            move_kernel[grid](src_at, dst_at, ids[0], ids[1], *strides, self.words, BLOCK=WORDS)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        self.move(self.addresses, self.addresses, src, dst, 1, 1)

    def swap_out(self, host: Tensor, src: Tensor, dst: Tensor) -> None:
        self.move(self.addresses, self.host_addresses(host), src, dst, 1, len(self.addresses))

    def swap_in(self, host: Tensor, src: Tensor, dst: Tensor) -> None:
        self.move(self.host_addresses(host), self.addresses, src, dst, len(self.addresses), 1)
