"""Devices, the options that they allow, and the range of a narrow cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quire import kernels
from quire.shared.model.fields import Fields
from quire.shared.process.errors import StartError
from quire.worker.device import devices
from quire.worker.device.cache_range import warn_of_saturation
from quire.worker.models.files.quantized.config import parse_quantization
from quire.worker.models.native.config import ModelConfig, read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import TransformersConfig, read_transformers_config
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import FORMATS, STORED_AS
from tests.support.transformers_checkpoints import make_kind
from tests.worker.models.test_kv_scales import FP8, LARGE, with_large_keys

# --- a worker selects its device and dtype, and reports an unsuitable choice in one line ------------------------------

FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("name", "device"), [("auto", CUDA), ("cuda", CUDA), ("cpu", CPU)])
def test_auto_takes_a_gpu_if_there_is_one(name: str, device: torch.device) -> None:
    assert devices.choose_device(name) == device


def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto") == CPU
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartError, match="install its CUDA build"):
        devices.choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(StartError, match="CUDA_VISIBLE_DEVICES"):
        devices.choose_device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "fp8"),
    [((9, 0), torch.bfloat16, True), ((8, 0), torch.bfloat16, False), ((7, 5), torch.float16, False)],
)
def test_a_gpu_computes_in_the_best_dtype_that_it_has(
    capability: tuple[int, int], dtype: torch.dtype, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert devices.choose_dtype("auto", CUDA) is dtype
    assert devices.choose_dtype("float32", CUDA) is torch.float32
    assert devices.has_fp8(CUDA) is fp8
    if dtype is torch.float16:
        with pytest.raises(StartError, match=r"needs compute capability 8\.0, and this GPU has 7\.5"):
            devices.choose_dtype("bfloat16", CUDA)


def test_a_cpu_computes_in_bfloat16_if_its_kernels_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert devices.choose_dtype("float32", CPU) is torch.float32
    with pytest.raises(StartError, match="float16 is for GPUs"):
        devices.choose_dtype("float16", CPU)
    monkeypatch.setattr(kernels, "CpuOps", lambda dtype: None)
    assert devices.choose_dtype("auto", CPU) is torch.bfloat16

    def missing(dtype: torch.dtype) -> None:
        raise kernels.KernelsUnavailable("no compiler")

    monkeypatch.setattr(kernels, "CpuOps", missing)
    with caplog.at_level("INFO"):
        assert devices.choose_dtype("auto", CPU) is torch.float32
        assert "--dtype auto: activations are float32" in caplog.text
        assert devices.choose_dtype("bfloat16", CPU) is torch.bfloat16
    (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "--dtype bfloat16 is slow here" in warning.message


def test_activations_of_quantised_weights_are_float32_on_every_cpu() -> None:
    for name in ("auto", "float32"):
        assert devices.choose_dtype(name, CPU, quantized=True) is torch.float32
    with pytest.raises(StartError, match="--dtype bfloat16 does not go with --quantization"):
        devices.choose_dtype("bfloat16", CPU, quantized=True)


def test_weights_are_rounded_on_load_on_cpus_and_where_transformers_computes_in_one_process() -> None:
    other = TransformersConfig(Path(), "GptForCausalLM", False, 8, 8, (), 1, 1, None, None)
    stored = replace(other, quantization=parse_quantization(Fields(FP8_CONFIG, "config.json")))
    for name, bits in (("none", 0), ("int8", 8), ("int4", 4)):
        settings = WorkerSettings(quantization=name)
        assert devices.quantized_bits(settings) == bits
        devices.check_quantization(settings, CPU, other)
        if not bits:
            devices.check_quantization(settings, CUDA, other)
            devices.check_quantization(settings, CUDA, stored)
            continue
        with pytest.raises(StartError, match=f"--quantization {name} is for CPUs"):
            devices.check_quantization(settings, CUDA, other)
        with pytest.raises(StartError, match=f"--quantization {name}: GptForCausalLM is computed by Transformers"):
            devices.check_quantization(replace(settings, tensor_parallel_size=2), CPU, other)
        with pytest.raises(StartError, match=rf"--quantization {name}: the weights .* are quantised already \(FP8\)"):
            devices.check_quantization(settings, CPU, stored)
    with pytest.raises(StartError, match="--quantization fp8: the weights of the model are quantised already"):
        devices.check_quantization(WorkerSettings(quantization="fp8"), CPU, stored)


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 6), True), ((8, 9), False), ((12, 0), False)])
def test_fp8_products_need_a_gpu_that_has_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config, settings = Mock(spec=ModelConfig, quantization=None), WorkerSettings(quantization="fp8-dynamic")
    assert devices.quantized_bits(settings) == "fp8"
    assert not devices.has_integers(settings, CUDA, config)
    if is_refused:
        with pytest.raises(StartError, match=r"needs compute capability 8.9, and this GPU has 8.6; take .* fp8, which"):
            devices.check_quantization(settings, CUDA, config)
        return
    devices.check_quantization(settings, CUDA, config)
    with pytest.raises(StartError, match=r"fp8-dynamic is for GPUs: on a CPU take --quantization int8"):
        devices.check_quantization(settings, CPU, config)
    for fields, flag in (({"batch_invariant": True}, "--batch-invariant"), ({"kernels": "reference"}, "--kernels")):
        with pytest.raises(StartError, match=f"fp8-dynamic does not go with {flag}"):
            devices.check_quantization(replace(settings, **fields), CUDA, config)


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_fp8_products_take_only_weights_with_a_scale_per_channel_or_tensor(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    stored = {"quant_method": "mxfp4"} if name == "mxfp4" else FORMATS[name][1]
    quantization = parse_quantization(Fields({"quantization_config": stored}, "config.json"))
    config, settings = Mock(spec=ModelConfig, quantization=quantization), WorkerSettings(quantization="fp8-dynamic")
    if STORED_AS.get(name) != "fp8":
        with pytest.raises(StartError, match=r"fp8-dynamic: .* quantised already .*; leave it out"):
            devices.check_quantization(settings, CUDA, config)
    elif getattr(quantization, "block", ()):
        with pytest.raises(StartError, match=r"fp8-dynamic: .* have scales per block of \d+x\d+, .*; leave it out"):
            devices.check_quantization(settings, CUDA, config)
    else:
        devices.check_quantization(settings, CUDA, config)


def test_quantised_gguf_files_are_not_quantised_again(tmp_path: Path) -> None:
    from quire.ops.tools.gguf_writer import write_gguf

    folder = make_checkpoint(tmp_path / "model", "qwen2")
    settings = WorkerSettings(quantization="int4")
    devices.check_quantization(settings, CPU, read_config(write_gguf(folder, tmp_path / "f16.gguf", "F16")))
    file = write_gguf(folder, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(StartError, match=r"--quantization int4: .* quantised already \(GGUF, Q8_0\); leave it out"):
        devices.check_quantization(settings, CPU, read_config(file))


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_quantised_checkpoints_are_not_quantised_again(name: str) -> None:
    """Each format takes only the value that names what it stores."""
    stored = {"quant_method": "mxfp4"} if name == "mxfp4" else FORMATS[name][1]
    quantization = parse_quantization(Fields({"quantization_config": stored}, "config.json"))
    config = Mock(spec=ModelConfig, quantization=quantization)
    for value in ("none", "int8", "int4", "fp8"):
        settings = WorkerSettings(quantization=value)
        if value in ("none", STORED_AS.get(name)):
            devices.check_quantization(settings, CPU, config)
            continue
        with pytest.raises(
            StartError, match=f"--quantization {value}: .* quantised already .*; leave it out"
        ) as caught:
            devices.check_quantization(settings, CPU, config)
        assert quantization is not None
        assert f"({quantization.label})" in str(caught.value)


@pytest.mark.parametrize("second", ["float", "int"])
def test_layers_of_several_formats_take_a_value_that_names_all(second: str) -> None:
    def weights(bits: int, kind: str, target: str) -> dict[str, Any]:
        return {"targets": [target], "weights": {"num_bits": bits, "type": kind, "strategy": "channel"}}

    groups = {"one": weights(8, "int", "re:.*mlp.*"), "other": weights(8, second, "re:.*self_attn.*")}
    stored = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    quantization = parse_quantization(Fields({"quantization_config": stored}, "config.json"))
    assert quantization is not None
    assert quantization.stored_as == ("int8" if second == "int" else "")


def test_the_log_names_the_card_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.describe(CPU) == "CPU"
    card = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert devices.describe(CUDA) == "NVIDIA H200 (141 GiB)"


@pytest.mark.parametrize(
    ("device", "dtype", "quantization", "rounds", "expected"),
    [
        (CPU, "auto", "none", True, True),
        (CPU, "float32", "none", True, True),
        (CPU, "bfloat16", "none", True, False),
        (CPU, "auto", "none", False, False),
        (CPU, "auto", "int4", False, True),
        (CUDA, "auto", "none", True, False),
    ],
)
def test_integers_of_a_checkpoint_make_activations_float32(
    device: torch.device, dtype: str, quantization: str, rounds: bool, expected: bool
) -> None:
    settings = WorkerSettings(model="m", dtype=dtype, quantization=quantization)
    config = Mock(spec=ModelConfig, quantization=SimpleNamespace(rounds_activations=rounds))
    assert devices.has_integers(settings, device, config) is expected
    config.quantization = None
    assert devices.has_integers(settings, device, config) is (quantization != "none")


# --- a worker says at start if keys or values are too large for an FP8 cache ------------------------------------------


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("kv_dtype", "scales", "is_warned"),
    [(FP8, {}, True), (FP8, LARGE, False), (None, {}, False), (torch.int8, {}, False)],
    ids=["too-large", "with-scales", "wide-cache", "int8"],
)
def test_large_keys_are_reported_unless_they_have_scales_or_a_wide_cache(
    implementation: str,
    kv_dtype: torch.dtype | None,
    scales: dict[str, float],
    is_warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = with_large_keys(make_checkpoint(tmp_path / "a", "llama"), tmp_path / "b", scales)
    ops = kernels.select_ops("cpu", torch.float32, implementation, kv_dtype)
    model = Decoder.load(path, ops, torch.float32, "cpu")
    caplog.clear()
    warn_of_saturation(model, 16)
    layers = model.config.num_layers
    expected = f"--kv-cache-dtype fp8: keys or values of {layers} of {layers} layers exceed 448, "
    assert [line.startswith(expected) for line in caplog.messages] == [True] * is_warned


def test_models_of_transformers_are_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ops = kernels.select_ops("cpu", torch.float32, "cpu", FP8)
    model = TransformersModel.load(read_transformers_config(make_kind(tmp_path, "gpt2")), ops, "cpu")
    caplog.clear()
    warn_of_saturation(model, 16)
    assert caplog.messages == []
