"""Images of prompts: their embeddings, which take the places of image tokens, and their part in hashes of blocks.

The first step that computes a token of an image computes its embeddings. A cache of bounded size keeps embeddings and
drops the least recently used; those that are not in the cache are computed again. A group keeps those of an image of
which a step has computed only a part, so that each chunk of a prompt finds them.

A chunk ends before an image for which the tower may not run in this step (`tower_pacer`). Later prompts of the queue
take the rest of the token budget.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.shared.protocol.messages import GenerationRequest, ImageRef
from quire.worker.engine.features.tower_pacer import TowerPacer
from quire.worker.engine.forward_batch import TokenEmbeddings
from quire.worker.engine.image_counters import ImageCounters
from quire.worker.engine.limits import IMAGE_CACHE_BYTES, MAX_SCORED_POSITIONS, EngineLimits, RequestRefused
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.engine.paged_model import ImageTower, PagedModel
from quire.worker.engine.step import Step
from quire.worker.engine.transfers import send

log = logging.getLogger(__name__)


class ImagePart(NamedTuple):
    """Embeddings first .. end - 1 of an image of a prompt."""

    image: int  # its index in the prompt
    first: int
    end: int


class PromptImages:
    """The images of a group's prompt. A prompt without image tokens in the span of an image is refused."""

    def __init__(
        self,
        images: Sequence[ImageRef],
        prompt: Sequence[int],
        tower: ImageTower,
        files: Mapping[str, bytes],
        turns: TowerTurns,
    ):
        """Raises RequestRefused. files: of the images, by digest."""
        self._turns = turns
        token_id = tower.image_token_id
        tokens = np.array(prompt)
        found: list[np.ndarray] = []
        for image in images:
            if image.digest not in files:
                raise RequestRefused(f"the file of the image {image.digest} is missing")
            if image.end > len(prompt):
                raise RequestRefused(f"an image ends at token {image.end} of a prompt of {len(prompt)} tokens")
            found.append(image.start + np.flatnonzero(tokens[image.start : image.end] == token_id))
            if not len(found[-1]):
                raise RequestRefused(f"the tokens {image.start} to {image.end - 1} of an image have no image token")
        self.digests = [image.digest for image in images]
        self.files = {digest: files[digest] for digest in self.digests}
        self.sizes = [len(positions) for positions in found]
        # The index of each image token in the prompt, and for each image the number of image tokens before it.
        self._positions = np.concatenate(found)
        self._starts = np.cumsum([0, *self.sizes])
        # The ends of the images, if their tokens attend to each other in both directions.
        self._ends: np.ndarray | None = None
        if tower.most_whole:
            self._check_runs(tower.most_whole)
            self._ends = self._positions[self._starts[1:] - 1] + 1
        # Positions for RoPE, if image tokens have three axes: of the prompt, and of its image tokens [N, 3].
        self._prompt_positions: np.ndarray | None = None
        self.axes: np.ndarray | None = None
        self.offset = 0
        try:
            grids = [tower.grid(self.files[digest]) for digest in self.digests]
        except Exception as error:  # a decoder may raise anything
            raise RequestRefused(f"an image cannot be read: {error}") from error
        if has_grids := [grid for grid in grids if grid is not None]:
            self._place(len(prompt), has_grids)
        # The embeddings of the image in whose middle the last chunk has ended.
        self.held: tuple[int, torch.Tensor] | None = None

    def _check_runs(self, most: int) -> None:
        """Raise RequestRefused unless the image tokens of each image are in a row, with text before the next image.

        Then the image alone, which hashes of blocks contain, decides what its tokens see. most: tokens of an image.
        """
        if max(self.sizes) > most:
            raise RequestRefused(
                f"an image of the prompt has {max(self.sizes)} image tokens, and images of this model have at most "
                f"{most}: gateway and worker must have the files of the same model"
            )
        begins = np.flatnonzero(np.diff(self._positions) != 1) + 1
        if not np.array_equal(begins, self._starts[1:-1]):
            raise RequestRefused("the image tokens of each image must be in a row, with text between two images")

    def _place(self, length: int, grids: list[tuple[int, int]]) -> None:
        """Compute the positions of a prompt of `length` tokens. grids: rows and columns of the tokens of each image.

        The tokens of an image have one position in time, and those of their row and column from there on. The text
        after it begins where the longer side ends.
        """
        steps, axes = np.ones(length, dtype=np.int32), []
        for image, (rows, columns) in enumerate(grids):
            own = self._positions[self._starts[image] : self._starts[image + 1]]
            if len(own) != rows * columns or own[-1] - own[0] != len(own) - 1:
                raise RequestRefused(
                    f"image {image} of the prompt has {len(own)} image tokens, and must have {rows} x {columns} of "
                    "them in a row: gateway and worker must have the files of the same model"
                )
            steps[own] = 0
            steps[own[-1]] = max(rows, columns)
        begins = np.concatenate([[0], np.cumsum(steps)]).astype(np.int32)
        for image, (rows, columns) in enumerate(grids):
            grid = np.stack(np.meshgrid(0, np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
            axes.append(grid.reshape(-1, 3) + begins[self._positions[self._starts[image]]])
        self._prompt_positions, self.axes = begins[:-1], np.concatenate(axes)
        self.offset = int(begins[-1]) - length

    def positions(self, first: int, end: int) -> np.ndarray:
        """Return the positions for RoPE of tokens first .. end - 1 of a sequence, int32; of image tokens, any."""
        if self._prompt_positions is None:
            return np.arange(first, end, dtype=np.int32)
        after = np.arange(max(first, len(self._prompt_positions)), end, dtype=np.int32) + np.int32(self.offset)
        return np.concatenate([self._prompt_positions[first:end], after])

    def rows(self, first: int, end: int) -> np.ndarray:
        """Return the positions of image tokens in first .. end - 1 of the prompt."""
        low, high = np.searchsorted(self._positions, (first, end))
        return self._positions[low:high]

    def axes_of(self, first: int, end: int) -> list[np.ndarray]:
        """Return the positions of the image tokens in first .. end - 1 on three axes, if they have some."""
        low, high = np.searchsorted(self._positions, (first, end))
        return [] if self.axes is None else [self.axes[low:high]]

    def key_ends_of(self, first: int, end: int) -> list[np.ndarray]:
        """Return the ends of the keys that the image tokens in first .. end - 1 see; none: after their positions."""
        if self._ends is None:
            return []
        return [np.repeat(self._ends, self.sizes)[slice(*np.searchsorted(self._positions, (first, end)))]]

    def divided_by(self, position: int) -> tuple[int, int]:
        """Return the span that a cut before this position would divide, or the position twice."""
        index = len(self.sizes) if self._ends is None else int(np.searchsorted(self._ends, position, side="right"))
        if self._ends is None or index == len(self.sizes):
            return position, position
        first = int(self._positions[self._starts[index]])
        return (first, int(self._ends[index])) if first < position else (position, position)

    def parts(self, first: int, end: int) -> Iterator[ImagePart]:
        """Iterate over the embeddings that go to these rows, in their order."""
        low, high = np.searchsorted(self._positions, (first, end))
        index = int(np.searchsorted(self._starts, low, side="right")) - 1
        while low < high:
            start, stop = self._starts[index], min(high, self._starts[index + 1])
            yield ImagePart(index, int(low - start), int(stop - start))
            low, index = stop, index + 1

    def max_tokens(self, first: int, count: int) -> int:
        """Return how many of the `count` tokens from `first` on a step may compute. Plans a run of the tower."""
        end = first + count
        for part in self.parts(first, end):
            if self.held is not None and self.held[0] == part.image:
                continue
            at = int(self._positions[self._starts[part.image] + part.first])
            if at >= end:
                break
            has_turn, most = self._turns.take(self.digests[part.image])
            if not has_turn:
                return at - first
            if self._ends is None:
                end = min(end, max(first + most, at + 1))
        return end - first

    def key(self, first: int, end: int) -> bytes:
        """Return what tells tokens first .. end - 1 from equal tokens with other images; empty without image tokens."""
        parts = self.parts(first, end)
        return b"".join(bytes.fromhex(self.digests[part.image]) + part.first.to_bytes(4, "little") for part in parts)


class TowerTurns(Protocol):
    """Decides for which images the tower runs in a step."""

    def take(self, digest: str) -> tuple[bool, int]:
        """Return whether a step may have the embeddings of an image, and the most tokens of its prompt then."""


class ImageEmbedder:
    """The images of an engine. Used by the engine's thread."""

    def __init__(
        self,
        tower: ImageTower,
        device: torch.device,
        max_bytes: int = IMAGE_CACHE_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """max_bytes: of cached embeddings. clock: returns seconds."""
        self.counters = ImageCounters()
        self.pacer = TowerPacer(clock)
        self._max_tokens = sys.maxsize  # of a prompt in a step that runs the tower
        self._planned = ""  # the digest of the image for which the next step runs the tower
        self._tower, self._device = tower, device
        self._max_bytes = max_bytes
        self._cached: OrderedDict[str, torch.Tensor] = OrderedDict()  # by digest, least recently used first

    def of(self, request: GenerationRequest, files: Mapping[str, bytes]) -> PromptImages:
        """Return the images of a request. Raises RequestRefused."""
        if self._tower.most_whole > MAX_SCORED_POSITIONS and request.sampling.prompt_logprobs >= 0:
            raise RequestRefused(
                f"log-probabilities of prompts are not computed with images of this model: one step computes up to "
                f"{self._tower.most_whole} tokens of an image, and scores at most {MAX_SCORED_POSITIONS}"
            )
        return PromptImages(request.images, request.prompt, self._tower, files, self)

    def begin_step(self, prompts: PrefillPacer | None) -> None:
        """Start the clock of a step. prompts: bounds its prompt tokens."""
        self.pacer.begin_step()
        if prompts is not None:
            self._max_tokens = prompts.allowance_beside(self.pacer.expected_s)

    def end_step(self, num_tokens: int) -> None:
        """Stop the clock of a step that has computed `num_tokens` tokens."""
        self.pacer.end_step(num_tokens)
        self.counters.tower_s = self.pacer.total_s

    def take(self, digest: str) -> tuple[bool, int]:
        """Do what `TowerTurns.take` says."""
        if digest in self._cached or digest == self._planned:
            return True, sys.maxsize
        if self._planned or not self.pacer.may_run:
            return False, 0
        self._planned = digest
        return True, self._max_tokens

    def embed(self, step: Step, most: int) -> list[tuple[str, str]]:
        """Compute the embeddings for a step. most: tokens of a step for which the memory of the device suffices.

        The chunks of prompts with a faulty image are taken out of the step. Returns the ids of their requests, with the
        reason.
        """
        self._planned = ""
        rows: list[np.ndarray] = []
        values: list[torch.Tensor] = []
        axes: list[np.ndarray] = []
        key_ends: list[np.ndarray] = []
        faulty: list[tuple[str, str]] = []
        at = len(step.decodes)
        for chunk in list(step.chunks):
            group, first = chunk.sequence.group, chunk.sequence.num_computed
            images, end = group.images, first + chunk.num_tokens
            if isinstance(images, PromptImages) and len(positions := images.rows(first, end)):
                try:
                    if chunk.num_tokens > most:
                        raise ImageFault(f"device memory does not suffice for an image of {chunk.num_tokens} tokens")
                    found = self._values(images, first, end)
                except ImageFault as fault:
                    step.chunks.remove(chunk)
                    step.num_scored -= chunk.num_scored
                    faulty.append((group.request_id, str(fault)))
                    continue
                rows.append(positions - first + at)
                values += found
                axes += images.axes_of(first, end)
                key_ends += images.key_ends_of(first, end)
            at += chunk.num_tokens
        if rows:
            with torch.inference_mode():
                turned = self._send(axes) if axes else None
                ends = self._send(key_ends).int() if key_ends else None
                step.embeddings = TokenEmbeddings(self._send(rows), torch.cat(values), turned, ends)
        return faulty

    def _send(self, arrays: list[np.ndarray]) -> torch.Tensor:
        return send(torch.from_numpy(np.concatenate(arrays).astype(np.int64)), self._device)

    def _values(self, images: PromptImages, first: int, end: int) -> list[torch.Tensor]:
        """Return the embeddings of the image tokens in first .. end - 1. Raises ImageFault."""
        values = []
        held = images.held
        for part in images.parts(first, end):
            whole = held[1] if held is not None and held[0] == part.image else self._whole(images, part.image)
            values.append(whole[part.first : part.end])
            images.held = (part.image, whole) if part.end < len(whole) else None
        return values

    def _whole(self, images: PromptImages, index: int) -> torch.Tensor:
        """Return all embeddings of an image."""
        digest = images.digests[index]
        values = self._cached.get(digest)
        if values is not None:
            self._cached.move_to_end(digest)
            self.counters.found += 1
        else:
            values = self._compute(images.files[digest])
        if len(values) != images.sizes[index]:
            raise ImageFault(
                f"image {index} of the prompt has {images.sizes[index]} image tokens and {len(values)} embeddings: "
                "gateway and worker must have the files of the same model"
            )
        if digest not in self._cached:
            self._keep(digest, values)
        return values

    def _compute(self, data: bytes) -> torch.Tensor:
        self.counters.computed += 1
        try:
            with self.pacer.run():
                values = self._tower.embed([data])[0]
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()  # a launch takes less time than the run
                return values
        except Exception as error:  # a decoder or a processor may raise anything
            log.warning("an image of %d bytes gives no embeddings", len(data), exc_info=True)
            raise ImageFault(f"an image cannot be computed ({type(error).__name__}: {str(error)[:200]})") from error

    def _keep(self, digest: str, values: torch.Tensor) -> None:
        """Add embeddings to the cache, and remove others until they fit."""
        if values.nbytes > self._max_bytes:
            return
        self._cached[digest] = values
        self.counters.cached_bytes += values.nbytes
        while self.counters.cached_bytes > self._max_bytes:
            _, oldest = self._cached.popitem(last=False)
            self.counters.cached_bytes -= oldest.nbytes


def make_embedder(model: PagedModel, limits: EngineLimits) -> ImageEmbedder | None:
    """Return what embeds the images of a model; None if it has no tower, or if the size of a step does not fit it."""
    if model.tower is None:
        return None
    needed, tokens = model.least_step(limits.max_num_seqs), limits.max_num_batched_tokens
    if 0 < model.max_image_tokens < tokens or needed > tokens:
        bound = f"at most {model.max_image_tokens}" if needed <= tokens else f"at least {needed}"
        model.why_no_images = f"images of this model need a --max-num-batched-tokens of {bound}"
        log.warning("this worker serves text alone: %s", model.why_no_images)
        return None
    return ImageEmbedder(model.tower, model.ops.device)


class ImageFault(Exception):
    """An image without the embeddings that its request needs."""
