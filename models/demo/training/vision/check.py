"""Asks a checkpoint about drawings that training never saw, and prints how many answers are right as a whole.

python -m models.demo.training.vision.check models/demo-vision                  # 300 drawings
python -m models.demo.training.vision.check models/demo-vision --drawings 50 --wrong      # with the wrong answers

The drawings have sizes that training never saw, too, and go through the processor of Transformers.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch
from models.demo.training.vision.dialogues import ask_shapes, describe
from models.demo.training.vision.drawings import Drawing, draw
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

QUESTION = "What is in this picture?"


class Asked(NamedTuple):
    """A question about a drawing, and the right answer. kind: of drawings, or a type of questions."""

    kind: str
    drawing: Drawing
    question: str
    right: str


class SeeingModel:
    """A checkpoint, as Transformers computes it."""

    def __init__(self, folder: str) -> None:
        self._processor = AutoProcessor.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, question: str, *images: Image.Image) -> str:
        """Return the most probable answer."""
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
        inputs = self._processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = self._model.generate(**inputs, max_new_tokens=80, do_sample=False, top_k=None)
        text: str = self._processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return text


def held_out(count: int) -> Iterator[Drawing]:
    """Yield drawings whose seeds and sizes training does not use."""
    for number in range(count):
        rng = Random(f"held-out-{number}")
        yield draw(rng, rng.randint(320, 640))


def questions(count: int) -> Iterator[Asked]:
    for number, drawing in enumerate(held_out(count)):
        kinds = len({(mark.sign, mark.colour) for mark in drawing.marks})
        yield Asked(f"{drawing.kind} {kinds or ''}".strip(), drawing, QUESTION, describe(drawing))
        if drawing.kind == "shapes":
            question, right = ask_shapes(drawing.marks, Random(f"question-{number}"))
            yield Asked("question about shapes", drawing, question, right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("--drawings", type=int, default=300)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    model, right, all_of = SeeingModel(args.checkpoint), Counter[str](), Counter[str]()
    for asked in questions(args.drawings):
        answer = model.answer(asked.question, asked.drawing.image)
        all_of[asked.kind] += 1
        right[asked.kind] += answer == asked.right
        if args.wrong and answer != asked.right:
            print(f"{asked.question} {answer!r}, not {asked.right!r}")
    for kind in sorted(all_of):
        print(f"{kind}: {right[kind]} of {all_of[kind]}")


if __name__ == "__main__":
    main()
