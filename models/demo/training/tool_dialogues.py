"""Dialogues in which the model may call tools: sums for a calculator, places for the weather and the time.

A dialogue begins with a system message that lists the tools. Some questions need one of them: the model calls it, reads
the result, and answers. All other exchanges are those of `grammar.py`, without a call.

    python -m models.demo.training.tool_dialogues --seed 1 --count 5
"""

import argparse
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from random import Random
from typing import NamedTuple

from models.demo.training.data_files import DATA
from models.demo.training.grammar import Document, Grammar
from models.demo.training.phrase import articles, expand, plural, tidy
from models.demo.training.vocabulary import call_text, result_text, tools_text

TOOLS, WORDS = DATA.tools, DATA.words
# Digits after the point of a result that is not whole; `quire chat --tools` rounds to the same number.
DECIMALS = 9
# The spellings of each operator in users' messages.
SPELLINGS = {
    "+": (" + ", " + ", "+", " plus "),
    "-": (" - ", " - ", "-", " minus "),
    "*": (" * ", " * ", "*", " times ", " x ", " × "),
    "/": (" / ", " / ", "/", " divided by ", " ÷ "),
}


_SUM = re.compile(r"\d *([-+*/x×÷]|plus|minus|times|divided)", re.IGNORECASE)


class Sum(NamedTuple):
    """An expression. asked: as the user writes it. value: None for a division by zero."""

    text: str
    asked: str
    value: Fraction | None


class ToolDescription(NamedTuple):
    """A declared tool with one argument. kind: "calculator", or the index of a tool of places."""

    kind: str
    name: str
    argument: str
    line: str


def number(rng: Random) -> str:
    """Return a number that a user may ask about; small numbers are more frequent."""
    digits = rng.choices((1, 2, 3, 4, 5), (20, 38, 25, 13, 4))[0]
    whole = str(rng.randrange(10 ** (digits - 1), 10**digits))
    return f"{whole}.{rng.randrange(1, 100)}" if rng.random() < 0.07 else whole


def applied(left: Fraction | None, sign: str, right: Fraction | None) -> Fraction | None:
    """Return the value of one operation; None if it divides by zero, or if an operand did."""
    if left is None or right is None or (sign == "/" and not right):
        return None
    return {"+": left + right, "-": left - right, "*": left * right, "/": left / (right or 1)}[sign]


def random_sum(rng: Random) -> Sum:
    """Return a sum of two numbers, or of three, some with parentheses."""
    signs = [rng.choice("+-*/+-*") for _ in range(2)]
    a, b, c = (number(rng) for _ in range(3))
    if rng.random() < 0.02:
        b, signs[0] = "0", "/"
    elif signs[0] == "/" and rng.random() < 0.6 and "." not in b:
        a = str(int(b) * rng.randrange(2, 100))
    spelling = rng.randrange(6)
    first, second = (SPELLINGS[sign][min(spelling, len(SPELLINGS[sign]) - 1)] for sign in signs)
    x, y, z = Fraction(a), Fraction(b), Fraction(c)
    draw = rng.random()
    if draw < 0.72:
        return Sum(f"{a} {signs[0]} {b}", f"{a}{first}{b}", applied(x, signs[0], y))
    if draw < 0.80:
        value = applied(applied(x, signs[0], y), signs[1], z)
        return Sum(f"({a} {signs[0]} {b}) {signs[1]} {c}", f"({a}{first}{b}){second}{c}", value)
    if draw < 0.88:
        value = applied(x, signs[0], applied(y, signs[1], z))
        return Sum(f"{a} {signs[0]} ({b} {signs[1]} {c})", f"{a}{first}({b}{second}{c})", value)
    if signs[0] in "+-" and signs[1] in "*/":
        value = applied(x, signs[0], applied(y, signs[1], z))
    else:
        value = applied(applied(x, signs[0], y), signs[1], z)
    return Sum(f"{a} {signs[0]} {b} {signs[1]} {c}", f"{a}{first}{b}{second}{c}", value)


def written(value: Fraction | None) -> str:
    """Return the result of a calculator: a decimal number, or an error."""
    if value is None:
        return "error: division by zero"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DECIMALS}f}".rstrip("0").rstrip(".")


class ToolDialogues:
    """Writes dialogues with tools from one random source, on one side of the held-out split."""

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.grammar = Grammar(f"tools-{seed}", held_out)
        self.rng, self.chance = self.grammar.rng, self.grammar.chance

    def tools(self) -> list[ToolDescription]:
        """Return the tools of a dialogue, in any order: mostly a calculator, and up to two others."""
        rng = self.rng
        declared = {"calculator": TOOLS.calculator} | {str(at): entry for at, entry in enumerate(TOOLS.place)}
        kinds = [kind for kind in declared if self.chance(0.85 if kind == "calculator" else 0.25)]
        descriptions = []
        for kind in kinds or ["calculator"]:
            entry = declared[kind]
            name, argument = rng.choice(entry.names), rng.choice(entry.arguments)
            if kind == "calculator" and self.chance(0.5):
                name, argument = entry.names[0], entry.arguments[0]
            about = " ".join(expand(entry.about, rng).split()).replace(" ,", ",").replace(" .", ".")
            descriptions.append(ToolDescription(kind, name, argument, f"{name}({argument}): {about}"))
        if self.chance(0.25):
            line = expand(rng.choice(TOOLS.other.tools), rng)
            descriptions.append(ToolDescription("other", "", "", line))
        rng.shuffle(descriptions)
        return descriptions

    def called(self, tool: ToolDescription) -> Document:
        """Return a question, the call of the tool, its result, and the answer."""
        rng = self.rng
        if tool.kind == "calculator":
            prompt, argument, result = self.arithmetic()
            failed = result.startswith("error: ")
            told = TOOLS.calculator.failed if failed else TOOLS.calculator.answer
            answer = expand(told, rng, {"e": argument, "r": result.removeprefix("error: ")})
        else:
            entry = TOOLS.place[int(tool.kind)]
            argument = self.place()
            prompt = self.grammar.ask(rng.choice(entry.asks), x=argument)
            numbers = {"n": str(rng.randrange(-9, 35)), "h": f"{rng.randrange(24):02}", "m": f"{rng.randrange(60):02}"}
            result = expand(entry.results, rng, numbers)
            answer = tidy(expand(entry.answer, rng, {"x": argument, "r": result}))
        return [
            ("user", prompt),
            ("assistant", call_text(tool.name, {tool.argument: argument})),
            ("user", result_text(result)),
            ("assistant", answer),
        ]

    def arithmetic(self) -> tuple[str, str, str]:
        """Return a question for the calculator, the expression, and the result."""
        rng, calculator = self.rng, TOOLS.calculator
        if self.chance(0.25):
            problem = rng.choice(calculator.problem)
            a, b = number(rng), number(rng)
            things = plural(self.grammar.casting.noun(rng.choice((WORDS.creatures, WORDS.things)), 0.1))
            slots = {"a": a, "b": b, "things": things}
            expression = expand(problem.expression, rng, slots)
            _, sign, _ = expression.split()
            prompt = tidy(articles(expand(problem.ask, rng, slots)))
            return prompt, expression, written(applied(Fraction(a), sign, Fraction(b)))
        asked = random_sum(rng)
        return self.grammar.ask(rng.choice(calculator.asks), x=asked.asked), asked.text, written(asked.value)

    def place(self) -> str:
        """Return a known place, or a made-up place, which the model can only copy."""
        casting = self.grammar.casting
        if self.chance(0.5):
            return casting.pick(WORDS.world)
        name, _ = casting.name()
        return f"{self.rng.choice(('San', 'New', 'Port', 'Saint', 'Los'))} {name}" if self.chance(0.25) else name

    def usual(self) -> Document:
        """Return a dialogue without tools, and without sums: these would need the calculator."""
        while True:
            document = self.grammar.document()
            asked = [text for role, text in document if role == "user"]
            if document[0][0] != "text" and not any(map(_SUM.search, asked)):
                return document

    def document(self) -> Document:
        """Return a dialogue of one to four exchanges."""
        tools = self.tools()
        usable = [tool for tool in tools if tool.kind != "other"]
        usual = self.usual()
        system = usual[0][1] if usual[0][0] == "system" else ""
        if system:
            usual = usual[1:]
        head: Document = [("system", tools_text([tool.line for tool in tools], system))]
        if self.chance(0.2):
            return head + usual
        turns = self.called(self.rng.choice(usable))
        while self.chance(0.35) and len(turns) < 12:
            turns += self.called(self.rng.choice(usable))
        if self.chance(0.25) and sum(len(text) for _, text in usual) < 400:
            turns = usual + turns if self.chance(0.5) else turns + usual
        return head + turns


def tool_documents(seed: int | str, held_out: bool = False) -> Iterator[Document]:
    """Yield an endless stream of dialogues with tools."""
    dialogues = ToolDialogues(seed, held_out)
    while True:
        yield dialogues.document()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1", help="same seed, same documents (default: 1)")
    parser.add_argument("--count", type=int, default=5, help="documents to print (default: 5)")
    args = parser.parse_args()
    for document in islice(tool_documents(args.seed), args.count):
        print("\n".join(f"[{role}] {text}" for role, text in document), end="\n\n---\n\n")


if __name__ == "__main__":
    main()
