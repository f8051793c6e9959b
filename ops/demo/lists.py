"""Lists of as many items as the user wants."""

from ops.demo import words
from ops.demo.numbers import NUMBER_WORDS
from ops.demo.phrase import articles, expand, say
from ops.demo.subjects import Casting

_GIFTS = (
    "a warm scarf",
    "a good book",
    "a plant in a small pot",
    "a jar of honey",
    "a handwritten letter",
    "a walk together",
    "a homemade cake",
    "a music box",
    "a blanket for cold evenings",
    "a picture of a happy day",
)
_LISTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "[ideas|tips|suggestions|things to do] for a rainy day",
        (
            "bake a cake and share it",
            "read a book under a blanket",
            "write a letter to an old friend",
            "build a house of cards",
            "listen to the rain on the roof",
            "learn a new song",
            "draw a map of an island",
            "tidy one drawer",
            "cook a pot of soup",
            "sort old photographs",
        ),
    ),
    (
        "[ideas|tips|suggestions|things to do] for [the weekend|a sunny day|a free day]",
        (
            "walk to a place that you do not know",
            "have a picnic by the water",
            "ride a bicycle to the next village",
            "plant some herbs",
            "visit a friend",
            "fly a kite",
            "eat ice cream on a bench",
            "watch the clouds",
            "swim in a lake",
            "take ten photographs of small things",
        ),
    ),
    ("[ideas|suggestions] for a [present|gift]", _GIFTS),
    (
        "things [to pack|to take|I need] for a [journey|trip|holiday]",
        (
            "a map",
            "a warm coat",
            "a bottle of water",
            "a pair of good shoes",
            "a small lamp",
            "a book",
            "some bread and cheese",
            "an umbrella",
            "a notebook",
            "a toothbrush",
        ),
    ),
    (
        "[tips|ways] to [fall asleep|sleep better|calm down|relax]",
        (
            "drink a cup of warm tea",
            "breathe in and out slowly",
            "open the window for a moment",
            "write down what worries you",
            "put the phone away",
            "listen to quiet music",
            "read a few pages",
            "count to twenty",
            "think of a kind face",
            "stretch your arms and legs",
        ),
    ),
)


def listing(casting: Casting) -> tuple[str, str]:
    """A list of as many items as the user wants."""
    rng = casting.rng
    topic, items = rng.choice(_LISTS)
    draw = rng.random()
    x = articles(
        rng.choice(
            (
                f"a {casting.noun(words.CREATURES)}",
                f"a {casting.noun(words.PERSONS, 0.1)}",
                "my mother",
                "my friend",
                casting.name()[0],
            )
        )
    )
    if draw < 0.15:
        topic, items = (
            "[ideas for stories|story ideas|subjects for a story|stories you can tell]",
            tuple(casting.subject().first for _ in range(10)),
        )
    elif draw < 0.35:
        topic, items = "names for {x}", tuple(rng.sample(words.SHE_NAMES + words.HE_NAMES, 10))
    elif draw < 0.5:
        topic, pool = rng.choice(
            (
                ("[animals|animal names]", words.CREATURES),
                ("colours", words.COLOURS),
                ("[foods|things to eat]", words.FOODS),
            )
        )
        items = tuple(rng.sample(pool, 10))
    elif draw < 0.62:
        topic, items = (
            "[presents|gifts|present ideas|gift ideas] for {x}",
            _GIFTS,
        )
    count = rng.choices((2, 3, 4, 5, 6), (1, 6, 2, 4, 1))[0]
    number = rng.choice((str(count), NUMBER_WORDS[count], NUMBER_WORDS[count]))
    topic = expand(topic, rng, {"x": x})
    prompt = expand(
        (
            "[Give me|Tell me|List|Name|Can you give me|I need|Suggest|Write down|What are|] "
            f"{number} [good|nice|] {topic}[.|, please.| please|]"
        ),
        rng,
    ).strip()
    prompt = " ".join(prompt.split())
    chosen = rng.sample(list(dict.fromkeys(items)), count)
    return prompt, say("\n".join(f"{at}. {item}." for at, item in enumerate(chosen, 1)), rng)
