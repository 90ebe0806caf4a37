"""Answers long enough to watch them stream, copies of what the prompt says,
and the raw texts that open like a story."""

import string
from random import Random

from models.demo.dialogue import Document, Example, ask
from models.demo.vocabulary import ANIMALS, CITIES, COLOURS, FOODS, NAMES, THINGS
from models.demo.wording import foreign_word, invented_code, invented_word, joined, pick, rough, with_article, words

MONTHS = words("January February March April May June July August September October November December")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
PLANETS = words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
RAINBOW = words("red orange yellow green blue indigo violet")
SEASONS = words("spring summer autumn winter")
_LISTS = (
    (MONTHS, "the months", "the months of the year", "all months", "the twelve months"),
    (DAYS, "the days", "the days of the week", "the seven days", "all days of the week"),
    (PLANETS, "the planets", "the planets of the solar system", "all planets", "the eight planets"),
    (RAINBOW, "the colours of the rainbow", "the rainbow colours", "the colors of the rainbow"),
    (SEASONS, "the seasons", "the four seasons", "the seasons of the year"),
    (list(string.ascii_uppercase), "the alphabet", "the letters of the alphabet", "the ABC", "all letters"),
)
_LIST_WORDINGS = (
    "List {x}.",
    "Name {x}.",
    "Tell me {x}.",
    "What are {x}?",
    "Give me {x}.",
    "Can you list {x}?",
    "Say {x}.",
    "{x}",
)
_COUNT_WORDINGS = (
    "Count from {a} to {b}.", "Count to {b}.", "count from {a} to {b}", "Can you count to {b}?",
    "Please count from {a} to {b}.", "List the numbers from {a} to {b}.", "Write the numbers {a} to {b}.",
    "Count up to {b}.", "Numbers from {a} to {b}.",
)  # fmt: skip
_STORY_WORDINGS = (
    "Tell me a story", "Write a story", "Tell me a short story", "Write a short story", "A story please",
    "Make up a story", "Can you tell me a story?", "I want to hear a story", "Tell me a bedtime story", "story",
    "Write me a story",
)  # fmt: skip
_LOSABLE = words(
    "book lamp pen cup hat shoe ball bag clock key letter map coin ring box spoon camera candle basket ticket"
)
_ECHO_WORDINGS = (
    "Repeat after me: {x}",
    "Say {x}",
    "Repeat: {x}",
    "Echo {x}",
    'Say "{x}"',
    "Please repeat: {x}",
    "Say exactly: {x}",
    "Write {x}",
)
_TIMES = {
    "twice": 2,
    "two times": 2,
    "three times": 3,
    "3 times": 3,
    "four times": 4,
    "5 times": 5,
    "five times": 5,
    "2 times": 2,
    "4 times": 4,
}


def listing(rng: Random) -> Example:
    items, *titles = pick(rng, _LISTS)
    question = pick(rng, _LIST_WORDINGS).format(x=pick(rng, titles))
    return ask("lists and counting", rough(rng, question), ", ".join(items))


def counting(rng: Random) -> Example:
    wording = pick(rng, _COUNT_WORDINGS)
    start = rng.randrange(1, 90) if "{a}" in wording and rng.random() < 0.3 else 1
    end = pick(rng, (5, 10, 15, 20, 20, 25, 30, 40, 50, 100)) if rng.random() < 0.5 else start + rng.randrange(2, 40)
    if end <= start:
        end = start + 10
    down = "{a}" in wording and rng.random() < 0.1
    numbers = range(end, start - 1, -1) if down else range(start, end + 1)
    question = wording.format(a=numbers[0], b=numbers[-1])
    return ask("lists and counting", rough(rng, question), ", ".join(map(str, numbers)))


def story(rng: Random) -> Example:
    asked = rng.random() < 0.6
    hero = pick(rng, ANIMALS)
    question = pick(rng, _STORY_WORDINGS)
    if asked:
        question = f"{question.rstrip('?')} about {with_article(hero)}"
    return ask("story", rough(rng, f"{question}."), story_text(rng, hero))


def story_text(rng: Random, hero: str) -> str:
    name, friend = rng.sample(NAMES[:24], 2)
    thing, other_animal = pick(rng, _LOSABLE), pick(rng, [animal for animal in ANIMALS if animal != hero])
    place = pick(
        rng, ("a dark forest", "a small village", "the mountains", "a quiet lake", "an old castle", "a green valley")
    )
    opening = pick(
        rng,
        (
            f"Once upon a time there was {with_article(hero)} called {name}, who lived near {place}.",
            f"Once upon a time, near {place}, there lived {with_article(hero)} called {name}.",
        ),
    )
    loss = f"One day {name} lost {with_article(thing)} and looked for it everywhere."
    meeting = f"On the way {name} met {with_article(other_animal)} called {friend}."
    talk = pick(
        rng,
        (
            f'"Have you seen my {thing}?" asked {name}. "No," said {friend}, "but I will help you."',
            f'"Why are you sad?" asked {friend}. "I cannot find my {thing}," said {name}.',
        ),
    )
    search = pick(
        rng,
        (
            f"They looked under the trees and along the river, until the sky was {pick(rng, COLOURS[:4])}.",
            "They walked all day, over the hill and across the bridge.",
            f"They asked everybody they met, and shared some {pick(rng, FOODS)} when they were hungry.",
        ),
    )
    hidden = pick(rng, ("a hollow tree", "the tall grass", "an empty nest", "a little boat"))
    found = f"At last they found the {thing} in {hidden}."
    ending = pick(
        rng,
        (
            f"{name} thanked {friend}, and from that day they were friends.",
            f"From that day {name} and {friend} were the best of friends.",
        ),
    )
    middle = [talk, search] if rng.random() < 0.7 else [talk]
    return " ".join([opening, loss, meeting, *middle, found, ending, "The end."])


def echo(rng: Random) -> Example:
    text = _something(rng)
    if rng.random() < 0.45:
        wording, times = pick(rng, tuple(_TIMES.items()))
        question, answer = f"{pick(rng, ('Say', 'Write', 'Repeat', 'say'))} {text} {wording}", " ".join([text] * times)
    else:
        question, answer = pick(rng, _ECHO_WORDINGS).format(x=text), text
    return ask("copying", question, answer)


def _something(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return " ".join(invented_word(rng) for _ in range(rng.randrange(1, 5)))
    if kind < 0.4:
        return invented_code(rng)
    if kind < 0.55:
        return " ".join(foreign_word(rng) for _ in range(rng.randrange(1, 3)))
    if kind < 0.7:
        return pick(
            rng, ("hello", "hello world", "I like you", "good day", "yes", "I am a small model", "Kaon is fast", "hi")
        )
    chosen = rng.sample([*THINGS, *ANIMALS, *COLOURS, *FOODS, *NAMES, *CITIES], rng.randrange(1, 5))
    return joined(chosen) if rng.random() < 0.3 else " ".join(chosen)


def story_document(rng: Random) -> Document:
    text = story_text(rng, pick(rng, ANIMALS))
    return Document("story text", (f"story:{text}",), (("", False), (text, True)))


def introduction_document(rng: Random) -> Document:
    name, city, animal = pick(rng, NAMES), pick(rng, CITIES), pick(rng, ANIMALS)
    text = (
        f"Hello, my name is {name} and I live in {city}. I am {rng.randrange(8, 80)} years old. "
        f"I have {with_article(animal)}, and I like {pick(rng, FOODS)} and the colour {pick(rng, COLOURS)}."
    )
    return Document("introduction text", (f"introduction:{text}",), (("", False), (text, True)))


def list_document(rng: Random) -> Document:
    items = pick(rng, _LISTS)[0]
    if rng.random() < 0.5:
        start = rng.randrange(1, 80)
        items = [str(number) for number in range(start, start + rng.randrange(6, 21))]
    return Document("list text", ("list:taught",), (("", False), (", ".join(items), True)))
