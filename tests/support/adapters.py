"""Random LoRA adapters, written by PEFT, and checkpoints that PEFT merged with them."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@contextmanager
def warnings_of_peft() -> Iterator[None]:
    """Ignore warnings: PEFT calls what Transformers deprecates, and warns about the adapters that tests want."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: int = 8,
    targets: Sequence[str] | str = ALL,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **fields: Any,
) -> Path:
    """Write a random adapter for a checkpoint, and return its folder. fields: others of peft.LoraConfig."""
    from peft import LoraConfig, get_peft_model

    chosen = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, task_type="CAUSAL_LM", **fields)
    with warnings_of_peft():
        adapted = get_peft_model(load_base(model), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, factor in sorted(adapted.named_parameters()):
                if not factor.requires_grad:
                    continue
                values = torch.randn(factor.shape, generator=generator)
                if factor.dim() == 2 and ".lora_" in name:
                    values *= size / math.sqrt(factor.shape[1])
                else:  # magnitudes, biases and whole weights: near those that PEFT starts from
                    values = factor.data * (1 + 0.2 * values) + 0.02 * values
                factor.data.copy_(values)  # in place: PEFT ties some of them
                if dtype is not factor.dtype:
                    factor.data = factor.data.to(dtype)
        adapted.save_pretrained(folder)
    return folder


def load_base(model: Path) -> Any:
    """Load a checkpoint with Transformers, by the class that it names."""
    import transformers

    (name,) = json.loads((model / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(model)


def load_adapted(model: Path, adapter: Path) -> Any:
    """Load a checkpoint with an adapter, with PEFT."""
    from peft import PeftModel

    with warnings_of_peft():
        return PeftModel.from_pretrained(load_base(model), adapter)


def change_config(folder: Path, **fields: Any) -> None:
    """Change fields of `adapter_config.json`."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def merge_adapter(model: Path, adapter: Path, out: Path) -> Path:
    """Write a copy of a checkpoint that PEFT merged with an adapter, and return its folder."""
    shutil.copytree(model, out)
    with warnings_of_peft():
        load_adapted(model, adapter).merge_and_unload().save_pretrained(out)
    return out
