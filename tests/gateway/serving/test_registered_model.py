"""Loading a model from its registration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.gateway.serving.registered_model import RegistrationFault, load_registered
from quire.gateway.settings import GatewaySettings
from quire.shared.messages.manifest import FileEntry, ModelManifest
from tests.support.gateway.running import write_model
from tests.support.registrations import open_registry, register
from tests.support.tokenizers import byte_level


async def test_a_registered_model_is_that_of_the_folder(redis_url: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    manifest = await register(redis_url, "name", folder, "alias")
    shutil.rmtree(folder)
    async with open_registry(redis_url) as registry:
        model = await load_registered(registry, manifest, GatewaySettings())
        assert (model.name, model.aliases, model.max_model_len) == ("name", ("alias",), 512)
        assert model.tokenizer.encode("Hi").ids == byte_level().encode("Hi").ids
        assert model.template is not None
        assert model.eos_token_ids == {2}
        kept = [entry for entry in manifest.files if entry.name != "tokenizer.json"]
        lost = ModelManifest("name", (), (*kept, FileEntry("tokenizer.json", "0" * 64, 5)))
        with pytest.raises(RegistrationFault, match="Redis has 0"):
            await load_registered(registry, lost, GatewaySettings())
