"""The models of one `quire serve`: the places and the names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.shared.config.command_line import CommandError
from quire.shared.model.model_argument import resolve_model
from quire.shared.model.naming import InvalidModelName, served_name


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that `quire serve` starts workers of. place: its folder, file or Hugging Face name. name: for clients."""

    place: str
    name: str


def split_models(text: str) -> list[str]:
    """Return the models in the setting MODEL. A path that exists is one model, even if it has a comma."""
    if Path(text).expanduser().exists():
        return [text]
    return [name for name in map(str.strip, text.split(",")) if name] or [text]


def resolve_models(text: str) -> str:
    """Return the setting MODEL with the absolute path of each folder. Raise CommandError."""
    return ",".join(map(resolve_model, split_models(text)))


def read_models(text: str, names: str) -> list[LocalModel]:
    """Return the models in the settings MODEL and --served-model-name. Raise CommandError."""
    places = split_models(text)
    given = [name.strip() for name in names.split(",")] if len(places) > 1 and names else [names] * len(places)
    if len(given) != len(places):
        raise CommandError(
            f"--served-model-name (QUIRE_SERVED_MODEL_NAME) has {len(given)} names for {len(places)} models; give a "
            "name for each model, separated by commas, or none"
        )
    try:
        models = [LocalModel(place, served_name(place, name)) for place, name in zip(places, given, strict=True)]
    except InvalidModelName as error:
        raise CommandError(str(error)) from error
    listed = [model.name for model in models]
    if twice := sorted({name for name in listed if listed.count(name) > 1}):
        raise CommandError(
            f"two models have the name {twice[0]!r}: name them with --served-model-name NAME,NAME, or start one "
            "of them with more --workers"
        )
    return models
