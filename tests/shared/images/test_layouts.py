"""The layouts of images give the tokens that the processors of Transformers give."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from quire.shared.images.layouts.families import read_layout
from quire.shared.images.layouts.layout import Layout, LayoutError, NoLayout
from tests.support.image_processors import (
    FAMILIES,
    Family,
    blank,
    make_processor,
    save,
    without_pixels,
    write_files,
)

CASES = [(name, choice) for name, family in FAMILIES.items() for choice in range(len(family.others) + 1)]
# No test reads the values of pixels.
FAST = {"do_rescale": False, "do_normalize": False, "do_convert_rgb": False}


def sizes_of(seed: int, count: int) -> list[tuple[int, int]]:
    """Return widths and heights: small, long, large, and near the sizes of tiles."""
    draw = random.Random(seed)
    sizes = [(1, 1), (1, 300), (300, 1), (28, 5600), (5601, 28), (336, 336), (3000, 4000), (7000, 20)]
    tiles = (14, 28, 224, 336, 364, 384, 448, 512)
    while len(sizes) < count:
        kind = draw.randrange(4)
        if kind == 0:
            sizes.append((draw.randint(1, 60), draw.randint(1, 60)))
        elif kind == 1:
            sizes.append((int(10 ** draw.uniform(0, 3.7)), int(10 ** draw.uniform(0, 3.7))))
        elif kind == 2:
            sizes.append((draw.randint(200, 2500), draw.randint(200, 2500)))
        else:
            near = [draw.choice(tiles) * draw.randint(1, 6) + draw.randint(-1, 1) for _ in range(2)]
            sizes.append((near[0], near[1]))
    return sizes[:count]


def make(folder: Path, family: Family, choice: int) -> tuple[Any, Layout]:
    """Return a processor and the layout of its files. choice: of the fields; 0 for the defaults."""
    images, processor = ({}, {}) if choice == 0 else family.others[choice - 1]
    layout = read_layout(write_files(folder, family, images, processor))
    assert layout is not None
    return make_processor(family, FAST | images, processor), layout


def compare(processor: Any, layout: Layout, sizes: list[tuple[int, int]]) -> bool:
    """Compare a prompt with images of these sizes. Return whether the processor reads them."""
    prompt = "A b\n" + "\n\n".join(f"{number}. {layout.placeholder}\n" for number in range(len(sizes)))
    try:
        with without_pixels():
            found = processor(images=[blank(*size) for size in sizes], text=prompt)["input_ids"]
    except ValueError as error:
        with pytest.raises(LayoutError, match=r"\A.*\Z"):
            pytest.fail(f"{error}: {layout.apply(prompt, sizes)}")
        return False
    tokens = [int(token) for token in found[0]]
    assert processor.tokenizer(layout.apply(prompt, sizes))["input_ids"] == tokens, sizes
    expansions = [layout.expand(*size) for size in sizes]
    assert sum(expansion.num_tokens for expansion in expansions) == tokens.count(layout.image_token_id), sizes
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_has_the_tokens_of_the_processor(name: str, tmp_path: Path) -> None:
    processor, layout = make(tmp_path, FAMILIES[name], 0)
    assert sum(compare(processor, layout, [size]) for size in sizes_of(1, 12)) >= 6


@pytest.mark.soak
@pytest.mark.parametrize(("name", "choice"), CASES)
def test_images_of_many_sizes_have_the_tokens_of_the_processor(name: str, choice: int, tmp_path: Path) -> None:
    processor, layout = make(tmp_path, FAMILIES[name], choice)
    assert sum(compare(processor, layout, [size]) for size in sizes_of(choice, 60)) >= 30


@pytest.mark.parametrize("name", FAMILIES)
def test_several_images_have_the_tokens_of_the_processor(name: str, tmp_path: Path) -> None:
    processor, layout = make(tmp_path, FAMILIES[name], 0)
    assert compare(processor, layout, [(640, 480), (90, 700)])
    assert compare(processor, layout, [(200, 300), (1000, 400), (200, 300)])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.image_class.endswith("Pil")])
def test_a_picture_has_the_tokens_of_the_processor(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    layout = read_layout(write_files(tmp_path, family, {}, {}))
    assert layout is not None
    picture = PIL.Image.new("RGB", (230, 90), (200, 100, 0))
    tokens = make_processor(family, {}, {})(images=[picture], text=layout.placeholder)["input_ids"][0]
    expansion = layout.expand(230, 90)
    assert [int(token) for token in tokens].count(layout.image_token_id) == expansion.num_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_that_transformers_saves_have_the_same_layout(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    images, processor = family.others[0]
    saved = read_layout(save(tmp_path, family, make_processor(family, images, processor)))
    written = read_layout(write_files(tmp_path, family, images, processor))
    assert saved is not None
    assert written is not None
    assert saved.expand(900, 500) == written.expand(900, 500)
    assert (saved.placeholder, saved.image_token_id) == (written.placeholder, written.image_token_id)


def test_a_prompt_has_a_placeholder_for_each_image(tmp_path: Path) -> None:
    layout = read_layout(write_files(tmp_path, FAMILIES["gemma3"], {}, {"image_seq_length": 2}))
    assert layout is not None
    image = "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n"
    assert layout.apply("a <start_of_image>b", [(5, 5)]) == f"a {image}b"
    with pytest.raises(LayoutError, match="the prompt has 1 placeholders for images, and 2 images"):
        layout.apply("a <start_of_image>b", [(5, 5), (6, 6)])


def test_an_image_that_the_processor_refuses_is_named_by_its_size(tmp_path: Path) -> None:
    layout = read_layout(write_files(tmp_path, FAMILIES["qwen2_vl"], {}, {}))
    assert layout is not None
    with pytest.raises(LayoutError, match="cannot read an image of 1 x 201 pixels: one side is more than 200 times"):
        layout.expand(1, 201)


def test_a_model_of_text_has_no_layout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_layout(tmp_path) is None


FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen2_vl", {}, {"processor_class": "MllamaProcessor"}, "no rule for the images of MllamaProcessor"),
    ("qwen2_vl", {"image_processor_type": "OtherProcessor"}, {}, "no rule for the images of OtherProcessor"),
    ("qwen2_vl", {"do_resize": False}, {}, r"preprocessor_config\.json: do_resize is false; supported: true"),
    ("qwen2_vl", {"patch_size": 0}, {}, r"preprocessor_config\.json: patch_size is 0; supported: an integer from 1"),
    ("qwen2_vl", {"size": 448}, {}, "size is 448; supported: shortest_edge and longest_edge"),
    ("qwen2_vl", {"size": {"height": 9}}, {}, 'size is {"height": 9}; supported: a length'),
    ("glm4v", {"size": [20, 30]}, {}, "size is .*; supported: shortest_edge and longest_edge"),
    ("gemma4", {"max_soft_tokens": 71}, {}, "max_soft_tokens is 71; supported: one of 70, 140"),
    ("llava", {}, {"patch_size": None}, "patch_size is null; supported: an integer"),
    ("llava", {}, {"vision_feature_select_strategy": "all"}, "vision_feature_select_strategy is .*; supported"),
    ("llava with CLIP", {"do_pad": True}, {}, "do_pad is true; supported: false"),
    ("llava_next", {"image_grid_pinpoints": [[9]]}, {}, r"image_grid_pinpoints is .*; supported: a list of \[height"),
    ("llava_next", {"image_grid_pinpoints": [[9, 900]]}, {}, "supported: at least the size of a tile, 224 x 224"),
    ("llava_onevision", {}, {"vision_aspect_ratio": "pad"}, 'vision_aspect_ratio is "pad"; supported: anyres_max_N'),
    ("pixtral", {"do_center_crop": True}, {}, "do_center_crop is true; supported: false"),
    ("internvl", {"size": {"shortest_edge": 5}}, {}, "size is .*; supported: height and width"),
    ("idefics3", {"max_image_size": {"height": 5, "width": 5}}, {}, "max_image_size is .*; supported: longest_edge"),
    ("lfm2_vl", {}, {"use_image_special_tokens": False}, "use_image_special_tokens is false; supported: true"),
    ("llama4", {"size": [20, 30]}, {}, "size is .*; supported: a square"),
    ("kimi_k25", {"size": {"max_height": 5, "max_width": 6}}, {}, "size is .*; supported: max_height and max_width"),
    ("phi4_multimodal", {"size": [20, 30]}, {}, "size is .*; supported: a square"),
]


@pytest.mark.parametrize(("name", "images", "processor", "reason"), FAULTS)
def test_a_model_without_a_rule_says_why(
    name: str, images: dict[str, Any], processor: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NoLayout, match=reason):
        read_layout(write_files(tmp_path, FAMILIES[name], images, processor))


def test_a_model_without_the_files_of_its_processor_says_so(tmp_path: Path) -> None:
    folder = write_files(tmp_path, FAMILIES["internvl"], {}, {})
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"start_image_token": None}))
    with pytest.raises(NoLayout, match=r"tokenizer_config\.json: start_image_token is null; supported: the text"):
        read_layout(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(NoLayout, match=r"preprocessor_config\.json is missing or empty"):
        read_layout(folder)
    (folder / "processor_config.json").write_text("[]")
    with pytest.raises(NoLayout, match=r"processor_config\.json is not a JSON object"):
        read_layout(folder)
    for name in ("processor_config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "mllama", "vision_config": {}}))
    with pytest.raises(NoLayout, match="no rule for the images of the model type 'mllama'"):
        read_layout(folder)
