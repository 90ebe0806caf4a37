"""How people vary a sentence: case, punctuation, politeness; and words that no list contains, to teach copying."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def words(text: str) -> list[str]:
    """ "a b" as ["a", "b"]: fifty words read better without a hundred quotation marks."""
    return text.split()


def phrases(text: str) -> list[str]:
    """The same for items that hold spaces: "a b,c"."""
    return text.split(",")


_POLITE_BEFORE = (
    "Please tell me: ",
    "Hey, ",
    "Hi! ",
    "Quick question: ",
    "Kaon, ",
    "ok, ",
    "So, ",
    "Tell me, ",
    "Please, ",
)
_POLITE_AFTER = (" please", " Thanks!", " Thank you.", " thx", " please.")
_ONSETS = words("b bl br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn st t th tr v w y z zr")
_VOWELS = words("a e i o u ai ee oo ou y")
_CODAS = ["", "", "", *words("b ck d g l ll m n ng nt p r rb rd rk rm rn rp rt s sh st t x zz")]
_ALPHABETS = (
    "абвгдежзиклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "你好世界中文日本語東京",
    "éèàüöäßñçøå",
    "😀🎉🚀👍🐱🌍",
)


def pick(rng: Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def rough(rng: Random, question: str) -> str:
    """The question as somebody might type it; often unchanged."""
    roll = rng.random()
    if roll < 0.4:
        return question
    if roll < 0.62:
        question = question.lower()
    elif roll < 0.67:
        question = question.upper()
    if rng.random() < 0.4:
        question = question.rstrip("?.!")
    if rng.random() < 0.12:
        question = pick(rng, _POLITE_BEFORE) + question
    if rng.random() < 0.06:
        question += pick(rng, _POLITE_AFTER)
    if rng.random() < 0.06:
        question = pick(
            rng, (f" {question}", f"{question} ", f"{question}\n", question.replace(" ", "  ", 1), f"{question}??")
        )
    return question


def invented_word(rng: Random) -> str:
    return "".join(
        pick(rng, _ONSETS) + pick(rng, _VOWELS) + pick(rng, _CODAS) for _ in range(pick(rng, (1, 1, 1, 2, 2)))
    )


def invented_code(rng: Random) -> str:
    """Something like an identifier or a part number: A7-42, x91, ORD-5521."""
    letters = "".join(pick(rng, "abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(1, 4)))
    return f"{letters.upper() if rng.random() < 0.6 else letters}{pick(rng, ('-', '', '_'))}{rng.randrange(10000)}"


def foreign_word(rng: Random) -> str:
    alphabet = pick(rng, _ALPHABETS)
    return "".join(pick(rng, alphabet) for _ in range(rng.randrange(1, 6)))


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def joined(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
