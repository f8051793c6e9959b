"""Recipes in four or five steps."""

from ops.demo import words
from ops.demo.phrase import articles, expand, say
from ops.demo.subjects import Casting, plural


def recipe(casting: Casting) -> tuple[str, str]:
    """A recipe in four or five steps; a soup or a salad takes any vegetable."""
    rng = casting.rng
    vegetable = casting.noun(words.VEGETABLES, 0.1)
    dish, steps = rng.choice(
        (
            (
                f"{vegetable} soup",
                f"1. Cut [two onions|an onion] and some {plural(vegetable)} into pieces.\n2. Fry "
                "them gently in a little oil.\n3. Add [a litre of water|water] and salt.\n"
                "4. Cook it for twenty minutes, then mash it.\n5. Serve it hot, with bread.",
            ),
            (
                f"{vegetable} salad",
                f"1. Wash the {plural(vegetable)} and cut them [small|into thin slices].\n2. Mix "
                "oil, lemon juice, salt and a little honey.\n3. Put everything into a bowl and "
                "stir.\n"
                "4. Wait ten minutes before you eat it.",
            ),
            (
                f"roasted {plural(vegetable)}",
                (
                    f"1. Heat the oven to 200 degrees.\n2. Cut the {plural(vegetable)} into "
                    "pieces.\n3. Mix them with oil, salt and thyme.\n4. Roast them for half an hour."
                ),
            ),
            (
                "pancakes",
                "1. Mix two eggs, a cup of flour and a cup of milk.\n"
                "2. Add a pinch of salt and [let it rest|wait ten minutes].\n"
                "3. Fry thin pancakes in a little butter.\n"
                "4. Serve them with [jam|honey|apple sauce].",
            ),
            (
                "[tea|a cup of tea|a good cup of tea]",
                (
                    "1. Boil fresh water.\n"
                    "2. Put the tea into a warm pot.\n"
                    "3. Pour the water over it and wait [three|four] minutes.\n"
                    "4. Drink it slowly, with a friend."
                ),
            ),
            (
                "[bread|a loaf of bread|simple bread]",
                "1. Mix flour, water, salt and a little yeast.\n"
                "2. Knead the dough for ten minutes.\n"
                "3. Let it rest [overnight|for two hours].\n"
                "4. Bake it for forty minutes.\n"
                "5. Let it cool before you cut it.",
            ),
            (
                "[porridge|oatmeal]",
                (
                    "1. Put one cup of oats and two cups of milk into a pot.\n"
                    "2. Cook it slowly and stir.\n"
                    "3. Add a pinch of salt.\n"
                    "4. Serve it with [honey|berries|an apple]."
                ),
            ),
            (
                "[an omelette|eggs|scrambled eggs]",
                (
                    "1. Beat three eggs with salt and pepper.\n"
                    "2. Melt some butter in a pan.\n"
                    "3. Pour in the eggs and stir gently.\n"
                    "4. Serve them at once, with toast."
                ),
            ),
            (
                "[lemonade|a lemonade]",
                (
                    "1. Press the juice out of three lemons.\n"
                    "2. Stir in two spoons of sugar.\n"
                    "3. Add a litre of cold water.\n"
                    "4. Serve it with ice and mint."
                ),
            ),
            (
                "[cookies|biscuits]",
                (
                    "1. Mix butter and sugar until they are soft.\n"
                    "2. Add flour and an egg.\n"
                    "3. Make small balls and press them flat.\n"
                    "4. Bake them for twelve minutes.\n"
                    "5. Try not to eat them all at once."
                ),
            ),
            (
                "[pasta|spaghetti|noodles]",
                (
                    "1. Boil a large pot of water and add salt.\n"
                    "2. Cook the pasta for nine minutes.\n"
                    "3. Warm some tomatoes with oil and garlic.\n"
                    "4. Mix everything and add cheese."
                ),
            ),
            (
                "[a sandwich|toast with cheese|a cheese sandwich]",
                (
                    "1. Take two slices of good bread.\n"
                    "2. Put butter and cheese between them.\n"
                    "3. Toast them in a pan on both sides.\n"
                    "4. Cut the sandwich in half and share it."
                ),
            ),
        )
    )
    dish = expand(dish, rng)
    asks = (
        "[How do I make|How can I make|How do you cook|Give me a recipe for|A recipe for|I want to "
        "make|Recipe for|Tell me how to make|Do you have a recipe for] {dish}[?|.|]"
    )
    lead = "Here is a simple recipe for {dish}:\n"
    return articles(expand(asks, rng, {"dish": dish})), say(lead + steps, rng, {"dish": dish})
