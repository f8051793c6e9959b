"""Explains why a model folder cannot be served: the format that was found, and the remedy.

Gateway and worker read the format of Hugging Face, `config.json`, `tokenizer.json` and `model*.safetensors`, and GGUF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from quire.shared.model.gguf.parts import model_stem, part_paths

CONFIG, TOKENIZER, ADAPTER = "config.json", "tokenizer.json", "adapter_config.json"
TEKKEN, SENTENCE_PIECES = "tekken.json", "tokenizer.model"
GGUF = ".gguf"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_MERGE = "peft's merge_and_unload(), then save_pretrained() of the model and of its tokenizer to a new folder"


class ModelFolderFault(NamedTuple):
    """One line of an error: the place, the fault and the remedy, without a full stop."""

    where: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return " ".join(f"{self.where}: {self.what}; {self.remedy}".split())


def find_fault(folder: Path) -> ModelFolderFault | None:
    """Return a fault if the folder holds an adapter, or another format instead of `config.json`.

    None for a folder with a `config.json` and without an adapter, and for a folder of no known format. Weights are not
    checked: a gateway does not need them.
    """
    if not folder.is_dir():
        return None
    if (folder / ADAPTER).exists():
        return _adapter(folder)
    if (folder / CONFIG).exists():
        return None
    return _of_other_format(folder)


def weights_fault(folder: Path) -> ModelFolderFault:
    """Return the fault of a folder that has neither `model.safetensors` nor its index."""
    if fault := _of_other_format(folder):
        return fault
    if _names(folder, "*.safetensors"):
        what = f"found {', '.join(_names(folder, '*.safetensors')[:3])} but neither {WEIGHTS} nor {INDEX}"
        return ModelFolderFault(folder, what, "add the index, or save the model as one file")
    if _names(folder, "*.bin", "*.pth", "*.pt"):
        what = "the weights are in a pickle format (.bin, .pth or .pt), which can run code when it is read"
        convert = _python("AutoModelForCausalLM", f"from_pretrained('{folder}', dtype='auto')", folder)
        return ModelFolderFault(folder, what, f"convert them to safetensors, if you trust their author: {convert}")
    remedy = (
        "give the folder of a complete Hugging Face checkpoint; weights of other formats (.bin) are neither "
        "downloaded nor read"
    )
    return ModelFolderFault(folder, f"there is no {WEIGHTS}", remedy)


def tokenizer_fault(folder: Path) -> ModelFolderFault:
    """Return the fault of a folder without a tokenizer file that is read. The remedy makes one from those it has.

    A `tokenizer.model` counts as a tokenizer that is not read: some kinds of it are not.
    """
    sources = {
        "tokenizer.model": "sentencepiece",
        "tiktoken.model": "tiktoken",
        "vocab.json": "",
        "vocab.txt": "",
    }
    present = [name for name in sources if (folder / name).exists()]
    if not present:
        what = "tokenizer.json is missing, and so is any other file of a tokenizer"
        remedy = "copy tokenizer.json and tokenizer_config.json from the repository of the model or of its base model"
        return ModelFolderFault(folder, what, remedy)
    packages = " ".join(["transformers", sources[present[0]]]).strip()
    convert = _python("AutoTokenizer", f"from_pretrained('{folder}')", folder)
    what = f"tokenizer.json is missing: the folder has the tokenizer as {present[0]}, which is not read"
    return ModelFolderFault(folder, what, f"make one: {convert} (pip install {packages})")


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its name."""
    return path.suffix.lower() == GGUF and path.is_file()


def gguf_name(path: Path) -> str:
    """Return the name of the model in a GGUF file."""
    return model_stem(path)


def gguf_files(path: Path) -> list[Path]:
    """Return the files of the model in a GGUF file: all parts of a split one, of which some may be missing."""
    return part_paths(path)


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that holds one in place of `config.json`; None for other folders."""
    names = _gguf_names(folder)
    has_others = _names(folder, CONFIG, ADAPTER, "*.safetensors")
    return folder / names[0] if len(names) == 1 and not has_others else None


def _gguf_names(folder: Path) -> list[str]:
    """Return the GGUF files of a folder, of a split model its first part.

    Projectors of images (mmproj) are left out, because they are no models.
    """
    names = [name for name in _names(folder, "*.gguf") if "mmproj" not in name.lower()]
    return [name for name in names if (first := part_paths(Path(name))[0].name) == name or first not in names]


def _gguf_fault(folder: Path) -> ModelFolderFault:
    """Return the fault of a folder with several GGUF files, or with GGUF files as the weights of a `config.json`."""
    names = _gguf_names(folder)
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if len(names) > 1:
        remedy = f"give one of them as the model, such as {folder / names[0]}"
        return ModelFolderFault(folder, f"the folder holds several GGUF files, {listed}", remedy)
    what = f"the folder holds {CONFIG}, no safetensors files and {listed}"
    return ModelFolderFault(folder, what, f"give the file as the model: {folder / names[0]}")


def _of_other_format(folder: Path) -> ModelFolderFault | None:
    if _gguf_names(folder) and not _names(folder, "model*.safetensors") and find_gguf(folder) is None:
        return _gguf_fault(folder)
    original = _names(folder, "consolidated*.safetensors", "consolidated*.pth")
    if original and not _names(folder, "model*.safetensors"):
        script = f"convert_{'llama' if original[0].endswith('.pth') else 'mistral'}_weights_to_hf.py"
        with_parameters = "params.json and " if (folder / "params.json").exists() else ""
        what = f"{with_parameters}{original[0]} are in the format of the model's authors, which is not read"
        remedy = (
            "give the same model in the format of Hugging Face: download config.json, tokenizer.json and "
            f"model*.safetensors of its repository, or convert it with {script} of the sources of Transformers"
        )
        return ModelFolderFault(folder, what, remedy)
    return None


def _adapter(folder: Path) -> ModelFolderFault:
    weights = _names(folder, "*.safetensors", "*.bin")
    has_own = any(name.startswith("adapter_model") for name in weights)
    is_alone = has_own and all(name.startswith("adapter_model") for name in weights)
    if is_alone or not (folder / CONFIG).exists():
        base = _base_of(folder)
        what = f"this folder holds an adapter (LoRA){base} and no model"
        return ModelFolderFault(
            folder / ADAPTER,
            what,
            f"serve its base model and give this folder to --lora, or merge both ({_MERGE}) and serve that folder",
        )
    what = "this folder holds a model and an adapter (LoRA)"
    remedy = (
        f"merge the adapter into the model ({_MERGE}), give it to --lora from a folder of its own, or remove this "
        "file to serve the base model without it"
    )
    return ModelFolderFault(folder / ADAPTER, what, remedy)


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ""
    return f" of {base[:100]}" if isinstance(base, str) and base else ""


def _names(folder: Path, *patterns: str) -> list[str]:
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern)})


def _python(what: str, call: str, folder: Path) -> str:
    """Return a shell command that writes the missing files into the folder."""
    return f"python -c \"from transformers import {what}; {what}.{call}.save_pretrained('{folder}')\""
