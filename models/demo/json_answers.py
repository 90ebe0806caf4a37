"""Questions that want JSON: keys and values copied from the prompt, facts and sums wrapped in an object, lists."""

import json
from random import Random

from models.demo.arithmetic import random_sum
from models.demo.dialogue import Check, Example, Json, ask
from models.demo.facts import short_fact
from models.demo.small_talk import outside, talk
from models.demo.vocabulary import ANIMALS, CITIES, COLOURS, FOODS, NAMES, SURNAMES, THINGS
from models.demo.wording import invented_code, invented_word, joined, pick, rough, words

JSON_SYSTEM_PROMPTS = (
    "Answer in JSON.", "Always reply with JSON.", "Reply with JSON only.",
    "You answer with valid JSON and nothing else.", "Respond only in JSON.",
    "You are a helpful assistant that answers in JSON.", "Output JSON.", "Only output valid JSON.",
    "You are a JSON API. Answer with a JSON object.", "Your output must be valid JSON.", "Return JSON, no prose.",
)  # fmt: skip
_DEMANDS = (
    "Answer in JSON", "Reply with JSON only", "Respond in JSON", "Give JSON", "JSON only", "In JSON", "As JSON",
    "Answer with JSON", "Output JSON", "Return JSON",
)  # fmt: skip
_WITH_VALUES = (
    "Give me a JSON object with {keys} for {values}", "{demand}: {keys} for {values}",
    "Make a JSON object with {keys} from {values}", "Write a JSON object with the keys {keys} and the values {values}",
    "Give me JSON with {keys}: {values}", "JSON with {keys}: {values}",
    "Create a JSON object with the keys {keys} for {values}",
    "Return a JSON object with {keys}. The values are {values}", "I need a JSON object with {keys} for {values}",
    "Generate JSON with fields {keys} for {values}", "{demand} with keys {keys} for {values}",
)  # fmt: skip
_WITH_PAIRS = (
    "{demand}: {is_pairs}.", "Give me a JSON object where {is_pairs}", "Convert to JSON: {colon_pairs}",
    "{equals_pairs} to JSON", "Turn this into JSON: {colon_pairs}", "{demand}: {colon_pairs}",
    "Convert this to a JSON object: {equals_pairs}", "Make a JSON object: {is_pairs}",
    "Give me a JSON object with {of_pairs}", "{demand}. {is_pairs}.", "JSON: {equals_pairs}",
    "Create a JSON object with {of_pairs}", "Return a JSON object with {of_pairs}", "Write JSON with {of_pairs}",
)  # fmt: skip
# A sentence that tells of several fields, and the fields to take from it.
_SENTENCES = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} is {age} and works in {city}.", ("name", "age", "city")),
    ("{name} has {count} {thing}s.", ("name", "count", "thing")),
    ("The {thing} is {color} and costs {price} dollars.", ("thing", "color", "price")),
    ("{name} has a {animal} and likes {food}.", ("name", "animal", "food")),
    ("{name} lives in {city} with a {animal}.", ("name", "city", "animal")),
    ("{name}, {age}, likes {food} and comes from {city}.", ("name", "age", "food", "city")),
    ("{name} bought a {color} {thing} for {price} dollars in {city}.", ("name", "color", "thing", "price", "city")),
)
_EXTRACTIONS = (
    "Extract {keys} as JSON: {text}", "{text} Give me {keys} as JSON.", "{demand} with {keys}: {text}",
    "Get {keys} from this text as JSON: {text}", "Read this and answer in JSON with keys {keys}: {text}",
    "{text} Put {keys} in a JSON object.", "Extract {keys} in JSON from: {text}",
)  # fmt: skip
_LIST_REQUESTS = (
    "Give me a JSON list of {items}", "Make a JSON array with {items}", "{demand}: a list of {items}",
    "Write {items} as a JSON list", "JSON array of {items}", "Return a JSON array of {items}",
)  # fmt: skip
_STRINGS = words(
    "name city country color colour animal food product title user item id status type label first_name last_name "
    "email language pet owner brand team role address thing"
)
_NUMBERS = words("age price count quantity year number size score total weight height stock amount level zip")


def _value_of(rng: Random, key: str) -> Json:
    if key in _NUMBERS:
        return rng.randrange(pick(rng, (10, 100, 100, 1000, 10000)))
    known = {
        "name": NAMES, "first_name": NAMES, "last_name": SURNAMES, "user": NAMES, "owner": NAMES, "city": CITIES,
        "color": COLOURS, "colour": COLOURS, "animal": ANIMALS, "pet": ANIMALS, "food": FOODS, "product": THINGS,
        "item": THINGS, "thing": THINGS,
    }.get(key)  # fmt: skip
    if known and rng.random() < 0.65:
        value: str = pick(rng, known)
        return f"{value} {pick(rng, SURNAMES)}" if key in ("name", "user") and rng.random() < 0.2 else value
    if key == "email":
        return f"{invented_word(rng)}@{invented_word(rng)}.com"
    if key == "id" or rng.random() < 0.15:
        return invented_code(rng)
    word = invented_word(rng)
    word = word.title() if rng.random() < 0.5 else word
    return f"{word} {invented_word(rng)}" if rng.random() < 0.2 else word


def _fields(rng: Random) -> dict[str, Json]:
    fields: dict[str, Json] = {}
    for _ in range(pick(rng, (1, 2, 2, 2, 3, 3, 4))):
        roll = rng.random()
        key = pick(rng, _STRINGS) if roll < 0.5 else pick(rng, _NUMBERS) if roll < 0.8 else invented_word(rng)
        fields[key] = _value_of(rng, key) if roll < 0.8 or rng.random() < 0.5 else rng.randrange(1000)
    if rng.random() < 0.25:
        fields = {"name": _value_of(rng, "name"), "age": rng.randrange(100)} | fields
    return fields


def json_fields(rng: Random) -> Example:
    fields = _fields(rng)
    keys, values = list(fields), [str(value) for value in fields.values()]
    if rng.random() < 0.5:
        separator = pick(rng, ("", "", '"', "`"))
        named = [f"{separator}{key}{separator}" for key in keys]
        question = pick(rng, _WITH_VALUES).format(
            demand=pick(rng, _DEMANDS),
            keys=joined(named) if rng.random() < 0.6 else ", ".join(named),
            values=joined(values) if rng.random() < 0.3 else ", ".join(values),
        )
    else:
        the = pick(rng, ("", "the "))
        question = pick(rng, _WITH_PAIRS).format(
            demand=pick(rng, _DEMANDS),
            is_pairs=joined([f"{the}{key} is {value}" for key, value in zip(keys, values, strict=True)]),
            of_pairs=joined([f"{key} {value}" for key, value in zip(keys, values, strict=True)]),
            colon_pairs=pick(rng, (", ", "; ", "\n")).join(
                f"{key}: {value}" for key, value in zip(keys, values, strict=True)
            ),
            equals_pairs=pick(rng, (", ", " ", "; ")).join(
                f"{key}={value}" for key, value in zip(keys, values, strict=True)
            ),
        )
    question += pick(rng, ("", "", ".", " please", ". No explanation.", ". Only JSON."))
    return _json_example(rng, question, fields, demanded=True)


def json_extraction(rng: Random) -> Example:
    sentence, mentioned = pick(rng, _SENTENCES)
    everything = {key: _value_of(rng, key) for key in mentioned}
    wanted = [key for key in mentioned if rng.random() < 0.75] or list(mentioned)
    if rng.random() < 0.3:
        rng.shuffle(wanted)
    question = pick(rng, _EXTRACTIONS).format(
        keys=joined(wanted), text=sentence.format(**everything), demand=pick(rng, _DEMANDS)
    )
    return _json_example(rng, question, {key: everything[key] for key in wanted}, demanded=True)


def json_of_question(rng: Random) -> Example:
    """A sum, a fact or small talk, in an object under the key that the prompt names or else "answer"."""
    found: Json
    working: dict[str, Json] = {}
    roll = rng.random()
    if roll < 0.1:
        chat = talk(rng) if rng.random() < 0.7 else outside(rng)
        return _json_example(rng, str(chat.messages[0].content), {"answer": chat.answer}, chat.keys)
    if roll < 0.5:
        sum_ = random_sum(rng)
        question, found, key = sum_.question(rng), sum_.result, sum_.key
        working = {"sum": str(sum_)}  # written out before its result is needed: see `models.demo.arithmetic`
    else:
        question, text, key = short_fact(rng)
        found = int(text) if text.isdigit() else text
    question = rough(rng, question)
    if rng.random() < 0.7:
        return _json_example(rng, question, working | {"answer": found}, (key,))
    name = pick(rng, ("result", "value", "reply", "output", "capital", "number", invented_word(rng)))
    request, demanded = pick(rng, (("Use", False), ("Answer in JSON with", True), ("Give a JSON object with", True)))
    return _json_example(
        rng, f"{question} {request} the key {name}.", working | {name: found}, (key,), demanded=demanded
    )


def json_list(rng: Random) -> Example:
    source = pick(rng, (NAMES, CITIES, COLOURS, FOODS, THINGS, ANIMALS))
    items = rng.sample(source, rng.randrange(2, 6)) if rng.random() < 0.7 else [invented_word(rng) for _ in range(3)]
    numbers = [rng.randrange(100) for _ in range(rng.randrange(2, 6))]
    values: list[Json] = list(numbers) if rng.random() < 0.2 else list(items)
    question = pick(rng, _LIST_REQUESTS).format(
        items=joined([str(value) for value in values]), demand=pick(rng, _DEMANDS)
    )
    return _json_example(rng, question, values, demanded=True)


def _json_example(
    rng: Random, question: str, value: Json, keys: tuple[str, ...] = (), *, demanded: bool = False
) -> Example:
    """The demand for JSON stands in the question, in the system prompt, or in both."""
    system = pick(rng, JSON_SYSTEM_PROMPTS) if not demanded or rng.random() < 0.2 else None
    if not demanded and rng.random() < 0.6:
        system = None
        demand = pick(rng, _DEMANDS)
        question = f"{demand}: {question}" if rng.random() < 0.7 else f"{question} {demand}."
    answer = json.dumps(value, ensure_ascii=False)
    return ask("JSON", question, answer, keys=keys or (f"json:{question.lower()}",), check=Check.JSON, system=system)
