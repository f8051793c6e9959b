"""Answers about images are those of Transformers, however the engine schedules them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from quire.worker.capacity import choose_limits
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.images import ImageEmbedder, make_embedder
from quire.worker.engine.features.spill.block_spill import BlockSpill, SpillCosts
from quire.worker.engine.features.spill.blocks import SpillingBlockManager
from quire.worker.engine.features.spill.host_pool import CachePool
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.engine.paged_model import KVCache
from quire.worker.engine.step import Step
from quire.worker.settings import WorkerSettings
from tests.support.vision_questions import IMAGE_TOKEN, MAX_TOKENS, Question, VisionFamily, answer, digest_of

pytest.importorskip("transformers")

# Families with a fixed number of tokens for an image, with another for each size, with positions on three axes, and, by
# Transformers, with recurrent states as well. A step computes an image of the families of WHOLE as a whole.
WHOLE = ("gemma3", "gemma4")
AHEAD = ("llava", "mistral3", "qwen2_vl", *WHOLE)
IN_PARTS = ("llava", "mistral3", "qwen2_vl", "qwen3_5")
SCHEDULED = (*IN_PARTS, *WHOLE)
# Also images that go to several layers, and attention in chunks. tests/worker/test_models_page.py has all families.
FAMILIES = (*SCHEDULED, "qwen3_vl", "qwen3_vl_moe", "llama4", "gemma4_with_audio")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VisionFamily]:
    folder = tmp_path_factory.mktemp("vision")
    return cache(lambda name: VisionFamily(name, folder / name))


@pytest.fixture
def llava(family: Callable[[str], VisionFamily]) -> VisionFamily:
    return family("llava")


def computed(engine: Engine) -> int:
    """Return how many images the tower has computed."""
    assert engine.images is not None
    return engine.images.counters.computed


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_transformers(name: str, family: Callable[[str], VisionFamily]) -> None:
    one = family(name)
    engine = one.engine(num_blocks=240)
    found = answer(engine, one.asked)
    assert [choices[0] for choices in found] == one.expected
    assert engine.groups.num_preemptions == 0
    assert computed(engine) == sum(len(question.images) for question in one.asked)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", SCHEDULED)
def test_choices_that_are_preempted_are_those_of_transformers(
    name: str, preemption: str, family: Callable[[str], VisionFamily]
) -> None:
    """A cache that keeps nothing: embeddings are computed again after a preemption."""
    one = family(name)
    num_blocks = max(len(question.prompt) for question in one.asked) // 8 + 6
    engine = one.engine(0, num_blocks=num_blocks, num_host_blocks=200, preemption=preemption, prefix_caching=False)
    found = answer(engine, one.asked, n=2)
    assert found == [[expected] * 2 for expected in one.expected]
    counters = engine.groups.counters
    assert (counters.swapped if preemption == "swap" else counters.recomputed) > 0
    num_images = sum(len(question.images) for question in one.asked)
    assert computed(engine) == num_images if preemption == "swap" else computed(engine) > num_images


@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", IN_PARTS)
def test_chunks_may_be_smaller_than_an_image(name: str, max_bytes: int, family: Callable[[str], VisionFamily]) -> None:
    """The tower runs once for an image, however many chunks it has and however small the cache is."""
    one = family(name)
    engine = one.engine(max_bytes, num_blocks=240, max_num_batched_tokens=12, max_prefill_tokens=5)
    assert [choices[0] for choices in answer(engine, one.asked)] == one.expected
    assert computed(engine) == sum(len(question.images) for question in one.asked)


@pytest.mark.parametrize("max_prefill_tokens", [5, 0])
@pytest.mark.parametrize("name", WHOLE)
def test_no_chunk_ends_inside_of_an_image_whose_tokens_see_each_other(
    name: str, max_prefill_tokens: int, family: Callable[[str], VisionFamily]
) -> None:
    """Steps are just as large as the largest image, next to sequences that decode, needs."""
    one = family(name)
    least = max(len(one.tower.embed([data])[0]) for question in one.asked for data in question.files.values())
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": least + 3, "max_prefill_tokens": max_prefill_tokens}
    engine, sizes = one.engine(num_blocks=240, **limits), []

    def observe(step: Step) -> None:
        sizes.append(step.num_tokens)
        for chunk in step.chunks:
            end, images = chunk.sequence.num_computed + chunk.num_tokens, chunk.sequence.group.images
            assert images is not None
            assert images.divided_by(end) == (end, end)

    engine.observer = observe
    assert [choices[0] for choices in answer(engine, one.asked)] == one.expected
    assert least < max(sizes) <= least + 3


def spilling(one: VisionFamily) -> Engine:
    """Make an engine that keeps blocks in host memory after it has evicted them."""
    limits = one.engine(num_blocks=64).limits
    blocks = SpillingBlockManager(limits.num_blocks, limits.block_size)
    engine = Engine(one.model, limits, one.model.config.eos_token_ids, None, blocks=blocks)
    engine.images = ImageEmbedder(one.tower, torch.device("cpu"))
    costs = SpillCosts(0.0, 3600.0)  # to read a block always takes less time than to compute it
    pool = CachePool(engine.runner.kv_cache, 256)
    spill = BlockSpill(engine.groups, pool, torch.device("cpu"), bytes(32), None, costs)
    engine.scheduler.spill = engine.runner.spill = spill
    return engine


@pytest.mark.parametrize("is_spilled", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_a_cached_prefix_that_ends_inside_of_an_image_is_used_up_to_the_image(
    name: str, is_spilled: bool, family: Callable[[str], VisionFamily]
) -> None:
    """The image ends in the middle of a block, whose text differs."""
    one = family(name)
    engine = spilling(one) if is_spilled else one.engine(num_blocks=64)
    first = next(q for q in (one.ask([one.picture()]) for _ in range(99)) if q.images[0].end % 8 > 1)
    image = first.images[0]._replace(start=first.images[0].start + 64)
    first, at = first._replace(prompt=(*one.text(64), *first.prompt), images=(image,)), image.end
    second = first._replace(prompt=(*first.prompt[:at], *one.text(7)))
    expected, chunks = [one.by_transformers(question) for question in (first, second)], []
    spill = engine.scheduler.spill
    assert answer(engine, [first]) == [[expected[0]]]
    if spill is not None:  # other prompts take all blocks
        for _ in range(4):
            answer(engine, [Question(tuple(one.text(200)), (), {})])
    engine.observer = lambda step: chunks.extend((c.sequence.num_computed, c.num_tokens) for c in step.chunks)
    hits = engine.groups.blocks.counters.prefix_hits
    assert answer(engine, [second]) == [[expected[1]]]
    assert engine.groups.blocks.counters.prefix_hits - hits == at // 8 * 8 > image.start
    assert chunks[0][0] == image.start
    assert computed(engine) == 1
    if isinstance(spill, BlockSpill):
        assert spill.figures().read["host"] > 0
        spill.close()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_beams_of_images_are_those_of_transformers(preemption: str, family: Callable[[str], VisionFamily]) -> None:
    one = family("gemma3")
    asked = one.asked[:4]
    num_blocks = max(len(question.prompt) for question in asked) // 8 + 10
    engine = one.engine(num_blocks=num_blocks, num_host_blocks=200, preemption=preemption)
    found = answer(engine, asked, n=3, beam_width=3)
    assert found == [one.by_transformers_beams(question, 3) for question in asked]
    assert engine.groups.num_preemptions > 0


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_an_image_for_which_memory_does_not_suffice_ends_its_request_alone(
    is_synchronous: bool, family: Callable[[str], VisionFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = family("gemma3")
    engine = one.engine_ahead(num_blocks=60)
    compute = one.model.forward

    def fail(batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        if len(batch.token_ids) > 14:
            raise torch.OutOfMemoryError
        return compute(batch, cache)

    monkeypatch.setattr(one.model, "forward", fail)
    text = Question(tuple(one.text(40)), (), {})
    engine.add(one.asked[0].request("image"), pictures=one.asked[0].files)
    engine.add(text.request("text", prompt_logprobs=0 if is_synchronous else -1))
    outcomes = {}
    while engine.has_work:
        outcomes |= {item.request_id: item.outcome for item in engine.step() if item.outcome is not None}
    assert outcomes["image"].name == "error"
    assert "device memory does not suffice for an image of 16 tokens" in outcomes["image"].detail
    assert outcomes["text"].name in ("stop", "length")


def test_a_step_has_room_for_an_image_whose_tokens_see_each_other(family: Callable[[str], VisionFamily]) -> None:
    """Next to all other sequences that may decode."""
    for name, most in (("gemma3", 16), ("gemma4", 70)):
        model = family(name).model
        limits = EngineLimits(64, 8, 4, most + 3, 512)
        assert make_embedder(model, limits) is not None
        assert make_embedder(model, replace(limits, max_num_batched_tokens=most + 2)) is None
        assert f"need a --max-num-batched-tokens of at least {most + 3}" in model.why_no_images
        chosen = choose_limits(WorkerSettings(max_num_seqs=250), model, torch.device("cpu"))
        assert chosen.max_num_batched_tokens == 249 + most


def test_prompts_with_images_larger_than_a_step_may_score_are_not_scored(
    family: Callable[[str], VisionFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are, with the same scores however large steps are."""
    one = family("gemma4")
    question, found = one.asked[1], []
    for tokens in (96, 512):
        engine = one.engine(num_blocks=120, max_num_batched_tokens=tokens)
        engine.add(question.request("a", prompt_logprobs=1, returns_prompt=True), pictures=question.files)
        while engine.has_work:
            found += [item.report.records for item in engine.step() if item.report is not None]
    assert found[0] == found[1]
    assert len(found) == 2
    monkeypatch.setattr(one.tower, "most_whole", 280)
    with pytest.raises(RequestRefused, match="one step computes up to 280 tokens of an image, and scores at most 256"):
        engine.add(question.request("b", prompt_logprobs=1), pictures=question.files)


def test_image_tokens_that_see_each_other_are_in_a_row(family: Callable[[str], VisionFamily]) -> None:
    one = family("gemma3")
    engine, question = one.engine(), one.ask([one.picture(), one.picture()])
    (start, length), (second, _) = ((image.start, image.length) for image in question.images)
    prompt, message = question.prompt, "the image tokens of each image must be in a row, with text between"
    with_text = question._replace(prompt=(*prompt[: start + 3], 9, *prompt[start + 4 :]))
    side_by_side = question._replace(
        prompt=(*prompt[: start + length], *prompt[second:]),
        images=(question.images[0], question.images[1]._replace(start=start + length)),
    )
    at, image = question.images[0].end, question.images[0]
    long = question._replace(
        prompt=(*question.prompt[:at], IMAGE_TOKEN, *question.prompt[at:]),
        images=(image._replace(length=image.length + 1),),
    )
    for wrong, reason in ((with_text, message), (side_by_side, message), (long, "17 image tokens, .* have at most 16")):
        with pytest.raises(RequestRefused, match=reason):
            engine.add(wrong.request("a"), pictures=wrong.files)


@pytest.mark.parametrize("name", AHEAD)
def test_a_device_that_runs_ahead_gives_the_same_answers(name: str, family: Callable[[str], VisionFamily]) -> None:
    one = family(name)
    found = answer(one.engine_ahead(num_blocks=60), one.asked, n=2)
    assert found == [[expected] * 2 for expected in one.expected]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_a_prompt_may_begin_with_an_image(name: str, family: Callable[[str], VisionFamily]) -> None:
    """The first position is that of all tokens in the first row and in time, so that chunks begin with it, too."""
    one = family(name)
    asked = one.ask([one.picture()])
    image = asked.images[0]
    question = asked._replace(prompt=asked.prompt[image.start :], images=(image._replace(start=0),))
    engine = one.engine(num_blocks=60, max_num_seqs=1, max_num_batched_tokens=2)
    assert image.length > 2
    found = answer(engine, [question])
    assert found == [[one.by_transformers(question)]]


def test_a_second_question_about_an_image_finds_its_blocks(llava: VisionFamily) -> None:
    """All full blocks of the first prompt are found, and the tower does not run."""
    engine, first = llava.engine(num_blocks=240), llava.asked[0]
    assert answer(engine, [first]) == [[llava.expected[0]]]
    second = first._replace(prompt=first.prompt + tuple(llava.text(20)))
    counters = engine.groups.blocks.counters
    runs, hits = computed(engine), counters.prefix_hits
    assert answer(engine, [second]) == [[llava.by_transformers(second)]]
    assert counters.prefix_hits - hits == len(first.prompt) // 8 * 8
    assert computed(engine) == runs


def test_a_prefix_may_end_inside_of_an_image(llava: VisionFamily) -> None:
    """The prompts have the same image and differ in the text inside of it, as the numbers of rows may differ."""
    engine = llava.engine(num_blocks=240)
    first = llava.ask([llava.picture()])
    image = first.images[0]
    # Exchange the last token of text inside the image.
    at = max(at for at in range(image.start, image.end) if first.prompt[at] != IMAGE_TOKEN)
    changed = (*first.prompt[:at], 9 if first.prompt[at] != 9 else 10, *first.prompt[at + 1 :])
    second = first._replace(prompt=changed)
    assert answer(engine, [first]) == [[llava.by_transformers(first)]]
    assert answer(engine, [second]) == [[llava.by_transformers(second)]]
    assert engine.groups.blocks.counters.prefix_hits == at // 8 * 8 > image.start
    assert computed(engine) == 1


@pytest.mark.parametrize("together", [True, False])
def test_equal_tokens_with_other_images_share_no_blocks_of_them(together: bool, llava: VisionFamily) -> None:
    first = llava.ask([llava.picture()])
    image, data = first.images[0], llava.picture()
    other = first._replace(images=(image._replace(digest=digest_of(data)),), files={digest_of(data): data})
    expected = [llava.by_transformers(question) for question in (first, other)]
    assert expected[0] != expected[1]
    engine = llava.engine(num_blocks=240)
    asked = [[first, other]] if together else [[first], [other]]
    assert [choices[0] for questions in asked for choices in answer(engine, questions)] == expected
    assert engine.groups.blocks.counters.prefix_hits <= image.start // 8 * 8


def test_an_image_without_a_file_and_a_span_without_image_tokens_are_refused(llava: VisionFamily) -> None:
    engine, question = llava.engine(), llava.asked[0]
    with pytest.raises(RequestRefused, match=r"the file of the image \w+ is missing"):
        engine.add(question.request("a"))
    text = question._replace(prompt=tuple(llava.text(len(question.prompt))))
    with pytest.raises(RequestRefused, match="have no image token"):
        engine.add(text.request("b"), pictures=text.files)
    short = question._replace(prompt=question.prompt[: question.images[0].end - 1])
    with pytest.raises(RequestRefused, match=f"an image ends at token {question.images[0].end} of a prompt"):
        engine.add(short.request("c"), pictures=short.files)
    assert not engine.has_work


def test_a_worker_without_a_tower_refuses_images(llava: VisionFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llava.model, "why_no_images", "the reason")
    engine, question = llava.engine(), llava.asked[0]
    engine.images = None
    with pytest.raises(RequestRefused, match="the reason"):
        engine.add(question.request("a"), pictures=question.files)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_faulty_image_ends_its_request_alone(ahead: bool, llava: VisionFamily) -> None:
    """One file is no image; one image has a token more than embeddings. The requests next to them go on."""
    engine = (llava.engine_ahead if ahead else llava.engine)(num_blocks=60)
    good, expected = llava.asked[0], llava.expected[0]
    digest = digest_of(b"text")
    bad = good._replace(images=(good.images[0]._replace(digest=digest),), files={digest: b"text"})
    at, image = good.images[0].end, good.images[0]
    long = good._replace(
        prompt=(*good.prompt[:at], IMAGE_TOKEN, *good.prompt[at:]), images=(image._replace(length=image.length + 1),)
    )
    for name, question in {"good": good, "bad": bad, "long": long, "last": good}.items():
        engine.add(question.request(name), pictures=question.files)
    found: dict[str, list[int]] = {"good": [], "last": [], "bad": [], "long": []}
    ends = {}
    while engine.has_work:
        for item in engine.step():
            found[item.request_id] += [token for delta in item.deltas for token in delta.token_ids]
            if item.outcome is not None:
                ends[item.request_id] = item.outcome
    assert found == {"good": expected, "last": expected, "bad": [], "long": []}
    assert ends["bad"].name == ends["long"].name == "error"
    assert "an image cannot be computed (PictureError: it is not a PNG, JPEG, WebP or GIF file" in ends["bad"].detail
    assert "has 17 image tokens and 16 embeddings" in ends["long"].detail
    assert ends["good"].name == ends["last"].name
    assert engine.groups.blocks.num_free == engine.limits.num_blocks


class SlowTower:
    """The tower of a family, which takes 3 seconds for an image."""

    def __init__(self, family: VisionFamily) -> None:
        self.now, self._tower = 0.0, family.tower
        self.image_token_id, self.is_deep, self.grid = family.tower.image_token_id, False, family.tower.grid
        self.most_whole = 0

    def clock(self) -> float:
        return self.now

    def embed(self, pictures: Sequence[bytes]) -> list[torch.Tensor]:
        self.now += 3.0
        return self._tower.embed(pictures)


def run_timed(
    engine: Engine, tower: SlowTower, asked: dict[str, Question]
) -> tuple[dict[str, list[int]], list[tuple[int, set[str]]]]:
    """Answer questions, in steps that take a second besides runs of the tower.

    Returns the tokens of each request, and for each step the number of runs and the requests with new tokens.
    """

    def compute(step: Step) -> None:
        tower.now += bool(step.num_tokens)

    engine.observer = compute
    engine.images = ImageEmbedder(tower, engine.runner.model.ops.device, clock=tower.clock)
    for name, question in asked.items():
        tokens = MAX_TOKENS if question.images else 40
        engine.add(question.request(name, max_tokens=tokens, ignore_eos=not question.images), pictures=question.files)
    found: dict[str, list[int]] = {name: [] for name in asked}
    steps = []
    while engine.has_work:
        runs, num_steps = computed(engine), engine.num_steps
        items = engine.step()
        if engine.num_steps > num_steps:
            steps.append((computed(engine) - runs, {item.request_id for item in items if item.deltas}))
        for item in items:
            found[item.request_id] += [token for delta in item.deltas for token in delta.token_ids]
    return found, steps


@pytest.mark.parametrize("ahead", [True, False])
def test_sequences_advance_beside_a_stream_of_images(ahead: bool, llava: VisionFamily) -> None:
    """A step runs the tower once at most, and as much time passes in steps without it while others have work."""
    engine = (llava.engine_ahead if ahead else llava.engine)(num_blocks=240, prefix_caching=False)
    asked = {"text": Question(tuple(llava.text(5)), (), {}), "first": llava.asked[2], "second": llava.asked[5]}
    found, steps = run_timed(engine, SlowTower(llava), asked)
    assert [found["first"], found["second"]] == [llava.expected[2], llava.expected[5]]
    assert [count for count, _ in steps if count] == [1] * 6
    runs = [at for at, (count, _) in enumerate(steps) if count]
    assert all(later - earlier >= 3 for earlier, later in pairwise(runs)), steps
    assert sum("text" in named for _, named in steps[runs[0] : runs[-1]]) >= 12


def test_images_alone_wait_for_nothing(llava: VisionFamily) -> None:
    tower, engine = SlowTower(llava), llava.engine(num_blocks=240)
    found, steps = run_timed(engine, tower, {"only": llava.asked[2]})
    assert found["only"] == llava.expected[2]
    assert sum(count for count, _ in steps) == 3
    assert engine.images is not None
    assert engine.images.counters.tower_s == 9
    assert tower.now == 3 * 3 + len(steps) <= 9 + MAX_TOKENS + 4


def test_a_text_does_not_wait_for_images_before_it(llava: VisionFamily) -> None:
    engine, tower = llava.engine(num_blocks=240, max_num_batched_tokens=128), SlowTower(llava)
    engine.images = ImageEmbedder(tower, llava.model.ops.device, clock=tower.clock)
    question, text = llava.asked[2], Question(tuple(llava.text(5)), (), {})
    engine.add(question.request("images"), pictures=question.files)
    engine.add(text.request("text"))
    assert [item.request_id for item in engine.step()] == ["text"]
    assert computed(engine) == 1


def test_a_run_of_the_tower_counts_in_the_target_of_a_step(llava: VisionFamily) -> None:
    """A step that runs it has less prompt tokens, and the time of the run is not taken for that of prompt tokens."""
    engine, tower = llava.engine(num_blocks=240, max_num_batched_tokens=128), SlowTower(llava)
    engine.images = ImageEmbedder(tower, llava.model.ops.device, clock=tower.clock)
    engine.pacer = PrefillPacer(3.2, 8, 128, tower.clock)
    engine.pacer.observe(1, 0, 0.1)
    engine.pacer.observe(1, 100, 1.1)
    sizes: dict[int, list[int]] = {}

    def compute(step: Step) -> None:
        tower.now += 0.1 * bool(step.num_decoding) + 0.01 * step.num_prefill_tokens
        sizes.setdefault(computed(engine), []).append(step.num_prefill_tokens)

    engine.observer = compute
    text = Question(tuple(llava.text(5)), (), {})
    engine.add(text.request("text", max_tokens=100, ignore_eos=True))
    engine.step()
    question = llava.asked[5]
    engine.add(question.request("images"), pictures=question.files)
    while computed(engine) < 2:
        engine.step()
        assert engine.pacer.token_s == pytest.approx(0.01)
    # The first run is of an unknown length. The second one is expected to leave 0.1 s, which are 10 tokens.
    assert sizes[2] == [pytest.approx(10, abs=1)]


def test_embeddings_leave_the_cache_in_the_order_of_their_use(llava: VisionFamily) -> None:
    size = llava.tower.embed([llava.picture()])[0].nbytes
    engine = llava.engine(2 * size, num_blocks=240, prefix_caching=False)
    a, b, c = (llava.ask([llava.picture()]) for _ in range(3))

    def runs(question: Question) -> int:
        before = computed(engine)
        answer(engine, [question])
        assert engine.images is not None
        assert engine.images.counters.cached_bytes <= 2 * size
        return computed(engine) - before

    assert [runs(question) for question in (a, b, a, c, a, b)] == [1, 1, 0, 1, 0, 1]


def test_embeddings_do_not_depend_on_other_images(llava: VisionFamily) -> None:
    pictures = [llava.picture() for _ in range(3)]
    for data, together in zip(pictures, llava.tower.embed(pictures), strict=True):
        assert torch.equal(llava.tower.embed([data])[0], together)
