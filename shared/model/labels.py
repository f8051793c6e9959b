"""The labels of a model for sequence classification, as config.json names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUFFIX = "ForSequenceClassification"
# Of a configuration that names none (Transformers).
DEFAULT_LABELS = 2
# The fields that these functions read.
FIELDS = ("architectures", "id2label", "num_labels")


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether the architecture of a model is one for sequence classification."""
    names = config.get("architectures")
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0].endswith(SUFFIX)


def num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of labels: those of `id2label`, or the field `num_labels`."""
    labels, count = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return count if type(count) is int and count > 0 else DEFAULT_LABELS
