"""The word pools of the demonstration grammar.

Every pool is a tuple of strings without article, lower-case unless it is a name. The kind of a noun decides which plots
it can play in: a creature or a person acts, a thing is found or mended, a place is visited, an idea is learned about.
"""


def _pool(text: str) -> tuple[str, ...]:
    """Comma-separated words in a fixed order, without duplicates."""
    return tuple(dict.fromkeys(" ".join(word.split()) for word in text.split(",") if word.strip()))


CREATURES = _pool("""
fox, bear, rabbit, hedgehog, squirrel, mouse, owl, cat, dog, puppy, kitten, frog, toad, turtle, tortoise, snail,
bee, butterfly, ant, spider, beetle, ladybird, cricket, sparrow, robin, heron, crow, raven, goose, duck, duckling,
swan, hen, rooster, penguin, seal, otter, beaver, badger, mole, deer, moose, wolf, lion, tiger, elephant, giraffe,
zebra, monkey, gorilla, panda, koala, kangaroo, camel, horse, pony, donkey, cow, goat, sheep, lamb, pig, piglet,
llama, alpaca, parrot, pigeon, pelican, flamingo, peacock, eagle, falcon, bat, whale, dolphin, shark, octopus, crab,
lobster, jellyfish, fish, goldfish, salmon, seahorse, starfish, dragon, unicorn, griffin, phoenix, troll, giant,
fairy, ghost, robot, dinosaur, mammoth, lizard, gecko, chameleon, snake, crocodile, hippo, rhino, ostrich, hamster,
ferret, raccoon, skunk, weasel, lynx, leopard, cheetah, walrus, polar bear, snow leopard, sea lion, hummingbird,
woodpecker, firefly, dragonfly, moth, caterpillar, worm, newt, salamander, magpie, swallow, stork, cuckoo,
nightingale, monster, alien, snowman, mermaid, elf, goblin, gnome, dwarf, teddy bear, chicken, bull, calf, bison,
buffalo, reindeer, elk, hare, chipmunk, guinea pig, platypus, armadillo, sloth, lemur, meerkat, hyena, jackal,
coyote, turkey, sea turtle, squid, shrimp, clam, wombat
""")

PERSONS = _pool("""
baker, sailor, fisherman, gardener, teacher, doctor, nurse, painter, writer, poet, musician, singer, dancer,
carpenter, blacksmith, tailor, shoemaker, clockmaker, librarian, postman, farmer, shepherd, miller, king, queen,
prince, princess, knight, wizard, witch, pirate, captain, pilot, astronaut, scientist, inventor, engineer,
programmer, student, girl, boy, child, grandmother, grandfather, mother, father, cook, chef, waiter, juggler, clown,
magician, mayor, judge, detective, explorer, traveller, climber, runner, swimmer, cyclist, train driver, bus driver,
lighthouse keeper, beekeeper, weaver, potter, photographer, violinist, pianist, drummer, librarian, mechanic,
plumber, electrician, firefighter, vet, dentist, astronomer, mapmaker, toymaker, watchmaker, bookseller, florist,
barber, builder, gardener, goalkeeper, football player, chess player, queen, hermit, monk, ranger, diver, zookeeper,
ferryman, cheesemaker, candle maker, storyteller, robot engineer, old man, old woman, little girl, little boy,
ninja, cowboy, superhero, viking, caveman, lawyer, accountant
""")

THINGS = _pool("""
lantern, clock, watch, key, map, book, letter, teapot, cup, spoon, bowl, chair, table, lamp, candle, mirror,
umbrella, hat, scarf, coat, button, shoe, boot, glove, blanket, pillow, kite, balloon, ball, drum, flute, violin,
piano, guitar, trumpet, bell, boat, ship, raft, canoe, bicycle, train, tram, bus, car, tractor, wagon, aeroplane,
rocket, telescope, compass, camera, radio, telephone, typewriter, computer, pencil, paintbrush, painting, suitcase,
backpack, basket, bottle, box, chest, ladder, hammer, wheel, rope, anchor, sail, coin, ring, necklace, crown, sword,
shield, stone, pebble, shell, feather, acorn, seed, flower, rose, tulip, sunflower, mushroom, tree, oak, apple,
pear, plum, orange, lemon, pumpkin, carrot, potato, onion, tomato, cake, loaf of bread, pie, pancake, cookie,
sandwich, jar of honey, cheese, puppet, doll, puzzle, music box, snow globe, magnet, spaceship, submarine, hot air
balloon, sled, skateboard, broom, kettle, toaster, fridge, vending machine, washing machine, wheelbarrow, watering
can, fountain pen, diary, dictionary, newspaper, postcard, ticket, flag, tent, hammock, swing, carousel, snowflake,
cloud, star, comet, rainbow, lighthouse lamp, sock, wallet, cactus, leaf, pine cone, pocket watch, magic carpet,
treasure chest, notebook, server, keyboard, calculator, battery, light bulb, chessboard, marble, jigsaw, trophy,
banana, strawberry, cherry, coconut, pizza, noodle
""")

# Things that a story brings along by itself: solid, old enough to be lost, found, given or mended.
SOLID = _pool("""
lantern, clock, watch, key, lamp, mirror, umbrella, kite, drum, flute, violin, guitar, trumpet, bell, bicycle,
telescope, compass, camera, radio, typewriter, paintbrush, suitcase, basket, music box, kettle, teapot, toy boat,
puppet, fountain pen, pocket watch, sled, wooden box, silver spoon, little train, globe, accordion, harp, tin
whistle, weather vane, spinning top
""")

PLACES = _pool("""
lighthouse, castle, library, bakery, garden, forest, island, mountain, valley, river, lake, pond, harbour, beach,
cave, bridge, tower, windmill, farm, barn, village, city, school, museum, station, airport, market, bookshop, toy
shop, cafe, kitchen, attic, cellar, greenhouse, orchard, meadow, field, desert, jungle, swamp, waterfall, volcano,
glacier, palace, temple, observatory, theatre, circus, playground, park, zoo, hotel, inn, cottage, treehouse,
hospital, post office, workshop, factory, mine, tunnel, railway, crossroads, well, fountain, old mill, data center,
space station, moon base, coral reef, hill, cliff, bay, marsh, vineyard, monastery, fortress, maze, rooftop,
balcony, bus stop, swimming pool
""")

IDEAS = _pool("""
winter, spring, summer, autumn, snow, rain, wind, fog, thunder, sunshine, moonlight, time, courage, friendship,
kindness, patience, music, silence, luck, hope, love, home, sleep, dreaming, magic, mathematics, history, chess,
football, baking, gardening, fishing, painting, reading, swimming, dancing, singing, the sea, the moon, the sun, the
night sky, the sky, the wind, the night, the dark, the north, space, gravity, electricity, the internet, memory,
honesty, trust, happiness, sadness, growing up, moving house, the first day of school, losing a tooth, a birthday, a
storm, a dream, a secret, a journey, a holiday, homework, breakfast, chocolate, tea, coffee, bread, honey,
Christmas, Monday, the future, the past, freedom, peace, laughter, quantum physics, evolution, democracy,
philosophy, machine learning, photosynthesis, climate change, geometry, cooking, computing, a wedding, a race, an
adventure, the ocean, the rain, time travel
""")

WORLD = _pool("""
Paris, London, Rome, Berlin, Vienna, Lisbon, Oslo, Cairo, Tokyo, Kyoto, Delhi, Lima, Boston, Chicago, Texas, Alaska,
Canada, Norway, Iceland, Ireland, Scotland, Wales, Spain, Italy, France, Greece, Egypt, Kenya, India, China, Japan,
Peru, Brazil, Mexico, Venice, Prague, Zurich, Geneva, Moscow, Sydney, Africa, Europe, Antarctica, Mars, Venus,
Saturn
""")

SHE_NAMES = _pool("""
Mara, Ada, Ida, Nora, Lena, Clara, Rosa, Mila, Tilda, Greta, Hazel, Ivy, Juniper, Wren, Poppy, Daisy, Olive, Pearl,
Ruby, Opal, Luna, Stella, Vera, Elsa, Freya, Edith, Agnes, Martha, Alice, Emma, Sofia, Anna, Julia, Lucy, Maya, Zoe,
Sarah, Hannah, Maria, Nina, Willow, Fern, Marigold, Clementine, Pippa, Dora, Flora, Minna, Selma, Thea
""")
HE_NAMES = _pool("""
Oskar, Otto, Emil, Anton, Felix, Hugo, Leo, Max, Theo, Finn, Jonas, Elias, Noah, Ben, Sam, Tom, Jack, Henry, Arthur,
Oliver, Walter, Rufus, Barnaby, Bramble, Basil, Clover, Pepper, Rowan, Ash, Birch, Moss, Pip, Tib, Odo, Milo, Arlo,
Hector, Igor, Jasper, Casper, Linus, Magnus, Nils, Olaf, Pablo, Quentin, Ravi, Kenji, Omar, Ivan, David, Peter,
Paul, John
""")

LOOKS = _pool("""
small, little, tiny, young, old, quiet, shy, curious, brave, clever, cheerful, friendly, gentle, kind, patient,
sleepy, thoughtful, careful, proud, clumsy, lonely, grumpy, hungry, lazy, lost, happy, sad, red, blue, green, white,
black, grey, golden, silver, purple, striped, spotted, round, tall, very small, very old, blind, invisible, flying,
magical
""")
SHAPES = _pool("""
small, little, tiny, old, broken, golden, silver, red, blue, green, white, yellow, purple, rusty, dusty, wooden,
heavy, lost, forgotten, magical, shiny, strange, round, giant, tiny blue, very old, talking, haunted, hidden,
secret, beautiful
""")

COLOURS = _pool("blue, green, yellow, red, orange, purple, silver, white, grey, brown, pink, black, turquoise, gold")
SEASONS = _pool("spring, summer, autumn, winter")
FOODS = _pool("""
soup, bread, pancakes, porridge, apple pie, pizza, pasta, rice, cheese, honey, salad, potatoes, dumplings, noodles,
blueberries, strawberries, chocolate, toast, cake, carrots, ice cream, plums, cherries, tomato soup, curry, tacos,
sushi
""")
VEGETABLES = _pool("""
carrot, potato, tomato, leek, onion, pumpkin, mushroom, pea, lentil, bean, cabbage, spinach, parsnip, beetroot,
broccoli, celery, sweet potato, turnip, courgette, corn
""")

SETTINGS = _pool("""
in a small village, at the edge of a forest, by the sea, near a quiet lake, on a green hill, beside a slow river, in
a busy harbour town, in a narrow street, under an old oak, behind the old mill, on a windy island, at the foot of a
mountain, in a house with a red door, at the end of a long lane, in a little house with a blue roof, not far from
here
""")
WISHES = _pool("""
learn to dance, learn to fly, learn to swim, learn to sing, learn to read, see the ocean, see the snow, touch the
clouds, paint a picture, play the violin, bake a perfect cake, write a book, build a boat, find a friend, see the
stars up close, ride a bicycle, grow a garden, visit the moon, learn to whistle, tell good stories, travel by train,
play football
""")
SKILLS = _pool("""
knit, cook, juggle, skate, ski, drive, sail, climb, draw, paint, type, sew, fish, surf, jump, run, write, speak, count,
bake, dive, ride, play chess, play the piano, play the drums, build houses, speak French, make cheese, tell jokes, row,
do magic, grow roses, fix clocks, read maps, walk on stilts, make tea, sing opera, catch rain, ask for help, rest
""")
FEARS = _pool("""
the dark, thunder, deep water, heights, the wind, strangers, loud noises, the forest at night, speaking aloud,
mistakes, spiders, being alone, the long tunnel, flying
""")
# Fields that only a larger model knows something about.
FIELDS = _pool("""
quantum physics, the stock market, photosynthesis, the French Revolution, machine learning, a good lawyer, the Roman
Empire, climate change, my taxes, black holes, the human brain, World War II, blockchain, the periodic table,
vitamins, philosophy, a new car, democracy, the speed of light, evolution, python, JavaScript, a linear equation,
Shakespeare, Napoleon, Einstein, Beethoven, the price of gold, inflation, a mortgage, a sorting algorithm, the
theory of relativity, DNA, vaccines, the European Union, a recursive function, the Pythagorean theorem, politics,
religion, the news, my homework, a visa, the best phone, the weather on Mars, Bitcoin, neural networks, yoga, the
Olympics, the president, Kubernetes, Docker, Linux, regular expressions, thermodynamics, the Eiffel Tower, Mount
Everest, prime numbers
""")
