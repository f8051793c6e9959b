"""Poems of four rhyming lines."""

from ops.demo.phrase import articles, expand, say
from ops.demo.subjects import Casting, Subject

_POEMS = (
    "The [evening|morning] is quiet, the [windows are bright|street is still white],\n"
    "and {k} is [dreaming all through the night|waiting and watching the light].\n"
    "[The wind tells a story that few people know,\n"
    "and carries it home through the rain and the snow|The clouds tell a story from mountain to sea,\n"
    "and somewhere it whispers to you and to me].",
    "I [thought of|sang of|dreamed of] {x} on a [cold winter day|bright summer day],\n"
    "when [mist|rain|sunlight] had covered the hills and the bay.\n"
    "[It warmed me like tea, and it sang like a bird,\n"
    "the loveliest music that I ever heard|It shone like a lamp, and it hummed like a tune,\n"
    "and I walked home happy, along with the moon].",
    "[Here is a song for|A small little song for|Four little lines for] {x},\n"
    "[as light as a feather, as soft as a shoe|as round as an apple, and gentle, and new].\n"
    "[It asks for no money, it asks for no crown,\n"
    "it only sits with you until you calm down|It travels by rowboat, it travels by sea,\n"
    "and ends where it started, with you and with me].",
    "[Who sings in the garden|Who walks by the river|Who waits at the window] when nobody's there?\n"
    "It must be {k}, with [the stars in the air|the wind in the air].\n"
    "[The moon nods politely, the hedgehogs agree,\n"
    "and the song drifts away to the edge of the sea|The owls keep the rhythm, the frogs keep the "
    "time,\n"
    "and the night turns it into a small silver rhyme].",
    "[Little by little|Slowly and gently|Softly and slowly] the day turns to gold,\n"
    "and {k} has [a story|a secret] that wants to be told.\n"
    "[Sit down for a moment, the kettle is on,\n"
    "and soon all the worries of morning are gone|Come closer and listen, the teapot is near,\n"
    "and here are the stories we all like to hear].",
)
_POEM_ASKS = (
    ("[Write|Make|Compose|Can you write|Please write] [me|] a [short|little|] [poem|rhyme|verse] [about|on] {x}[.|?|]"),
    "[A poem|Poem|A short poem] about {x}[.|, please.| please|]",
    "I would like a poem about {x}[.|]",
    "[Write|Give me] four lines about {x}[.|]",
    "[Tell me|Say] a poem about {x}[.|]",
    "write a haiku about {x}",
)


def poem(casting: Casting) -> tuple[str, str, Subject]:
    """A request for a poem, the poem, and its subject."""
    subject = casting.subject()
    subject = subject if not (subject.wish or subject.fear) else casting.thing()
    slots = {"x": subject.asked, "k": _the(subject)}
    prompt = expand(casting.rng.choice(_POEM_ASKS), casting.rng, slots)
    return articles(prompt), another_poem(subject, casting), subject


def another_poem(subject: Subject, casting: Casting) -> str:
    spoken = f"your {subject.asked[3:]}" if subject.asked.startswith("my ") else subject.asked
    return say(casting.rng.choice(_POEMS), casting.rng, {"x": spoken, "k": _the(subject)})


def _the(subject: Subject) -> str:
    """How a poem speaks of its subject: by name if the user gave one."""
    return subject.name if subject.name and subject.name in subject.asked else subject.the
