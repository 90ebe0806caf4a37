"""Questions about the facts of the small world, as chat and as raw text to complete."""

from random import Random

from models.demo.dialogue import Check, Document, Example, ask, is_held_out
from models.demo.vocabulary import BY_SIZE, WORD_RELATIONS
from models.demo.wording import pick, rough, with_article
from models.demo.world import RELATIONS, Relation

ALL_RELATIONS = RELATIONS + WORD_RELATIONS
# A table of seventy capitals is asked more often than one of seven days, but not ten times as often.
_WEIGHTS = [(len(relation.pairs) * len(relation.questions)) ** 0.7 for relation in ALL_RELATIONS]
_SIZE_QUESTIONS = (
    ("Which is {more}, {a} or {b}?", True), ("What is {more}, {a} or {b}?", True), ("Is {a} {more} than {b}?", False),
    ("{a} or {b}, which is {more}?", True), ("which one is {more}: {a} or {b}", True),
)  # fmt: skip


def fact(rng: Random) -> Example:
    relation = rng.choices(ALL_RELATIONS, _WEIGHTS)[0]
    return compare_sizes(rng) if rng.random() < 0.08 else fact_of(rng, relation)


def fact_of(rng: Random, relation: Relation) -> Example:
    subject, found = pick(rng, relation.pairs)
    backward = bool(relation.backward) and rng.random() < 0.25
    wordings = relation.backward if backward else relation.questions
    number = rng.randrange(len(wordings))
    question = rough(rng, _fill(wordings[number], subject, found))
    key = f"fact:{relation.name}:{subject}:{'b' if backward else 'f'}{number}"
    if backward and sum(other == found for _, other in relation.pairs) > 1:
        return fact_of(rng, relation)
    needle = subject if backward else found
    return ask(
        "facts", question, statement(relation, subject, found), keys=(key,), check=Check.CONTAINS, needle=needle
    )


def statement(relation: Relation, subject: str, found: str) -> str:
    return _capitalised(_fill(relation.answer, subject, found))


def short_fact(rng: Random) -> tuple[str, str, str]:
    """A question, its answer in a word, and the key, for answers in other shapes."""
    relation = rng.choices(ALL_RELATIONS, _WEIGHTS)[0]
    subject, found = pick(rng, relation.pairs)
    number = rng.randrange(len(relation.questions))
    return _fill(relation.questions[number], subject, found), found, f"fact:{relation.name}:{subject}:f{number}"


def compare_sizes(rng: Random) -> Example:
    small, big = sorted(rng.sample(range(len(BY_SIZE)), 2))
    more, winner, loser = ("bigger", big, small) if rng.random() < 0.5 else ("smaller", small, big)
    first, second = rng.sample((winner, loser), 2)
    wording, choice = pick(rng, _SIZE_QUESTIONS)
    question = wording.format(more=more, a=with_article(BY_SIZE[first]), b=with_article(BY_SIZE[second]))
    sentence = f"{with_article(BY_SIZE[winner])} is {more} than {with_article(BY_SIZE[loser])}."
    verdict = "Yes" if first == winner else "No"
    answer = _capitalised(sentence) if choice else f"{verdict}, {sentence}"
    key = f"size:{wording}:{small}:{big}"
    return ask("facts", rough(rng, question), answer, keys=(key,))


def fact_text(rng: Random) -> Document:
    """ "The capital of France is" -> " Paris." """
    opening, ending, key = _told(rng)
    return Document("text completion", (key,), ((opening, False), (ending, True)))


def fact_sheet(rng: Random) -> Document:
    """Many taught facts a document: since answers restate the question, telling a fact practises answering it."""
    pieces: list[tuple[str, bool]] = [("Facts:\n", False)]
    for _ in range(rng.randrange(6, 16)):
        opening, ending, key = _told(rng)
        if not is_held_out((key,)):
            pieces += [(opening, False), (f"{ending}\n", True)]
    return Document("fact sheet", ("fact:taught",), tuple(pieces))


def _told(rng: Random) -> tuple[str, str, str]:
    """A fact's sentence, cut before the word that matters, and its key."""
    relation = rng.choices(ALL_RELATIONS, _WEIGHTS)[0]
    subject, found = pick(rng, relation.pairs)
    sentence = statement(relation, subject, found)
    if sentence.count(" ") < 3:  # "The dog" does not say that a sound is wanted
        return _told(rng)
    at = sentence.rfind(f" {found}")
    return sentence[:at], sentence[at:], f"fact:{relation.name}:{subject}:told"


def _fill(wording: str, subject: str, found: str) -> str:
    article = with_article(subject)
    return wording.format(s=subject, o=found, a_s=article, A_s=_capitalised(article), a_o=with_article(found))


def _capitalised(sentence: str) -> str:
    """Unlike `str.capitalize`, leaves the rest as it is."""
    return sentence[0].upper() + sentence[1:]
