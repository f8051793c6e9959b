"""Plots in which a creature or a person has the lead."""

from ops.demo.plots import Plot

HERO_PLOTS = (
    # A thing is found and turns out to belong to somebody.
    Plot(
        "{ONCE}. [Every day {n} went for a long walk|{n} liked to look for small treasures|{n} had time "
        "and sharp eyes], and nothing escaped {him}.\n\n"
        '{THEN}, {n} found {at} [in the grass|under a bush|on the path|beside the road]. "[Whose is '
        'this|Who could have lost this|Where do you come from]?" {he} wondered. [{k} asked everyone in the '
        "street|{n} knocked on every door|{he} carried it from house to house], but nobody knew.\n\n"
        "{LATER}, {n} met {fintro}, who [looked very worried|was searching everywhere|sat on a step and "
        'sighed]. "I have lost {t}," said {fn}. [{n} held it out with a smile|Without a word, {n} gave it '
        'back]. "[Thank you|You have saved my day]," said {fk}. {TOGETHER}',
        "{n} found {at}, looked for its owner and met {fn}. They became friends.",
        "{n} gave {t} back to {fn}, and the two became friends.",
    ),
    # A thing is lost and found again.
    Plot(
        "{ONCE}. [What {n} loved most was {at}|{he} owned little, but {he} did own {at}|{n} kept {at} that "
        "had once belonged to {his} grandmother].\n\n"
        "{THEN}, {t} was gone. {n} looked [under the bed|behind the door|in every drawer] and [in the "
        "garden|on the roof|down by the water], but it was nowhere to be found. [{n} sat down and felt "
        "like crying|{he} did not know what to do].\n\n"
        'Then {fintro} came by. "[Let us look together|Four eyes see more than two|We will find it]," said '
        "{fn} kindly. They followed {his} steps backwards, one by one, and there it was: {t} lay [in the "
        "tall grass|beside the kettle|under an old coat], quite safe. {GLAD}. {TOGETHER}",
        "{n} lost {at}. {fn} helped {him} look for it, and they found it again.",
        "They found {t} again, and {n} was very glad.",
    ),
    # A wish that takes practice.
    Plot(
        "{ONCE}. More than anything, {n} wanted to {wish}. [Everyone said that it was too hard|People "
        "smiled and shook their heads|Nobody believed that {he} could do it], but {k} [did not listen|only "
        "smiled|tried again every morning].\n\n"
        "The first time, it went wrong. The second time, it went wrong as well. [{n} was tired and "
        'sad|{he} almost gave up|{n} sat down on a stone]. "[Small steps are still steps|Nobody is good at '
        'everything at once|Try it slowly]," said {fintro}. So they practised together, a little every '
        "day.\n\n"
        "{LATER}, the great day came. {n} took a deep breath, and this time {he} did it! [The whole "
        "village clapped|Even the birds stopped to watch|{fn} cheered the loudest of all]. {GOOD_NIGHT}",
        "{n} wanted to {wish}. It went wrong twice, but {fn} helped {him}, and at last {he} did it.",
        "{n} got {his} wish after a lot of practice.",
    ),
    # A fear that becomes smaller.
    Plot(
        "{ONCE}. [{k} was cheerful and kind|{n} had many good ideas|Nearly everything made {him} happy], "
        "but {n} was afraid of {fear}. [{he} never told anyone about it|It made {his} knees shake|It was "
        "{his} secret].\n\n"
        "{THEN}, [a small voice called for help|somebody cried for help nearby|a call came from far away]. "
        "It was {fintro}, who [had lost the way|was stuck and could not move|had hurt a foot]. [{n} "
        'thought of {fear} and trembled|{n} was afraid, but {he} thought of {fn}]. "I am coming," {he} '
        "said, and {he} went, one step after the other.\n\n"
        '{n} brought {fn} home safely. "Were you not afraid?" asked {fk}. "[I was, but I came anyway|A '
        'little, but you needed me|Yes, and now I am less afraid]," said {k}. {TOGETHER}',
        "{n} was afraid of {fear}, but {he} went to help {fn} all the same. Afterwards {he} was less afraid.",
        "{n} brought {fn} home safely and was less afraid than before.",
    ),
    # A journey to a place.
    Plot(
        "{ONCE}. [{n} had often heard of {p}|An old picture of {p} hung on {his} wall|{n} dreamed of {p} "
        "almost every night], but {he} had never been there.\n\n"
        "{THEN}, {n} packed [some bread and a warm scarf|an apple and a map|a small bag] and set out. [The "
        "road was long|The path went up and down|It was farther than {he} had thought], and [the wind was "
        'cold|the rain came and went|{his} feet began to hurt]. On the way {he} met {fintro}. "[May I come '
        'with you|Are you going to {p} too|Where are you going]?" asked {fn}. "[Come along|Walk with '
        'me|Let us go together]," said {k}.\n\n'
        "{LATER}, they saw {p}. It was [even more beautiful than in the picture|quiet and full of "
        "light|smaller than {n} had dreamed, and much nicer]. {TOGETHER}",
        "{n} set out to see {p}. On the way {he} met {fn}, and they arrived together.",
        "{n} and {fn} reached {p} together.",
    ),
    # Keeping a place through the storm.
    Plot(
        "{ONCE}. {n} took care of {p}. [Every morning {he} swept the floor|{he} knew every corner of it|It "
        "was a quiet task, and {he} did it well].\n\n"
        "{THEN}, a great storm came. [The wind howled|Rain fell like stones|The sky turned as dark as "
        "ink], and [the lights went out|all the windows shook|nobody dared to go outside]. Then {n} heard "
        'a knock. Outside stood {fintro}, wet and cold. "[Come in quickly|You are safe here|Come in and '
        'get warm]," said {n}.\n\n'
        "All night long they kept a small light burning at {p}, so that [others could find the way|nobody "
        "would be lost|the ships could come home]. [In the morning, the sun came out|When the sun rose, "
        "the storm was over]. {TOGETHER}",
        "{n} took care of {p}. In a great storm {he} let {fn} in, and they kept a light burning all night.",
        "The storm passed, and {n} and {fn} became friends.",
    ),
    # A present.
    Plot(
        "{ONCE}. {his} best friend was {fintro}. {fn} had a birthday soon, and {n} had no money for a "
        "present.\n\n"
        '"[What does {fn} like best|What could I give|What would make {fn} smile]?" thought {n}. [{he} '
        "thought for three days|{he} walked up and down and thought|{he} asked the old owl in the oak]. "
        "Then {n} remembered {at} in the [attic|shed|cellar]. It was [dusty and bent|scratched and "
        "dull|not quite perfect], so {k} [cleaned it|polished it|mended it] for a whole week.\n\n"
        "On the birthday, {fn} opened the parcel and found {t}. [For a while {fhe} said nothing|{fhis} "
        'eyes began to shine|{fhe} jumped up and down]. "It is the best present of all," said {fk}. '
        "{TOGETHER}",
        "{n} had no money for a birthday present, so {he} mended {at} and gave it to {fn}, who loved it.",
        "{fn} was very happy with {t}.",
    ),
    # Mending what everybody needs.
    Plot(
        "{ONCE}. [Everyone knew {k}, because {he} could mend almost anything|{n} was good with {his} "
        "hands|{n} liked to find out how things work].\n\n"
        '{THEN}, {fintro} came to the door with {at}. "[It is broken|It has stopped working|It will not '
        'work any more]," said {fn} sadly. "[Everyone says that it is too late|Nobody can help me|I hope '
        'that you can help me]." {n} looked at {t} from all sides. [First {he} cleaned it|First {he} '
        "opened it carefully]. Then {he} found [a tiny stone|a bent pin|a grain of sand] inside.\n\n"
        '"[There you are|That was all]!" said {k}. {n} put everything back in its place, and {t} was as '
        "good as new. [The two of them danced around the table|{fn} laughed with joy]. {TOGETHER}",
        "{fn} brought {n} {at} that was broken. {n} found what was wrong and mended it.",
        "{n} mended {t}, and {fn} was full of joy.",
    ),
    # A new neighbour.
    Plot(
        "{ONCE}. [It was a quiet life, perhaps a little too quiet|{n} lived alone and talked to the "
        "kettle|{he} had a table with two chairs, but one was always empty].\n\n"
        "{THEN}, {fintro} moved in next door. {n} wanted to say hello, but {he} was shy. [{he} watched "
        "from the window|{he} walked past the door three times|{he} wrote a note and tore it up]. [{fn} "
        "was shy too|On the other side, {fn} was just as shy].\n\n"
        "Then {n} had an idea. {he} [baked a plum cake|made a pot of soup|picked a bunch of flowers], [put "
        'it on the doorstep|carried it over] and knocked. "[How kind of you|What a lovely surprise]," said '
        '{fn}. "[Will you stay for tea|Would you like to come in]?" And {k} came in. {TOGETHER}',
        "{n} was too shy to greet {fn}, the new neighbour, until {he} brought a small gift. Then they had tea.",
        "{n} and {fn} had tea together and became friends.",
    ),
    # A seed and patience.
    Plot(
        "{ONCE}. {THEN}, {n} planted a small seed {where}. [Every day {he} gave it water|{he} sang to it "
        'every morning|{he} built a small fence around it]. For a long time, nothing happened. "[It will '
        'never grow|You are wasting your time]," said {fintro}. "[We will see|Good things take time]," '
        "said {k}.\n\n"
        "Spring came, and a green leaf looked out of the ground. Summer came, and the plant was as tall as "
        "{n}. [In autumn it carried a hundred sweet berries|In autumn it was full of golden apples].\n\n"
        '"[I was wrong|I should have been patient]," said {fn} quietly. {n} [laughed and shared '
        "everything|filled {fhis} basket to the top]. {TOGETHER}",
        "{n} planted a seed and waited patiently, although {fn} laughed at it. In autumn they shared the fruit.",
        "The seed became a plant full of fruit, and {n} shared it with {fn}.",
    ),
    # A race that is not won.
    Plot(
        "{ONCE}. Every year there was a great race to {p}, and this year {n} wanted to win. [{he} ran "
        "every morning|{k} trained in the rain and in the sun|{he} ate porridge every day].\n\n"
        "The race began. {n} was fast, and soon {he} was in front. But halfway there {he} saw {fintro} [at "
        "the side of the road|beside the path], holding a sore foot. [{n} slowed down|{n} looked at the "
        'road and then at {fn}]. "[The race can wait|Lean on me|I will not leave you here]," said {k}.\n\n'
        "Together they came to {p}, the very last of all. But [the cheering was louder than ever|everybody "
        'stood up and clapped|the first prize was waiting for them]. "[That was the best race of all|You '
        'won more than a race]," said {fn}. {GOOD_NIGHT}',
        "{n} wanted to win the race to {p}, but {he} stopped to help {fn}. They came last, and everybody cheered.",
        "{n} and {fn} came last, but everybody cheered for them.",
    ),
    # A night without sleep.
    Plot(
        "{ONCE}. [One night|One clear night|One warm summer night], {n} could not sleep. {he} counted "
        "[sheep|stars|the ticks of the clock], but it did not help. So {he} got up and walked to {p}.\n\n"
        "[The moon was round and bright|Everything was silver and still]. There sat {fintro}, looking at "
        'the sky. "[Can you not sleep either|Are you awake too]?" asked {k}. "[I am listening to the '
        'night|I am counting stars, and I always lose count]," said {fn}.\n\n'
        "{n} sat down beside {fhim}. They listened to [the wind in the leaves|the owls|the soft sound of "
        'the water]. [Soon {n} began to yawn|Little by little, their eyes became heavy]. "[Good '
        'night|Sleep well]" was the last thing that {n} heard.  {GOOD_NIGHT}',
        "{n} could not sleep and walked to {p}. There {he} met {fn}, and they listened to the night together.",
        "{n} became sleepy at last and slept very well.",
    ),
    # Learning about an idea.
    Plot(
        "{ONCE}. {n} knew many things, but {he} knew nothing about {i}. [It made {him} curious|{he} "
        "thought about it all the time].\n\n"
        '{THEN}, {he} asked {fintro}. "What can you tell me about {i}?" {fn} thought for a long time. '
        '"[You cannot learn it from a book alone|Some say that it is simple, and some say that it is '
        'not|It is different for everyone]," {fhe} said. "[Come with me, and I will show you|Let us find '
        'out together]."\n\n'
        "So they walked all day, looked closely at everything and asked everyone they met. [A child told "
        "them a story about it|An old woman sang them a song about it|A sailor drew them a picture of it]. "
        '{LATER}, {n} began to understand. "[Now I know why people talk about {i} so much|I will never '
        'forget {i}]," said {k}. {TOGETHER}',
        "{n} knew nothing about {i}, so {he} asked {fn}, and together they found out.",
        "{n} began to understand {i}, with the help of {fn}.",
    ),
    # Loving an idea.
    Plot(
        "{ONCE}. Nobody loved {i} as much as {n} did. [{he} spoke of it at breakfast and at supper|{he} "
        "had a shelf full of books about it|{he} even dreamed of it].\n\n"
        '{fintro} did not understand. "[What is so good about {i}|Why do you like it so much]?" {fhe} '
        'asked. {n} thought for a while. "[It makes me feel that anything is possible|It reminds me of '
        'home|With it, even a grey day shines]," {he} said.\n\n'
        "{THEN}, {n} showed {fn} what {he} meant. They [stayed outside until dark|did nothing else for a "
        'whole day|sat still and paid attention], and slowly {fn} began to smile. "[I see it now|I think I '
        'understand]," said {fk}. {TOGETHER}',
        "{n} loved {i} more than anything, and one day {he} showed {fn} why.",
        "{fn} understood at last why {n} loved {i}.",
    ),
)
