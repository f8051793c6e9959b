"""The weights of models that Transformers computes: reading, checks, and copies in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.files.loader import AGAIN, Progress
from quire.worker.models.files.mapped_files import MappedFiles
from quire.worker.models.transformers.config import TransformersConfig

log = logging.getLogger(__name__)

SAME_MODEL = "config.json and the weights must be of the same model"


def nbytes_of(tensors: list[torch.Tensor]) -> int:
    """Return the memory of the tensors. Tied tensors count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def load_weights(
    config: TransformersConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Any:
    """Load the model with Transformers, into host memory. Raises CheckpointError.

    tensors: those of the checkpoint as numbers, by their names, if it is quantised.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = config.folder
    log.info("Transformers loads %s, %.0f MiB", config.architecture, config.least_weight_bytes(dtype) / 2**20)
    try:
        # Any: its annotated type leaves out the loading information.
        loaded: Any = config.model_class.from_pretrained(
            path if tensors is None else None,
            state_dict=tensors,
            config=config.loaded,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            experts_implementation=None,  # a checkpoint could otherwise name code of the hub
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
        )
        model, info = loaded
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an unforeseen value of a field can make any line of a model's code raise
        reason = f"Transformers cannot load it ({type(error).__name__}: {str(error)[:300]})"
        raise CheckpointError(path, reason, SAME_MODEL) from error
    if mismatched := sorted(info["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        what = f"tensor {name} has the shape {list(shape)}, expected {list(expected)}"
        raise CheckpointError(path, what, SAME_MODEL)
    if missing := sorted(map(str, info["missing_keys"])):
        names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        what = f"{len(missing)} tensors are missing: {names}"
        remedy = "config.json must describe these weights, and the checkpoint must be complete"
        raise CheckpointError(path, what, remedy)
    if unknown := sorted(map(str, info["unexpected_keys"])):
        names = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
        if config.is_named_otherwise:
            what = f"{len(unknown)} tensors are not part of {config.architecture}, which its model_type is: {names}"
            remedy = f'set architectures to ["{config.architecture}"] in config.json to serve the model without them'
            raise NotSupported(path, what, remedy)
        log.warning("%s: %d tensors are not part of this model and are not used: %s", path, len(unknown), names)
    done, total, mapped = 0, nbytes_of([*model.parameters()]), mapped_weights(path)
    for name, values in model.named_parameters():
        low, high = values.detach().aminmax()  # reads the mapped file
        done += values.nbytes
        if progress is not None:
            progress(done, total)
        if not (low.isfinite() and high.isfinite()):
            what = f"tensor {name} has values that are not finite as {str(dtype)[6:]}"
            raise CheckpointError(path, what, f"take another --dtype, or {AGAIN}")
    mapped.release_all()
    return model.eval().requires_grad_(False)


def mapped_weights(folder: Path) -> MappedFiles:
    """Return the files of a folder that have weights, which Transformers maps."""
    return MappedFiles(folder.glob("*.safetensors"))


def copy_weights(model: nn.Module) -> None:
    """Copy parameters and buffers into memory one by one: later changes of the mapped file would change the model."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
