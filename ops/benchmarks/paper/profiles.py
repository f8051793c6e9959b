"""The duration of a step: models of the seconds as a function of its work, for the virtual clock.

Two of them are arithmetic and are called SIMULATION wherever their results appear; the third is fitted to steps of this
engine, measured on this machine (`measured.py`).

OPT-13B on an A100-40GB, from first principles. A step reads the weights once, and the keys and values of every context
once; or it is bound by arithmetic, two operations per parameter and token.

    weights     13e9 parameters x 2 bytes = 26 GB, at 1.5 TB/s (of 1.555 peak): 17.3 ms
    KV cache    2 x 5,120 x 40 layers x 2 bytes = 819,200 bytes a token: 0.55 us
    arithmetic  26 GFLOP a token at half of the peak of 312 TFLOP/s: 0.17 us a token

The system of the paper was slower than that, because of the work of its host between steps. The difference follows from
two published points, by Little's law: residence = batch / rate, and a step is residence / mean output.

    ShareGPT  30.42 requests at  2/s: 15.2 s, of 337.99 tokens: 45.0 ms; less 17.3, less 15.1K tokens of KV (8.3): 19.4
    Alpaca   132.44 requests at 30/s:  4.4 s, of  58.45 tokens: 75.5 ms; less 17.3, less  8.6K tokens of KV (4.7): 53.5

So 19.4 = a + 30.42 b and 53.5 = a + 132.44 b, which gives a = 9.2 ms for a step and b = 0.334 ms for a sequence in it.
`OPT_13B_2023` has this overhead too: it is calibrated with the paper's own figure 13, and where it is used to repeat
that figure, the row of Quire is no prediction. `OPT_13B` has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# Slots of the cache: 12 GB at 819,200 bytes a token, the 15.7K of section 6.1.
OPT_13B_SLOTS = 12 * 2**30 // 819_200


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step."""

    decodes: int = 0  # sequences that decode, one token each
    context: int = 0  # tokens that these attend to, all together
    chunks: int = 0
    prefill: int = 0  # tokens of chunks
    attended: int = 0  # (token of a chunk, token it attends to) pairs
    chunk_context: int = 0  # tokens of the contexts of chunks, each once
    samples: int = 0  # sequences that get a token


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU that is bound by memory or by arithmetic, and the overhead of a host."""

    name: str
    weight_bytes: float = 26e9
    kv_bytes: float = 819_200
    bytes_per_s: float = 1.5e12
    flops_per_token: float = 26e9
    flops_per_s: float = 0.5 * 312e12
    step_overhead: float = 0.0
    sequence_overhead: float = 0.0

    def seconds(self, work: StepWork) -> float:
        tokens = work.decodes + work.prefill
        linear = max(self.weight_bytes / self.bytes_per_s, tokens * self.flops_per_token / self.flops_per_s)
        cache = (work.context + work.chunk_context) * self.kv_bytes / self.bytes_per_s
        return linear + cache + self.step_overhead + self.sequence_overhead * work.samples


OPT_13B = Roofline("OPT-13B, A100-40GB")
OPT_13B_2023 = Roofline("OPT-13B, A100-40GB, host of 2023", step_overhead=0.0092, sequence_overhead=0.000334)


@dataclass(frozen=True, slots=True)
class Linear:
    """A fitted profile: seconds = sum of coefficient x feature, over `features(work)`."""

    name: str
    coefficients: tuple[float, ...]

    NAMES: ClassVar = ("step", "decoding step", "decoded token", "token of context", "prefilled token", "attended pair")

    @staticmethod
    def features(work: StepWork) -> tuple[float, ...]:
        """Return the features NAMES of a step."""
        return 1.0, float(work.decodes > 0), work.decodes, work.context, work.prefill, work.attended

    def seconds(self, work: StepWork) -> float:
        return sum(a * b for a, b in zip(self.coefficients, self.features(work), strict=True))


Profile = Roofline | Linear
