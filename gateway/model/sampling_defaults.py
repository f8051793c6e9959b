"""Sampling defaults of a model: the values that its generation_config.json gives for parameters that a call leaves out.

The same five fields as in vLLM (`--generation-config auto`). `do_sample` and `max_new_tokens` are not among them: they
belong to `generate()` of Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.gateway.api.errors import InvalidRequest
from quire.gateway.api.parameters import COMMON
from quire.shared.text.tokenizer import ModelError

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of sampling parameters that a call does not give. Without generation_config.json they are those of the
    OpenAI API and, for what that lacks, those that have no effect."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


SAMPLING_DEFAULTS = tuple(field.name for field in fields(SamplingDefaults))


def read_sampling_defaults(path: Path, generation: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults in `generation`, the content of the file `path`; an absent or null field keeps the default above.

    Raises ModelError if a value is outside the range that the API allows for the parameter.
    """
    given = {}
    for name in SAMPLING_DEFAULTS:
        if (value := generation.get(name)) is None:
            continue
        try:
            given[name] = COMMON[name].check(name, value)
        except InvalidRequest as error:
            raise ModelError(
                f"{path}: {str(error).rstrip('.')}; correct the file, or ignore its sampling defaults with "
                "--generation-config none (QUIRE_GENERATION_CONFIG)."
            ) from None
    return SamplingDefaults(**given)
