"""Counts how often a checkpoint of the demonstration model uses tools as it should, greedily and without a grammar.

python -m models.demo.training.tool_check models/demo
"""

import argparse
import json
import re
from itertools import islice
from typing import Any

from models.demo.training.data_files import DATA
from models.demo.training.sample import answer
from models.demo.training.tool_dialogues import ToolDialogues
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

# A calculator, declared as `quire chat --tools` does it, and a tool that has nothing to do with the questions.
CALCULATOR = {
    "name": "calculate",
    "description": "Computes an arithmetic expression, such as 17 * (23 - 4).",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a given location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}
PLACES = ("San Francisco", "Paris", "Reykjavik", "Tokyo", "Port Moresby")
_CALL = re.compile(r'<tool_call>\n(\{"name": .*\})\n</tool_call>')
Messages = list[dict[str, Any]]


class TrialModel:
    """A checkpoint that answers conversations with tools."""

    def __init__(self, checkpoint: str) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
        self._model = LlamaForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()

    def reply(self, messages: Messages, *functions: dict[str, Any]) -> str:
        """Return the greedy answer to a conversation."""
        tools = [{"type": "function", "function": function} for function in functions]
        text = self._tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, tokenize=False)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.decode(answer(self._model, ids, 0.0, 120), skip_special_tokens=True)


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of the tool call that is the whole text; None for any other text."""
    match = _CALL.fullmatch(text)
    try:
        call = json.loads(match[1]) if match else None
        return (call["name"], call["arguments"]) if call else None
    except (ValueError, KeyError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("--count", type=int, default=50, help="arithmetic questions (default: 50)")
    parser.add_argument("--verbose", action="store_true", help="print each wrong answer")
    args = parser.parse_args()
    model, dialogues = TrialModel(args.checkpoint), ToolDialogues("tool-check", held_out=True)

    def count(what: str, results: list[tuple[bool, str, str]]) -> None:
        print(f"{what}: {sum(right for right, _, _ in results)} of {len(results)}", flush=True)
        for right, question, text in results:
            if args.verbose and not right:
                print(f"  {question!r} -> {text!r}")

    calls, sentences = [], []
    for _ in range(args.count):
        question, expression, result = dialogues.arithmetic()
        asked: Messages = [{"role": "user", "content": question}]
        text = model.reply(asked, CALCULATOR)
        calls.append((call_of(text) == ("calculate", {"expression": expression}), question, text))
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
        told = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": result}]
        text = model.reply(asked + told, CALCULATOR)
        sentences.append((result.removeprefix("error: ") in text and "<" not in text, question, text))
    count("arithmetic questions whose call has the right expression", calls)
    count("answers with the result of the tool", sentences)
    places = []
    for place in PLACES:
        question = f"What is the weather like in {place}?"
        text = model.reply([{"role": "user", "content": question}], CALCULATOR, WEATHER)
        places.append((call_of(text) == ("get_weather", {"location": place}), question, text))
    count("questions about the weather whose call has the place", places)
    others = []
    without_numbers = (dialogue[0] for dialogue in DATA.samples.dialogues if not re.search(r"\d", dialogue[0]))
    for question in islice(without_numbers, args.count):
        text = model.reply([{"role": "user", "content": question}], CALCULATOR)
        others.append(("<" not in text, question, text))
    count("other prompts that are answered without a call", others)


if __name__ == "__main__":
    main()
