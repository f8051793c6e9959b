"""LLaVA: a token for each patch of the resized and cropped image."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import read_frame

# Class of the image processor to its size, and the length after cropping; 0: not cropped.
SIZES = {
    "LlavaImageProcessor": ({"shortest_edge": 224}, 224),
    "CLIPImageProcessor": ({"shortest_edge": 224}, 224),
    "SiglipImageProcessor": ({"height": 224, "width": 224}, 0),
}


def read(files: ProcessorFiles) -> Layout:
    image_class = files.image_class(*SIZES)
    frame = read_frame(files.images, *SIZES[image_class])
    if files.images.flag("do_pad", False) and image_class != "LlavaImageProcessor":
        raise files.images.unsupported("do_pad", "false")
    is_padded = files.images.flag("do_pad", False)
    patch = files.processor.integer("patch_size")
    others = other_features(files)
    token = files.token("image_token", files.processor_token("image_token", "<image>"))

    def write(width: int, height: int) -> str:
        if isinstance(frame, int):
            if is_padded:
                width = height = max(width, height)
            short, long = sorted((width, height))
            long = int(frame * long / short)
            rows, columns = (frame // patch, long // patch) if height < width else (long // patch, frame // patch)
        else:
            rows, columns = frame[0] // patch, frame[1] // patch
        return token * (rows * columns + others)

    return files.layout(token, write)


def other_features(files: ProcessorFiles) -> int:
    """Return how many features an image has besides its patches: -1 if the tower has no CLS and one is dropped."""
    additional = files.processor.integer("num_additional_image_tokens", 0, minimum=0)
    strategy = files.processor.get("vision_feature_select_strategy")
    if strategy not in ("default", "full", None):
        raise files.processor.fault("vision_feature_select_strategy", '"default" or "full"')
    return additional - 1 if strategy == "default" else additional
