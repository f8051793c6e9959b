"""How users ask for a story; `{x}` is the subject."""

from zlib import crc32

STORY_ASKS = (
    "[Tell me|Tell|Write|Please tell me|Can you tell me|Could you write|Write me|Make up|I want|I "
    "would like|Give me|Let me hear|Invent|Create] a [short|little|bedtime|nice|] [story|story|tale] "
    "about {x}[.|?|, please.| please|!|]",
    "[Tell me|Tell|Write|Write me] a story about {x}",
    "Tell me a story about {x}.",
    "[Story|A story|A short story|Short story|story] about {x}[.|, please.| please|]",
    "Tell me about {x}[.|]",
    "[Do you know|Can you tell|Do you have] a story about {x}?",
    "{x}",
    "{x}, please.",
    "Once upon a time, there was {x}",
    "I want to hear about {x}[.|]",
    "My [son|daughter|child] wants a story about {x}.",
    "How about {x}?",
    "[Hi|Hello|Hey][,|!] [tell me|can you write me|write] a story about {x}[.|?|]",
    "A story with {x} in it, please.",
    "The story should be about {x}.",
    ("[Write|Tell me] a [fairy tale|bedtime story|funny story|sad story|children's story|fable] about {x}[.|]"),
    "[Tell me|Write] a [long|longer] story about {x}[.|]",
    "Let's have a story about {x}!",
    "Imagine {x}.",
    "Please write a story in which {x} plays a part.",
    "[What happened to|What about] {x}?",
    "Do you know anything about {x}? Tell me a story.",
    "Subject: {x}",
)
SHORT_ASKS = (
    "[Tell me|Write] a [very short|one-sentence|tiny] story about {x}[.|]",
    "[A very short story|A story in one sentence] about {x}[.|, please.|]",
    "Summarise a story about {x} in one sentence.",
)
ANY_ASKS = (
    (
        "[Tell me|Tell|Write|Can you tell me|I want|Please tell me|I would like] a [story|short "
        "story|bedtime story|good story|tale][.|?|, please.| please|!|]"
    ),
    "story",
    "A story, please.",
    "Tell me something.",
)


def held_out_template(template: str) -> bool:
    """One in eight requests for a story is kept for the held-out perplexity, too."""
    return template not in STORY_ASKS[:3] and crc32(template.encode()) % 8 == 0
