"""Image processors that Transformers has for torchvision alone give the same pixels without torchvision.

The digests are those of torchvision 0.28.0. Where torchvision is installed, `digest` computes with it.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.worker.models.vision.families import ARGUMENTS, FOR_TORCHVISION
from quire.worker.models.vision.torchvision_functions import image_processor_class

pytest.importorskip("transformers")

# Fields of the image processor, so that images are small and have several tiles.
FIELDS: dict[str, dict[str, Any]] = {
    "Cohere2VisionProcessor": {"size": {"height": 56, "width": 56}, "max_patches": 5},
    "Kimi_K25Processor": {"max_patches": 60},
    "Lfm2VlProcessor": {"tile_size": 64, "min_image_tokens": 2, "max_image_tokens": 8},
    "Llama4Processor": {"size": {"height": 56, "width": 56}, "max_patches": 5},
    "MiniMaxM3VLProcessor": {"size": {"shortest_edge": 784, "longest_edge": 40_000}},
}
DIGESTS = {
    "Cohere2VisionProcessor": "fcbd96b15a21ba639c49370947ad44ad6188c78a8ce8145d9ebc3c8dc0a7616c",
    "Kimi_K25Processor": "f4e5b2346fcb035f4e5cb16a72b3e45a6366e65d7b08332d9885112b7b995315",
    "Lfm2VlProcessor": "4919f120f4b9127c4cbb3eda6a5aa856b31490701bdfed8a91fe83dd25b0006e",
    "Llama4Processor": "7614a28b150144794f092f60d3611efea00c9b7e38cb32a7ff34ee183f3bd2df",
    "MiniMaxM3VLProcessor": "8c956177b94385c4d152c62a4706254206e304849805fce026bd5106eb9981c3",
}


def digest(name: str) -> str:
    """Return the SHA-256 of what an image processor gives for images of several sizes."""
    processor = image_processor_class(*FOR_TORCHVISION[name]).from_dict(FIELDS[name])
    draw, found = random.Random(1), hashlib.sha256()
    for seed in range(6):
        size = draw.randint(20, 300), draw.randint(20, 300)
        cells = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        picture = Image.fromarray(cells).resize(size, Image.Resampling.NEAREST)
        made = processor(images=[picture], return_tensors="pt", **ARGUMENTS[name])
        for part in (made[key] for key in sorted(made)):
            values = torch.as_tensor(part)
            found.update(f"{values.dtype} {tuple(values.shape)}".encode())
            found.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", FOR_TORCHVISION)
def test_pixels_are_those_of_torchvision(name: str) -> None:
    assert digest(name) == DIGESTS[name]
