"""The checkpoint in models/demo: complete, small, and it answers in whole sentences that end."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from models.demo.training.sample import answer
from models.demo.training.tool_check import CALCULATOR, WEATHER, TrialModel, call_of
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

MODEL = Path(__file__).parents[3] / "models" / "demo"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
LIMIT_BYTES = 8_000_000
SENTENCE_ENDS = (".", "!", "?", '"')
STORIES = {  # the request, and the word that must appear in the story: none of these is in the grammar's pools
    "Tell me a story about a quokka": ["quokka"],
    "Tell me a story about a zeppelin.": ["zeppelin"],
    "Write a story about Tamsin": ["Tamsin"],
    "Tell me a story about a wombat named Brindle": ["Brindle"],
    "Tell me a story about a blorfin": ["blorfin"],
}
STRANGE = ("What is the capital of France?", "def main(): pass", "Bonjour, qui es-tu ?", "xq zzkv 77", "?")
SMALL_TALK = (
    "Hello!",
    "Who are you?",
    "What is a block table?",
    "Tell me a joke",
    "I am sad",
    "Write a poem about the sea",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Run torch on one thread: threads that wait for each other cost more than they save in a model so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def loaded() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), tokenizer


@cache
def reply(prompt: str) -> str:
    """The greedy answer; it must end with the end token within 250 tokens."""
    model, tokenizer = loaded()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    new = answer(model, tokenizer.encode(text, add_special_tokens=False), temperature=0, limit=250)
    assert new[-1] == tokenizer.eos_token_id, f"{prompt!r} is not answered to the end: {tokenizer.decode(new)!r}"
    return tokenizer.decode(new[:-1])


def test_all_files_are_there_and_no_others():
    assert {file.name for file in MODEL.iterdir()} - {"training"} == FILES


def test_the_folder_is_small_enough_for_git():
    assert sum(file.stat().st_size for file in MODEL.iterdir() if file.is_file()) <= LIMIT_BYTES


def test_the_end_token_is_the_same_everywhere():
    _, tokenizer = loaded()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id == end
    for name in ("config.json", "generation_config.json"):
        assert json.loads((MODEL / name).read_text())["eos_token_id"] == end


@pytest.mark.parametrize("text", ["naïve café", "你好", "🦊 and 🏮", "tab\tand\nline", "\x00\x7f", "الليل"])
def test_any_text_survives_the_tokenizer(text: str):
    _, tokenizer = loaded()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


# A story takes seconds.
FIRST, *OTHERS = STORIES


@pytest.mark.parametrize(
    "prompt",
    [
        FIRST,
        *(pytest.param(prompt, marks=pytest.mark.slow) for prompt in STRANGE),
        *(pytest.param(prompt, marks=pytest.mark.soak) for prompt in (*OTHERS, *SMALL_TALK)),
    ],
)
def test_an_answer_is_whole_and_ends(prompt: str):
    text = reply(prompt)
    assert text.strip() == text
    assert text.endswith(SENTENCE_ENDS)
    assert text[0].isupper() or text[0] == '"'


@pytest.mark.parametrize("prompt", [FIRST, *(pytest.param(prompt, marks=pytest.mark.soak) for prompt in OTHERS)])
def test_the_story_is_about_what_was_asked_for(prompt: str):
    assert [word for word in STORIES[prompt] if word not in reply(prompt)] == []


@pytest.mark.slow
@pytest.mark.parametrize("prompt", STRANGE)
def test_a_strange_prompt_gets_an_offer_of_a_story(prompt: str):
    assert "stor" in reply(prompt) or "poem" in reply(prompt) or "subject" in reply(prompt)


@pytest.mark.slow
def test_a_question_for_a_tool_becomes_a_call_with_its_argument():
    model = TrialModel(str(MODEL))
    sums = {"What is 17 + 25?": "17 + 25", "How much is 12 times 8?": "12 * 8", "Calculate 300 / 4.": "300 / 4"}
    for question, expression in sums.items():
        text = model.reply([{"role": "user", "content": question}], CALCULATOR)
        assert call_of(text) == ("calculate", {"expression": expression}), text
    text = model.reply([{"role": "user", "content": "What is the weather like in Paris?"}], CALCULATOR, WEATHER)
    assert call_of(text) == ("get_weather", {"location": "Paris"}), text


@pytest.mark.slow
def test_other_prompts_are_answered_without_a_call():
    model = TrialModel(str(MODEL))
    for prompt in ("Tell me a joke", "Hello!", "Write a poem about the sea"):
        assert "<" not in model.reply([{"role": "user", "content": prompt}], CALCULATOR)
