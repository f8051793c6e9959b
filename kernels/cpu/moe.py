"""The experts of a layer for the C++ kernels: the packed weights of each, and the table that experts.h reads."""

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, Structure, c_int64, c_void_p

from torch import Tensor

from quire.kernels import checks
from quire.kernels.cpu.linear import GATES, CpuLinear, LinearWeights
from quire.kernels.moe import Routing


class _MoE(Structure):
    """`MoE` in experts.h."""

    _fields_ = [
        ("router", LinearWeights),
        ("gate_up", POINTER(LinearWeights)),
        ("down", POINTER(LinearWeights)),
        *((name, c_int64) for name in ("count", "top_k", "inner", "normalised", "output")),
        ("scales", c_void_p),
    ]


class CpuMoE:
    """A router and its experts, each with its packed gate_up and down. `address` is that of a `MoE`."""

    def __init__(
        self,
        routing: Routing,
        router: CpuLinear,
        experts: Iterable[tuple[CpuLinear, CpuLinear]],
        scales: Tensor | None = None,
    ) -> None:
        """scales: of `Ops.pack_moe`. Raises ValueError if the experts have weights of several formats."""
        self.routing = routing
        pairs = list(experts)
        for index, name in enumerate(("gate_up", "down")):
            formats = sorted({pair[index].format.name.lower() for pair in pairs})
            if len(formats) > 1:
                raise ValueError(f"the experts have weights of several formats in {name}: {', '.join(formats)}")
        self.hidden, self.inner = router.in_features, pairs[0][1].in_features
        self.nbytes = router.nbytes + sum(packed.nbytes for pair in pairs for packed in pair)
        self.dtype = router.dtype
        tables = [(LinearWeights * len(pairs))(*(pair[index].weights for pair in pairs)) for index in range(2)]
        self._moe = _MoE(
            router.weights,
            *tables,
            routing.num_experts,
            routing.top_k,
            self.inner,
            routing.normalised,
            GATES[routing.activation],
            checks.address(scales),
        )
        self._kept = router, pairs, tables, scales
        self.address = ctypes.addressof(self._moe)
