"""The examination of a model with images at start: a miniature of it must answer as Transformers does.

The miniature (`quire.worker.models.vision.miniature`) is computed in float32 on the CPU, by the engine and by
`generate` of Transformers, so that the weights of the model are never in memory twice.
"""

from __future__ import annotations

import hashlib
import io
import logging
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from quire import kernels
from quire.shared.protocol.logprobs import read_records
from quire.shared.protocol.messages import Delta, GenerationRequest, ImageRef, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.images import make_embedder
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.choice import choose_model, load_model

if TYPE_CHECKING:
    from quire.worker.models.vision.miniature import Miniature

log = logging.getLogger(__name__)

NUM_TOKENS = 8
# Images of (width, height) pixels.
SIZES = ((75, 50), (40, 64))
# Largest distance of a log-probability, and of two tokens that may be chosen for each other.
FAR, TIE = 0.05, 0.01
BLOCK_SIZE = 16
QUIET = ("quire.worker.models", "quire.worker.engine")


def examine_images(checkpoint: Path, implementation: str, model: PagedModel) -> None:
    """Let a model serve text alone, with the reason, if its images are not computed as Transformers computes them.

    implementation: of `choose_model`.
    """
    if model.num_ranks > 1:
        _serve_text_alone(model, "images need --tensor-parallel-size 1")
    if model.tower is None:
        return
    began = time.perf_counter()
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)  # the lines of a miniature are not those of the model
    try:
        why = _fault(checkpoint, implementation)
    finally:
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.NOTSET)
    if why:
        _serve_text_alone(model, why)
    else:
        log.info("images: a small model answers as with Transformers; %.1f s", time.perf_counter() - began)


def _serve_text_alone(model: PagedModel, why: str) -> None:
    model.tower, model.why_no_images = None, f"this worker computes no images: {why}"
    log.warning("this worker serves text alone: %s", why)


def _fault(checkpoint: Path, implementation: str) -> str:
    """Return the fault of the images of a checkpoint; "" without one, or if no miniature can be made."""
    from quire.worker.models.vision.miniature import write_miniature  # Pillow and Transformers take memory

    why = ""
    for is_narrow in (True, False):  # the widths of some towers depend on each other
        try:
            with TemporaryDirectory(prefix="quire-images-") as folder:
                return _difference(write_miniature(checkpoint, Path(folder), is_narrow), implementation)
        except Exception as error:  # an unforeseen value of a field can make any line of a model's code raise
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            log.debug("a miniature of %s cannot be examined", checkpoint, exc_info=True)
    log.warning("images are served, and a small model of this configuration could not be examined (%s)", why)
    return ""


def _difference(miniature: Miniature, implementation: str) -> str:
    """Compare the answers of a miniature. Returns how they differ; "" if they do not."""
    from PIL import Image

    from quire.worker.models.vision.miniature import answer_by_transformers
    from quire.worker.models.vision.tower import VisionTower

    ops, config = kernels.select_ops("cpu", torch.float32), choose_model(miniature.folder, implementation)
    model = load_model(miniature.folder, config, ops, torch.device("cpu"), 0)
    tower = model.tower
    if not isinstance(tower, VisionTower):
        raise ValueError(model.why_no_images)
    draw = random.Random(0)
    pictures = [Image.frombytes("RGB", (8, 8), draw.randbytes(192)).resize(size) for size in SIZES]
    files: dict[str, bytes] = {}
    prompt, images = draw.choices(miniature.tokens, k=5), list[ImageRef]()
    for picture in pictures:
        picture.save(out := io.BytesIO(), "PNG")
        digest = hashlib.sha256(out.getvalue()).hexdigest()
        files[digest] = out.getvalue()
        length = len(tower.embed([out.getvalue()])[0])
        if images and len(prompt) + length + 2 * NUM_TOKENS > model.max_model_len:
            break
        images.append(ImageRef(digest, len(prompt), length))
        prompt += [tower.image_token_id] * length + draw.choices(miniature.tokens, k=4)
    expected = answer_by_transformers(miniature.folder, tower, prompt, pictures[: len(images)], NUM_TOKENS)
    num_blocks = -(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE) + 4
    # A chunk ends inside of the second image, unless chunks may not.
    tokens = max(image.end for image in images) - min(image.length for image in images) // 2
    slots = 2 if model.state_bytes else 0
    limits = EngineLimits(num_blocks, BLOCK_SIZE, 2, tokens, model.max_model_len, num_state_slots=slots)
    engine = Engine(model, limits, (), None)
    engine.images = make_embedder(model, limits)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=True)
    engine.add(GenerationRequest("images", "", tuple(prompt), sampling, images=tuple(images)), pictures=files)
    deltas: list[Delta] = []
    while engine.has_work:
        for item in engine.step():
            if item.outcome is not None and item.outcome.detail:
                return f"an image cannot be computed: {item.outcome.detail}"
            deltas += item.deltas
    if not expected.logprobs.isfinite().all():
        raise ValueError("its random weights give numbers that are not finite")
    found = [token for delta in deltas for token in delta.token_ids]
    records = read_records(b"".join(delta.logprobs or b"" for delta in deltas), len(found))
    for at, (token, record) in enumerate(zip(found, records, strict=True)):
        by_transformers = expected.logprobs[at]
        apart = abs(record.logprob - float(by_transformers[token]))
        if not apart < FAR:
            return f"the log-probability of token {at} after an image differs from that of Transformers by {apart:.2g}"
        if token != expected.tokens[at]:
            gap = float(by_transformers.max() - by_transformers[token])
            return f"token {at} after an image is not that of Transformers" if gap > TIE else ""
    return "" if len(found) == NUM_TOKENS else f"an answer about an image ends after {len(found)} tokens"
