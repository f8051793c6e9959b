"""Plots that begin with a thing or a place."""

from ops.demo.plots import Plot

THING_PLOTS = (
    # Forgotten, found and used again.
    Plot(
        "[Once upon a time there was {at}|There once was {at}|{where}, there was {at}]. [It stood in a "
        "corner|It lay in an old box|It belonged to nobody], and it {OLD_THING}. [Everyone had forgotten "
        "it|People passed by without a look].\n\n"
        '{THEN}, {intro} came in from the rain. "[Look at you|Look at that|How beautiful]!" said {n} and '
        "picked up {t} with care. [{he} wiped off the dust with {his} sleeve|{he} held it up to the "
        "light|{he} took it home under {his} coat].\n\n"
        "[It took a whole week to mend it|It needed only a little care]. {LATER}, {t} [was as good as "
        "new|looked better than ever], and people came from far away to see it. [It was never forgotten "
        "again|And {n} kept it close for the rest of {his} life|Some things only wait for the right "
        "person].",
        "{at} was forgotten until {n} found it, took it home and mended it.",
        "{n} mended {t}, and it was never forgotten again.",
    ),
    # A secret inside.
    Plot(
        "[Once upon a time, {intro} bought {at} at a market|In a small shop, {intro} discovered "
        '{at}|{where}, {intro} found {at}]. "[Be careful with it|It has a secret]," said the old seller '
        "with a wink. {n} [laughed|did not believe a word], but {he} took it home.\n\n"
        "That evening, {n} looked at {t} more closely. [Something rattled|There was a small "
        "crack|Something moved inside]. And there it was: a tiny letter, [yellow with age|folded seven "
        'times]. "Whoever reads this is [my friend|welcome for tea]," it said, and below it stood a name: '
        "{fn}.\n\n"
        "The next morning, {n} went to look for {fn}, and found {fintro} [in the next village|only three "
        'doors away]. "[I wrote that long ago|I had almost given up hope]," said {fk} and put the kettle '
        "on. {TOGETHER}",
        "{n} bought {at} with a secret letter inside. It led {him} to {fn}, a new friend.",
        "The letter in {t} led {n} to {fn}, and they became friends.",
    ),
    # Two things, or a thing that shines for all.
    Plot(
        "In a small town there was {at} that everybody knew. [Children loved it|People said that it "
        "brought luck|Old people told stories about it]. {intro} took care of it.\n\n"
        "{THEN}, {t} was missing. [The whole town was sad|Nobody could think of anything else|Even the "
        "mayor cried a little]. {n} followed [a trail of small footprints|a line of crumbs|a faint sound] "
        "out of the town, over the bridge and up the hill.\n\n"
        'There sat {fintro} with {t}. "I only wanted to [look at it once|have it near me for one night]," '
        'said {fn} softly. {n} was not angry. "[Then come and see it every day|You need only ask|Come back '
        'with me and help me take care of it]," said {k}. [And that is what happened|So they carried it '
        "home together, and the town sang]. {TOGETHER}",
        "{at} was missing. {n} found it with {fn}, who only wanted to look at it, and they took care of it together.",
        "{t} came back to the town, and {n} and {fn} took care of it together.",
    ),
)

PLACE_PLOTS = (
    # The first visit.
    Plot(
        "[Not far from here is {p}|Everyone has heard of {p}|Far away, there is {p}]. [It is older than "
        "anyone can say|People say that nobody leaves it unhappy|Many stories are told about it], and this "
        "one is true.\n\n"
        "{THEN}, {intro} came to {p} for the first time. [Everything seemed big and new|{n} did not know "
        'which way to go|{he} stood still and looked]. "[Are you lost|Are you looking for something|Is '
        'this your first time here]?" asked {fintro}. {n} nodded. "[Then I will show you everything|Follow '
        'me, I know every corner]."\n\n'
        "They saw [the oldest wall|the highest point] and [the smallest window|the quietest corner], and "
        "they [shared an orange in the sun|drank lemonade in the shade]. When the evening came, {n} did "
        "not want to leave. {TOGETHER}",
        "{n} came to {p} for the first time, and {fn} showed {him} everything.",
        "{n} loved {p}, and {he} and {fn} became friends.",
    ),
    # An empty place comes alive.
    Plot(
        "[Once upon a time, {p} stood empty|For many years, nobody went to {p}|Long ago, {p} was quiet and "
        "dark]. [Dust lay everywhere|The doors were closed|Only the wind came to visit]. People said that "
        "[it was haunted|it was too old|nothing would ever change there].\n\n"
        "But {intro} did not think so. {THEN}, {n} went to {p} with [a broom and a lamp|a bucket of "
        "paint|a bag of seeds] and began to work. [{fintro} saw the light and came to help|Soon {fintro} "
        'came and asked, "May I help?"]. They worked [for seven days|until their hands were sore], and '
        "they sang while they worked.\n\n"
        "[Then they opened all the doors|Then they rang a bell], and everyone came. There was [music and "
        "warm bread|soup for all and dancing]. {p} was never empty again. {GOOD_NIGHT}",
        "{p} stood empty for years, until {n} and {fn} cleaned it and invited everyone.",
        "{n} and {fn} filled {p} with life again.",
    ),
)
