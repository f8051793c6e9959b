"""The hidden states of a model that Transformers computes: `last_hidden_state` of the model below the head."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch import nn


def body_of(model: Any) -> nn.Module | None:
    """Return the model below the head of a transformers.PreTrainedModel; None if the model has no such part."""
    # `base_model` is what AutoModel loads, but some models, such as OPT, call only the decoder in it.
    get_decoder = getattr(model, "get_decoder", None)
    for body in (get_decoder() if callable(get_decoder) else None, getattr(model, "base_model", None)):
        if isinstance(body, nn.Module) and body is not model:
            return body
    return None


class HiddenStates:
    """Keeps the hidden states of the calls of a model during a `with` block.

    body: of `body_of`.
    """

    def __init__(self, body: nn.Module) -> None:
        self._body = body
        self._last: torch.Tensor | None = None

    def __enter__(self) -> Self:
        self._hook = self._body.register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _keep(self, _: nn.Module, __: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        self._last = hidden if isinstance(hidden, torch.Tensor) else None

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [R, H] of these tokens, int64 [R], of the last call.

        Raises RuntimeError if the model gave none for a batch of one text.
        """
        if self._last is None or self._last.dim() != 3 or self._last.shape[0] != 1:
            raise RuntimeError("the model gives no hidden states of its tokens")
        return self._last[0][rows]
