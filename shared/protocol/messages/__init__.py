"""Messages between gateway and worker, and their strict msgpack form.

`requests` has requests and worker cards, `step_items` has the output of workers. Decoding accepts exactly the known
fields, the right types and bounded sizes, and never an extension type.
"""

from quire.shared.protocol.messages.codec import VERSION, MessageError, decode, new_packer, unpack
from quire.shared.protocol.messages.prompt_report import PromptReport
from quire.shared.protocol.messages.requests import (
    MAX_BREAKPOINTS,
    MAX_PROMPT_TOKENS,
    MAX_SALT_LENGTH,
    MAX_TTL_S,
    POOLINGS,
    SCORE,
    SHORT_TTL_S,
    CacheBreakpoint,
    GenerationRequest,
    ImageRef,
    WorkerCard,
)
from quire.shared.protocol.messages.step_items import (
    BY_TOKEN,
    MAX_FRAME_BYTES,
    OUTCOMES,
    Delta,
    Outcome,
    PredictionCounts,
    StepItem,
    decode_items,
)
from quire.shared.protocol.sampling_params import MAX_CHOICES, SamplingParams

__all__ = [
    "BY_TOKEN",
    "MAX_BREAKPOINTS",
    "MAX_CHOICES",
    "MAX_FRAME_BYTES",
    "MAX_PROMPT_TOKENS",
    "MAX_SALT_LENGTH",
    "MAX_TTL_S",
    "OUTCOMES",
    "POOLINGS",
    "SCORE",
    "SHORT_TTL_S",
    "VERSION",
    "CacheBreakpoint",
    "Delta",
    "GenerationRequest",
    "ImageRef",
    "MessageError",
    "Outcome",
    "PredictionCounts",
    "PromptReport",
    "SamplingParams",
    "StepItem",
    "WorkerCard",
    "decode",
    "decode_items",
    "new_packer",
    "unpack",
]
