"""Models for sequence classification, called like causal models: logits of labels at the wanted positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.shared.model.fields import Fields
from quire.shared.process.errors import NotSupported


def classifier_class(config: Any, fields: Fields) -> Any:
    """Return a class of Transformers for a configuration, with a `forward` like that of causal models.

    Its own `forward` gives the labels of the last token only. Raises NotSupported for other classes of heads.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.modeling_outputs import CausalLMOutput

    known: Any = AutoModelForSequenceClassification._model_mapping
    own: Any = known.get(type(config), None)
    names = fields.get("architectures")
    if own is None or names != [own.__name__]:
        known_as = "a class that Transformers has" if own is None else own.__name__
        supported = f"{known_as}, as model_type is {config.model_type}; correct the field if that is the model"
        raise fields.unsupported("architectures", supported)

    class Classifier(own):  # type: ignore[misc]
        """The model with its head `score` at the positions `logits_to_keep`."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            if not isinstance(getattr(self, "score", None), nn.Linear):
                what = f"the head of {own.__name__} is not one linear layer after the last token, as that of decoders"
                raise NotSupported(fields.where, what, "take a model for sequence classification of a decoder")

        def forward(self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **given: Any) -> Any:
            hidden = self.base_model(input_ids=input_ids, **given).last_hidden_state
            return CausalLMOutput(logits=self.score(hidden[:, logits_to_keep]))

    Classifier.__name__ = own.__name__
    return Classifier


def as_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return logits of labels [R, L] as those of the first tokens of a vocabulary; no other token is possible."""
    return F.pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)
