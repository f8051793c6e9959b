"""Requests with a single answer: poems, lists, recipes, small tasks, and prompts outside of the model's domain."""

from random import Random

from models.demo.training.data_files import DATA
from models.demo.training.phrase import articles, expand, made_up, made_up_name, plural, say
from models.demo.training.stories import tell
from models.demo.training.subjects import Casting, Subject

Answered = tuple[str, str]  # the user's prompt and the model's answer


WORDS, LISTS, CRAFTS, STRANGERS = DATA.words, DATA.lists, DATA.crafts, DATA.strangers
KINDS = ("topic", "gibberish", "numbers", "code", "language", "long", "empty")  # of STRANGERS
FOREIGN_WORDS = sorted({word for sentence in STRANGERS.language.prompts for word in sentence.split()})


def poem(casting: Casting) -> tuple[str, str, Subject]:
    """Return a request for a poem, the poem, and its subject."""
    subject = casting.subject()
    subject = subject if not (subject.wish or subject.fear) else casting.thing()
    prompt = expand(casting.rng.choice(DATA.poems.asks), casting.rng, {"x": subject.asked})
    return articles(prompt), another_poem(subject, casting), subject


def another_poem(subject: Subject, casting: Casting) -> str:
    """Return a poem about the subject."""
    spoken = f"your {subject.asked[3:]}" if subject.asked.startswith("my ") else subject.asked
    called = subject.name if subject.name and subject.name in subject.asked else subject.the
    return say(casting.rng.choice(DATA.poems.poems), casting.rng, {"x": spoken, "k": called})


def numbered(items: list[str]) -> str:
    """Return a numbered list, one item per line."""
    return "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1))


def listing(casting: Casting) -> Answered:
    """Return a list of two to six items."""
    rng, topics = casting.rng, LISTS.topics
    chosen = rng.choice(list(LISTS.lists.values()))
    topic, items = chosen.topic, list(chosen.items)
    draw = rng.random()
    slots = {
        "creature": casting.noun(WORDS.creatures),
        "person": casting.noun(WORDS.persons, 0.1),
        "name": casting.name()[0],
    }
    whom = articles(expand(rng.choice(LISTS.whom), rng, slots))
    if draw < 0.15:
        topic, items = topics.stories, [casting.subject().first for _ in range(10)]
    elif draw < 0.35:
        topic, items = topics.names, rng.sample(WORDS.she_names + WORDS.he_names, 10)
    elif draw < 0.5:
        pools = ((topics.animals, WORDS.creatures), (topics.colours, WORDS.colours), (topics.foods, WORDS.foods))
        topic, pool = rng.choice(pools)
        items = rng.sample(pool, 10)
    elif draw < 0.62:
        topic, items = topics.presents, list(LISTS.lists["presents"].items)
    count = rng.choices((2, 3, 4, 5, 6), (1, 6, 2, 4, 1))[0]
    number = rng.choice((str(count), WORDS.numbers[count], WORDS.numbers[count]))
    topic = expand(topic, rng, {"x": whom})
    prompt = " ".join(expand(LISTS.ask, rng, {"number": number, "topic": topic}).split())
    return prompt, say(numbered([f"{item}." for item in rng.sample(list(dict.fromkeys(items)), count)]), rng)


def recipe(casting: Casting) -> Answered:
    """Return a request for a recipe, and the steps."""
    rng = casting.rng
    vegetable = casting.noun(WORDS.vegetables, 0.1)
    chosen = rng.choice(DATA.recipes.recipe)
    slots = {"vegetable": vegetable, "vegetables": plural(vegetable)}
    slots["dish"] = expand(chosen.dish, rng, slots)
    prompt = articles(expand(DATA.recipes.ask, rng, slots))
    return prompt, say(f"{DATA.recipes.lead}\n{numbered(list(chosen.steps))}", rng, slots)


def pet_name(casting: Casting) -> Answered:
    """Return a request for a name for a pet."""
    rng = casting.rng
    casting.name()  # unused; without this draw, all later documents of a seed would differ
    animal = casting.noun(WORDS.creatures)
    look = rng.choice(("", "", rng.choice(WORDS.looks) + " "))
    slots = {"name": rng.choice(WORDS.she_names + WORDS.he_names), "look": look, "animal": animal}
    return articles(expand(CRAFTS.pet_name.ask, rng, slots)), say(CRAFTS.pet_name.answer, rng, slots)


def counting(casting: Casting) -> Answered:
    """Return a request to count up or down, in digits or in words, and the numbers."""
    rng, words = casting.rng, WORDS.numbers
    last = rng.randrange(2, len(words))
    down, in_words = casting.chance(0.25), casting.chance(0.5)
    shown = rng.choice((str(last), words[last]))
    numbers = range(last, 0, -1) if down else range(1, last + 1)
    prompt = expand(CRAFTS.counting.down if down else CRAFTS.counting.up, rng, {"last": shown})
    prompt += (CRAFTS.counting.in_words if in_words else "") + rng.choice((".", "", "?"))
    answer = CRAFTS.counting.answer if casting.chance(0.5) else CRAFTS.counting.answer_glad
    return prompt, say(answer, rng, {"numbers": ", ".join(words[n] if in_words else str(n) for n in numbers)})


def small_sum(casting: Casting) -> Answered:
    """Return a sum of one-digit numbers: the only arithmetic that the model learns."""
    rng = casting.rng
    a, b = rng.randrange(1, 10), rng.randrange(1, 10)
    slots = {"a": str(a), "b": str(b), "sum": str(a + b)}
    return expand(rng.choice(CRAFTS.sums.prompts), rng, slots), say(CRAFTS.sums.answer, rng, slots)


def spelling(casting: Casting) -> Answered:
    """Return a request for a word, and exactly that word."""
    rng = casting.rng
    word = rng.choice((made_up(rng), casting.name()[0], casting.pick(WORDS.things), casting.pick(WORDS.creatures)))
    return expand(rng.choice(CRAFTS.repeat), rng, {"word": word}), word[0].upper() + word[1:] + "."


def craft(casting: Casting) -> Answered:
    """Return a request of a random kind: a list, a recipe, a name, counting, a sum or a word to repeat."""
    return casting.rng.choice((listing, recipe, pet_name, counting, small_sum, spelling))(casting)


def _topic(casting: Casting) -> str:
    """Return a phrase that the model knows nothing about."""
    rng = casting.rng
    draw = rng.random()
    if draw < 0.3:
        return casting.pick(WORDS.fields)
    if draw < 0.5:
        return made_up(rng) if rng.random() < 0.6 else made_up_name(rng)
    if draw < 0.7:
        return casting.subject().asked
    if draw < 0.85:
        return f"{rng.choice(('the', 'a', ''))} {made_up(rng)} {rng.choice(WORDS.things)}".strip()
    aspect = rng.choice(("history", "price", "future", "meaning", "capital", "colour"))
    return f"the {aspect} of {made_up_name(rng) if draw < 0.93 else plural(casting.pick(WORDS.things))}"


def _gibberish(rng: Random) -> str:
    """Return a text without meaning: random letters, symbols, emoji or words."""

    def letters(alphabet: str, low: int, high: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(rng.randrange(low, high)))

    draw = rng.randrange(6)
    if draw == 0:
        return letters("asdfghjkl", 4, 20)
    if draw == 1:
        return " ".join(letters("abcdefghijklmnopqrstuvwxyz", 1, 9) for _ in range(rng.randrange(1, 7)))
    if draw == 2:  # symbols, Latin to Cyrillic, kana
        ranges = ((33, 127), (161, 1200), (0x3041, 0x30FF))
        return "".join(chr(rng.choice([rng.randrange(*ends) for ends in ranges])) for _ in range(rng.randrange(1, 12)))
    if draw == 3:  # emoji
        return "".join(chr(rng.randrange(0x1F300, 0x1F64F)) for _ in range(rng.randrange(1, 5)))
    pool = WORDS.things + WORDS.creatures + WORDS.looks + WORDS.places + WORDS.fields
    return " ".join(made_up(rng) if rng.random() < 0.3 else rng.choice(pool) for _ in range(rng.randrange(3, 14)))


def _long_text(casting: Casting, lead: str) -> str:
    if casting.chance(0.5):
        text = tell([casting.subject()], casting).text
    else:
        text = ". ".join(_gibberish(casting.rng) for _ in range(casting.rng.randrange(3, 8)))
    return f"{expand(lead, casting.rng)} {text}"


def stranger(casting: Casting, offer: str) -> Answered:
    """Return a prompt outside of the model's domain, and its answer. `offer`: the template for the slot {OFFER}."""
    rng = casting.rng
    talks = [getattr(STRANGERS, kind) for kind in KINDS]
    kind, talk = rng.choices(list(zip(KINDS, talks, strict=True)), [talk.weight for talk in talks])[0]
    slots = {"OFFER": expand(offer, rng)}
    if kind == "topic":
        topic = articles(_topic(casting))
        prompt = expand(rng.choice(talk.prompts), rng, {"topic": topic})
        slots["x"] = f"your {topic[3:]}" if topic.startswith("my ") else topic
    elif kind == "numbers":
        a, b = rng.randrange(10 ** rng.randrange(1, 5)), rng.randrange(11, 10 ** rng.randrange(2, 5))
        prompt = rng.choice(talk.prompts).format(a=a, b=b, sign=rng.choice("+-*/"))
    elif kind == "code":
        prompt = rng.choice(talk.prompts).format(a=made_up(rng), b=made_up(rng), n=rng.randrange(100))
    elif kind == "language":
        sentence = casting.chance(0.5)
        prompt = rng.choice(talk.prompts) if sentence else " ".join(rng.choices(FOREIGN_WORDS, k=rng.randrange(2, 9)))
    elif kind == "long":
        prompt = _long_text(casting, talk.prompts[0])
    elif kind == "empty":
        prompt = rng.choice(talk.prompts)
    else:
        answer = rng.choice(talk.answers)
        if casting.chance(0.4):
            prompt = expand(talk.prompts[0], rng, {"a": _topic(casting), "b": _topic(casting)})
        else:
            prompt = _gibberish(rng)
        return prompt, say(answer, rng, slots)
    return prompt, say(rng.choice(talk.answers), rng, slots)
