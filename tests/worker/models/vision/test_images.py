"""Answers about images are those of Transformers, however the engine schedules them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from tests.support.vision_questions import IMAGE_TOKEN, Question, VisionFamily, answer, digest_of

pytest.importorskip("transformers")

# Families with a fixed number of tokens for an image, with another for each size, with positions on three axes, and, by
# Transformers, with recurrent states as well.
AHEAD = ("llava", "mistral3", "qwen2_vl")
SCHEDULED = (*AHEAD, "qwen3_5")
# Also images that go to several layers, and attention in chunks. tests/worker/test_models_page.py has all families.
FAMILIES = (*SCHEDULED, "qwen3_vl", "qwen3_vl_moe", "llama4")


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
@pytest.mark.parametrize("name", SCHEDULED)
def test_chunks_may_be_smaller_than_an_image(name: str, max_bytes: int, family: Callable[[str], VisionFamily]) -> None:
    """The tower runs once for an image, however many chunks it has and however small the cache is."""
    one = family(name)
    engine = one.engine(max_bytes, num_blocks=240, max_num_batched_tokens=12, max_prefill_tokens=5)
    assert [choices[0] for choices in answer(engine, one.asked)] == one.expected
    assert computed(engine) == sum(len(question.images) for question in one.asked)


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


def test_embeddings_leave_the_cache_in_the_order_of_their_use(llava: VisionFamily) -> None:
    size = llava.tower.embed([llava.picture()])[0].nbytes
    engine = llava.engine(2 * size, num_blocks=240, prefix_caching=False)
    a, b, c = (llava.ask([llava.picture()]) for _ in range(3))

    def runs(question: Question) -> int:
        before = computed(engine)
        answer(engine, [question])
        assert engine.images is not None
        assert engine.images.num_bytes <= 2 * size
        return computed(engine) - before

    assert [runs(question) for question in (a, b, a, c, a, b)] == [1, 1, 0, 1, 0, 1]


def test_embeddings_do_not_depend_on_other_images(llava: VisionFamily) -> None:
    pictures = [llava.picture() for _ in range(3)]
    for data, together in zip(pictures, llava.tower.embed(pictures), strict=True):
        assert torch.equal(llava.tower.embed([data])[0], together)
