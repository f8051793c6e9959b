"""Loads a model from the files that its workers have registered in Redis."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quire.gateway.model.model_trial import try_out
from quire.gateway.model.scoring import ScoreSettings
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.settings import GatewaySettings
from quire.shared.process.errors import StartError
from quire.shared.protocol.broker.models import ModelRegistry
from quire.shared.protocol.messages import MessageError
from quire.shared.protocol.messages.manifest import ModelManifest
from quire.shared.protocol.registered_files import CONFIG, TOKENIZER


class RegistrationFault(Exception):
    """A registered model cannot be served. The text is the cause, without the name of the model."""


async def load_registered(registry: ModelRegistry, manifest: ModelManifest, settings: GatewaySettings) -> ServedModel:
    """Fetch the files of a model, try them in a process of their own, and load them.

    Raises RegistrationFault, and RedisError or OSError if Redis does not answer.
    """
    names = {entry.name for entry in manifest.files}
    if missing := sorted({CONFIG, TOKENIZER} - names):
        raise RegistrationFault(f"the registration lacks {', '.join(missing)}")
    contents = {}
    for entry in manifest.files:
        try:
            contents[entry.name] = await registry.read(entry)
        except MessageError as error:
            raise RegistrationFault(str(error)) from error
    return await asyncio.to_thread(_load, manifest, contents, settings)


def _load(manifest: ModelManifest, contents: Mapping[str, bytes], settings: GatewaySettings) -> ServedModel:
    try:
        with tempfile.TemporaryDirectory(prefix="quire-model-") as place:
            folder = Path(place)
            for name, content in contents.items():
                # The names are those of FILE_LIMITS, so no path leads out of the folder.
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            if fault := try_out(folder):
                raise RegistrationFault(fault.replace(f"{folder}/", ""))
            return load_model(
                str(folder),
                manifest.model,
                settings.generation_config == "auto",
                settings.tool_call_format,
                settings.reasoning_format,
                manifest.aliases,
                ScoreSettings(settings.score_texts, settings.score_template),
            )
    except StartError as error:
        raise RegistrationFault(str(error).replace(f"{folder}/", "")) from error
    except OSError as error:
        raise RegistrationFault(f"its files cannot be written to {tempfile.gettempdir()}: {error}") from error
