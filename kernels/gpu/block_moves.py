"""Copies of cache blocks in all layers with one launch, within the device and to and from pinned host memory.

The kernel finds the caches through a table of addresses, so a stack of any depth is one launch. One call per cache
would cost more than the copy itself when few blocks move. The kernel reads and writes host memory in place: pinned
memory has an address on the device. A host block is contiguous over all layers, so that whole bursts cross the bus. All
copies are made in the order of the stream: the host may read a swapped block once the stream has reached that point.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # int64 words that one program copies


@triton.jit(do_not_specialize_on_alignment=["src", "dst"])  # halves of one tensor, at any alignment
def move_kernel(
    src_caches, dst_caches, src, dst, src_stride, dst_stride, words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy block src[i] of the cache at src_caches[c] to block dst[i] of the cache at dst_caches[c], for all i and c.

    src_caches, dst_caches [caches] int64: addresses. src_stride, dst_stride: from block to block; words: of one block
    in one cache; all in int64 words. grid (n, caches, cdiv(words, BLOCK)).
    """
    i, cache = tl.program_id(0), tl.program_id(1)
    word = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(src_caches + cache).to(tl.pointer_type(tl.int64)) + tl.load(src + i) * src_stride
    target = tl.load(dst_caches + cache).to(tl.pointer_type(tl.int64)) + tl.load(dst + i) * dst_stride
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)  # bytes: caches and blocks are aligned
    tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


class BlockMover:
    """Copies blocks of all caches. The caches are in the order of a host block: layer by layer, k before v.

    The mover keeps the addresses of the caches, not the caches themselves. Block ids are int64 [n] in host memory.
    """

    def __init__(self, caches: list[Tensor]) -> None:
        first = caches[0]
        self.device = first.device
        self.words = first[0].nbytes // 8
        self.addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=self.device)
        self._host_stride = len(caches) * self.words  # words of a host block: one block of every cache
        self._host: tuple[int, Tensor] | None = None  # address of the host memory of the last move; addresses in it

    def _host_addresses(self, host: Tensor) -> Tensor:
        """Return the address of the first block of each cache in host memory, [caches] int64 on the device."""
        base = host.data_ptr()
        if self._host is None or self._host[0] != base:
            at = torch.arange(len(self.addresses), dtype=torch.int64, device="cpu") * (self.words * 8) + base
            self._host = base, self._to_device(at)
        return self._host[1]

    def _to_device(self, values: Tensor) -> Tensor:
        """Copy without waiting for the stream. A copy from pageable memory would wait."""
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy blocks within the caches."""
        self._move(self.addresses, self.addresses, src, dst, self.words, self.words)

    def swap_out(self, host: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy blocks `src` of the caches to host blocks `dst`."""
        self._move(self.addresses, self._host_addresses(host), src, dst, self.words, self._host_stride)

    def swap_in(self, host: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy host blocks `src` to blocks `dst` of the caches."""
        self._move(self._host_addresses(host), self.addresses, src, dst, self._host_stride, self.words)

    def _move(
        self, src_caches: Tensor, dst_caches: Tensor, src: Tensor, dst: Tensor, src_stride: int, dst_stride: int
    ) -> None:
        if len(src):
            ids = self._to_device(torch.stack([src, dst]))
            grid = len(src), len(self.addresses), triton.cdiv(self.words, WORDS)
            move_kernel[grid](src_caches, dst_caches, ids[0], ids[1], src_stride, dst_stride, self.words, BLOCK=WORDS)
