"""Text to work on: sentences of common words, made-up words, rows of numbers and lists."""

from random import Random

PEOPLE = (
    "Anna", "Peter", "Maria", "John", "Laura", "David", "Julia", "Mark", "Clara", "Simon", "Helen", "Oscar", "Alice",
    "Robert", "Sofia", "Henry", "Olivia", "Martin", "Grace", "Victor",
)  # fmt: skip
CITIES = (
    "Oslo", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Lisbon", "Dublin", "Athens", "Prague", "London", "Boston",
    "Chicago", "Seattle", "Toronto", "Zurich", "Geneva", "Naples", "Hamburg", "Lyon",
)  # fmt: skip
ADJECTIVES = (
    "old", "new", "small", "large", "quick", "slow", "quiet", "loud", "bright", "dark", "warm", "cold", "happy", "sad",
    "clever", "lazy", "brown", "golden", "silver", "wooden", "empty", "full", "clean", "round", "long", "short",
    "young", "strange", "famous", "simple",
)  # fmt: skip
NOUNS = (
    "house", "river", "dog", "cat", "fox", "bird", "horse", "garden", "window", "door", "table", "lamp", "bridge",
    "street", "train", "ship", "letter", "book", "story", "song", "picture", "clock", "key", "box", "bag", "coat",
    "tree", "flower", "mountain", "lake", "island", "village", "farmer", "teacher", "doctor", "sailor", "painter",
    "king", "queen", "child", "friend", "neighbour", "server", "engine", "machine", "number", "question", "answer",
    "meeting", "report",
)  # fmt: skip
VERBS = (
    "sees", "finds", "opens", "closes", "likes", "paints", "builds", "carries", "follows", "watches", "reads",
    "writes", "sells", "buys", "cleans", "moves", "helps", "loses", "keeps", "brings", "jumps over", "waits for",
    "looks at", "walks to", "talks about", "runs past", "thinks of", "sits near", "asks for", "comes from",
)  # fmt: skip
TIMES = (
    "today", "tomorrow", "every morning", "in the evening", "at night", "in the summer", "in the winter",
    "after lunch", "before dinner", "once a week", "all day", "on Sunday", "again", "at noon",
)  # fmt: skip
COLORS = ("red", "blue", "green", "yellow", "black", "white", "grey", "pink", "orange", "purple")
THINGS = (
    "lamp", "chair", "desk", "phone", "camera", "jacket", "bottle", "bicycle", "mirror", "carpet", "keyboard",
    "umbrella", "backpack", "teapot", "blanket", "candle", "basket", "ladder", "pillow", "guitar",
)  # fmt: skip
_STARTS = ("b", "br", "d", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "z")
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_ENDS = ("", "", "n", "r", "s", "t", "l", "m", "nd", "st", "ck")


def made_up_word(rng: Random) -> str:
    """A word of one to three syllables that is most likely in no list."""
    syllables = rng.choices((1, 2, 3), weights=(2, 5, 2))[0]
    return "".join(rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS) for _ in range(syllables))


def word(rng: Random) -> str:
    """A noun, in one case of four a made-up word."""
    return made_up_word(rng) if rng.random() < 0.25 else rng.choice(NOUNS)


def noun_phrase(rng: Random) -> str:
    """`the old house`, `a fox`, `Anna`."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(PEOPLE)
    article = rng.choice(("the", "the", "a", "every", "my", "this"))
    adjective = f" {rng.choice(ADJECTIVES)}" if rng.random() < 0.5 else ""
    noun = word(rng)
    if article == "a" and (adjective.strip() or noun)[0] in "aeiou":
        article = "an"
    return f"{article}{adjective} {noun}"


def sentence(rng: Random) -> str:
    """One sentence with a capital letter and a full stop, about 5 to 14 words."""
    text = f"{noun_phrase(rng)} {rng.choice(VERBS)} {noun_phrase(rng)}"
    kind = rng.random()
    if kind < 0.2:
        text += f" in {rng.choice(CITIES)}"
    elif kind < 0.4:
        text += f" {rng.choice(TIMES)}"
    elif kind < 0.6:
        text += f" and {rng.choice(VERBS)} {rng.randint(2, 99)} {rng.choice(THINGS)}s"
    elif kind < 0.7:
        text += f", but {noun_phrase(rng)} {rng.choice(VERBS)} it"
    return text[0].upper() + text[1:] + "."


def sentences(rng: Random, count: int) -> list[str]:
    """Sentences that all differ."""
    found: list[str] = []
    while len(found) < count:
        one = sentence(rng)
        if one not in found:
            found.append(one)
    return found


def loose_words(rng: Random, count: int) -> str:
    """Words without grammar, half of them made up, some with a capital letter."""
    words = [made_up_word(rng) if rng.random() < 0.5 else rng.choice(NOUNS + ADJECTIVES) for _ in range(count)]
    return " ".join(one.capitalize() if rng.random() < 0.1 else one for one in words)


def numbers(rng: Random, count: int) -> str:
    """Numbers of one to five digits, separated by commas or spaces."""
    return rng.choice((", ", " ")).join(str(rng.randint(0, 10 ** rng.randint(1, 5))) for _ in range(count))


def joined(words: list[str]) -> str:
    """`a, b and c`."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
