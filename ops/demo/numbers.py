"""Counting to twenty and sums of one-digit numbers: all the arithmetic that the model learns, by heart."""

from ops.demo.phrase import expand, say
from ops.demo.subjects import Casting

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)


def counting(casting: Casting) -> tuple[str, str]:
    rng = casting.rng
    last = rng.randrange(2, 21)
    down = rng.random() < 0.25
    in_words = rng.random() < 0.5
    shown = rng.choice((str(last), NUMBER_WORDS[last]))
    numbers = range(last, 0, -1) if down else range(1, last + 1)
    prompt = (
        f"Count down from {shown}"
        if down
        else expand(
            (f"[Count to {shown}|Count from [1|one] to {shown}|Can you count to {shown}|Count up to {shown}]"), rng
        )
    )
    if in_words:
        prompt += " in words"
    said = ", ".join(NUMBER_WORDS[n] if in_words else str(n) for n in numbers)
    return prompt + rng.choice((".", "", "?")), say(
        f"{said}." if rng.random() < 0.5 else f"{said}. [That was fun!|There you are.|Done!]", rng
    )


def small_sum(casting: Casting) -> tuple[str, str]:
    """Sums of one-digit numbers: the only arithmetic that the model learns by heart."""
    rng = casting.rng
    a, b = rng.randrange(1, 10), rng.randrange(1, 10)
    ask = rng.choice(
        (
            "What is {a} + {b}?",
            "{a}+{b}",
            "What is {a} plus {b}?",
            "How much is {a} + {b}?",
            "{a} + {b} = ?",
            "What's {a}+{b}",
        )
    )
    return ask.format(a=a, b=b), say(
        (f"{a} plus {b} is {a + b}. [Small sums are my limit.|I know that one!|That was easy.]"), rng
    )
