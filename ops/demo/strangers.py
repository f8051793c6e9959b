"""Prompts that the model was not made for, and the pleasant whole sentence that they get.

Most answers take up the user's own topic, so that the model learns to copy a phrase that it cannot understand.
"""

from random import Random

from ops.demo import words
from ops.demo.phrase import articles, expand, made_up, made_up_name, tidy
from ops.demo.smalltalk import OFFER
from ops.demo.stories import tell
from ops.demo.subjects import Casting, plural

_QUESTIONS = (
    "[What is|What are|Who is|Who was|What was] {}?",
    ("[How do I|How can I|How should I] [make|find|use|buy|build|fix|learn|install|cook] {}?"),
    ("[Explain|Describe|Define|Summarise|Summarize|Compare|Translate|Review|Analyse|Discuss] {}[.|]"),
    "[Where is|Where can I find|When was|Where are] {}?",
    "Why [is|are|does|do] {} [so important|so expensive|blue|matter|exist|work]?",
    ("Write [an essay|a function|a program|code|an email|a report|a letter|a script|a tweet|a paragraph] about {}[.|]"),
    "[Is|Are|Was] {} [good|dangerous|real|true|better than the others]?",
    "[Tell me more|What do you think|Tell me everything|I want to know|Teach me|I need help with|Do "
    "you know something] about {}[.|?|]",
    "How [much|big|old|tall|far|fast|expensive] is {}?",
    ("What is the [capital|population|price|meaning|history|colour|size|name|purpose|president] of {}?"),
    ("[Do you know|Have you heard of|Can you see|Do you like|Have you seen|Do you believe in] {}?"),
    "[Can you|Could you|Please] [explain|draw|translate|find|book|order|open|play|buy|calculate|check] "
    "{}[.|?| for me.|]",
    "I [need|want|lost|found|bought|like|hate|work with|think about] {}.",
    "{}?",
    "{}",
    "{}",
    "[Which|What] {} should I [buy|choose|take|use|read]?",
    "Who [invented|wrote|discovered|painted|built|won] {}?",
    ("[Give me|Show me|I would like] [information|details|facts|an example|a summary|a list] [of|about|on] {}[.|]"),
)

_WITH_TOPIC = (
    "I am afraid that I do not know much about {x}, [because I am only a small demonstration model|for "
    "I am a very small model]. But I could tell you a story about {x}.",
    (
        "[That is a good question about {x}|About {x} I know very little], but I only know stories and "
        "small talk. {OFFER}"
    ),
    "[I wish that I could help you with {x}|I have never learned much about {x}]. What I can do is "
    "[tell you a story|write you a short poem] about {x}.",
    "[You would have to ask a larger model about {x}|For {x} you need a larger model than me], but I "
    "could tell you a short story about it.",
)

_WITHOUT_TOPIC = (
    "[That is more than a small model like me can answer|I am not sure what you mean|I do not quite "
    "understand that], but I can tell you a short story. [Which subject would you like?|Just name an "
    "animal, a thing or a place.]",
    "[I am only the small demonstration model of Quire, and that is new to me.|That is beyond me, I am "
    "afraid.] {OFFER}",
)
_NUMBERS = (
    "[That sum is too hard for a small model|I am not good with numbers|Numbers like these make me "
    "dizzy], but I can count to twenty. {OFFER}",
)
_CODE = (
    "[That looks like code|I think that this is code], and I [only speak English|never learned to "
    "program]. But I could tell you a story about a [programmer|computer|patient engineer].",
)
_LANGUAGE = (
    "[I am sorry, but I only speak English|I think that this is another language, and I only speak "
    "English|I wish that I knew your language, but I only learned English]. {OFFER}",
)
_LONG = (
    "[That is a long text, and I read every token of it|Thank you for the long text]. [I am too small "
    "to work with it|I cannot say anything clever about it], but I can tell you a short story of my "
    "own.",
)
_EMPTY = ("[I am listening|I am here|Yes, I am here]. {OFFER}",)

_FOREIGN = {
    "Bonjour, comment allez-vous ? | Raconte-moi une histoire sur un renard. | Quelle est la capitale "
    "de la France ? | Je ne parle pas anglais. | Merci beaucoup ! | Qu'est-ce que c'est ? | Où est la "
    "gare ? | Pourquoi le ciel est-il bleu ? | Salut, ça va ? | Écris un poème sur la mer.",
    "Guten Tag, wie geht es Ihnen? | Erzähl mir eine Geschichte über einen Fuchs. | Was ist die "
    "Hauptstadt von Deutschland? | Ich spreche kein Englisch. | Vielen Dank! | Wo ist der Bahnhof? | "
    "Warum ist der Himmel blau? | Hallo, wer bist du? | Schreibe ein Gedicht über das Meer. | Grüezi "
    "mitenand",
    "Hola, ¿cómo estás? | Cuéntame una historia sobre un zorro. | ¿Cuál es la capital de España? | No "
    "hablo inglés. | Muchas gracias. | ¿Dónde está la estación? | Buenos días | ¿Quién eres?",
    "Ciao, come stai? | Raccontami una storia. | Grazie mille! | Dov'è la stazione? | Olá, tudo bem? | "
    "Conte-me uma história. | Hej, hur mår du? | Dzień dobry | Привет, как дела? | Расскажи мне "
    "сказку. | 你好 | 给我讲一个故事。 | こんにちは | "
    "物語を話してください。 | 안녕하세요 | مرحبا | שלום | नमस्ते | Γειά σου | Merhaba",
}
FOREIGN = tuple(sorted(phrase.strip() for group in _FOREIGN for phrase in group.split(" | ")))
_FOREIGN_WORDS = tuple(sorted({word for phrase in FOREIGN for word in phrase.split()}))

_CODE_TEMPLATES = (
    "def {a}({b}):\n    return {b} + {n}",
    "for (int {a} = 0; {a} < {n}; {a}++) {{ {b}(); }}",
    "SELECT {a} FROM {b} WHERE {a} > {n};",
    "import {a}\nprint({a}.{b}({n}))",
    '<div class="{a}">{b}</div>',
    '{{"{a}": {n}, "{b}": true}}',
    "sudo {a} install {b}",
    "const {a} = ({b}) => {b} * {n};",
    "git {a} --{b}",
    "x = {n}; print(x)",
    "#include <{a}.h>\nint main() {{ return {n}; }}",
    "https://www.{a}.com/{b}",
    "class {a}:\n    {b} = {n}",
    "{a}[{n}] = {b}",
    "if ({a}) {{ {b}(); }}",
    "curl {a}/{b}",
)


def _topic(casting: Casting) -> str:
    rng = casting.rng
    draw = rng.random()
    if draw < 0.3:
        return casting.pick(words.FIELDS)
    if draw < 0.5:
        return made_up(rng) if rng.random() < 0.6 else made_up_name(rng)
    if draw < 0.7:
        return casting.subject().asked
    if draw < 0.85:
        return f"{rng.choice(('the', 'a', ''))} {made_up(rng)} {rng.choice(words.THINGS)}".strip()
    return (
        "the "
        f"{rng.choice(('history', 'price', 'future', 'meaning', 'capital', 'colour'))} of "
        f"{made_up_name(rng) if draw < 0.93 else plural(casting.pick(words.THINGS))}"
    )


def _gibberish(rng: Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    draw = rng.randrange(6)
    if draw == 0:
        return "".join(rng.choice("asdfghjkl") for _ in range(rng.randrange(4, 20)))
    if draw == 1:
        return " ".join(
            "".join(rng.choice(letters) for _ in range(rng.randrange(1, 9))) for _ in range(rng.randrange(1, 7))
        )
    if draw == 2:
        return "".join(
            chr(rng.choice((rng.randrange(33, 127), rng.randrange(161, 1200), rng.randrange(0x3041, 0x30FF))))
            for _ in range(rng.randrange(1, 12))
        )
    if draw == 3:
        return "".join(chr(rng.randrange(0x1F300, 0x1F64F)) for _ in range(rng.randrange(1, 5)))
    pool = words.THINGS + words.CREATURES + words.LOOKS + words.PLACES + words.FIELDS
    return " ".join(made_up(rng) if rng.random() < 0.3 else rng.choice(pool) for _ in range(rng.randrange(3, 14)))


_LONG_QUESTION = (
    "[Should I|Can we|Would you|Did they|Please|Please help me to|I want to|How would you|Could you] "
    "[invest in|sell|fix|write|move|explain|pay for|compare|apply for|choose|improve] {a} "
    "[because|when|after|or|if|so that|before] [I|they|my friends|we|you] "
    "[have|need|lost|like|want|found|cannot see] {b}[?|.|, and what should I do then?| tomorrow?| at "
    "work.| this year?| in the end?]"
)


def _long_text(casting: Casting) -> str:
    if casting.chance(0.5):
        text = tell([casting.subject()], casting).text
    else:
        text = ". ".join(_gibberish(casting.rng) for _ in range(casting.rng.randrange(3, 8)))
    return (
        expand(
            ("[Summarise this text:|Translate this:|Correct my text:|Read this:|What do you think of this?|]"),
            casting.rng,
        )
        + f" {text}"
    )


def exchange(casting: Casting) -> tuple[str, str]:
    """A prompt from outside of the domain and its answer."""
    rng = casting.rng
    kind = rng.choices(("topic", "gibberish", "numbers", "code", "language", "long", "empty"), (50, 19, 7, 7, 8, 4, 4))[
        0
    ]
    slots = {"OFFER": expand(OFFER, rng)}
    if kind == "topic":
        topic = articles(_topic(casting))
        prompt = expand(rng.choice(_QUESTIONS).replace("{}", "{topic}"), rng, {"topic": topic})
        spoken = {"my": "your"}.get(topic.split()[0], topic.split()[0])
        answer = rng.choice(_WITH_TOPIC)
        slots["x"] = " ".join([spoken, *topic.split()[1:]])
    elif kind == "numbers":
        a, b = rng.randrange(10 ** rng.randrange(1, 5)), rng.randrange(11, 10 ** rng.randrange(2, 5))
        form = rng.choice(
            (
                "What is {} {} {}?",
                "{}{}{}",
                "Calculate {} {} {}",
                "{} {} {} =",
                "Solve {}x {} {} = 0",
                "How much is {} {} {}?",
            )
        )
        prompt = form.format(a, rng.choice("+-*/"), b)
        answer = rng.choice(_NUMBERS)
    elif kind == "code":
        prompt = rng.choice(_CODE_TEMPLATES).format(a=made_up(rng), b=made_up(rng), n=rng.randrange(100))
        answer = rng.choice(_CODE)
    elif kind == "language":
        prompt = (
            rng.choice(FOREIGN) if casting.chance(0.5) else " ".join(rng.choices(_FOREIGN_WORDS, k=rng.randrange(2, 9)))
        )
        answer = rng.choice(_LANGUAGE)
    elif kind == "long":
        prompt, answer = _long_text(casting), rng.choice(_LONG)
    elif kind == "empty":
        prompt = rng.choice(("?", ".", "...", "!", "-", "??", " ", "", ",", "…", ":)", "!?", "_"))
        answer = rng.choice(_EMPTY)
    else:
        answer = rng.choice(_WITHOUT_TOPIC)
        if casting.chance(0.4):
            prompt = expand(_LONG_QUESTION, rng, {"a": _topic(casting), "b": _topic(casting)})
        else:
            prompt = _gibberish(rng)
    return prompt, tidy(expand(answer, rng, slots))
