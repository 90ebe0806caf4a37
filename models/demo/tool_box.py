"""The functions that tool chats offer: a few that everybody knows, and any number invented on the spot.

Half of them are invented, names and parameters included, so that the model learns to copy from the schema it is shown
rather than to recall the ones it knows.
"""

from dataclasses import dataclass
from random import Random

from models.demo.dialogue import Json
from models.demo.vocabulary import ANIMALS, CITIES, COLOURS, FOODS, NAMES, THINGS
from models.demo.wording import invented_code, invented_word, pick, words

COMMON_WORDS = (*ANIMALS, *FOODS, *THINGS, *COLOURS)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: parameters name and kind; requests with `{parameter}` gaps; and what to say of the result `{r}`."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    requests: tuple[str, ...]
    report: str = ""


_PLACE, _ITEM = (
    ("city", "location", "place", "town"),
    ("item", "query", "name", "key", "id", "subject", "term", "word"),
)
_VERBS = words("get find lookup fetch check show search read load query")
_NOUNS = words(
    "price stock recipe score route balance status rating owner address schedule news forecast temperature population "
    "definition translation distance level colour order invoice ticket flight profile"
)
_EXTRA = words("limit units lang format page count max size mode level")


def random_tool(rng: Random) -> Tool:
    roll = rng.random()
    if roll < 0.55:
        return _invented_tool(rng)
    return pick(rng, _KNOWN_TOOLS)(rng) if roll < 0.9 else pick(rng, _ACTIONS)


def _weather(rng: Random) -> Tool:
    place = pick(rng, _PLACE)
    return Tool(
        pick(rng, ("get_weather", "get_current_weather", "weather", "weather_lookup")),
        pick(rng, ("Get the weather for a city", "Current weather in a given place", "Get the current weather")),
        ((place, "city"),),
        tuple(
            wording.replace("{x}", f"{{{place}}}")
            for wording in (
                "What is the weather in {x}?", "What's the weather like in {x}?", "weather in {x}",
                "How is the weather in {x} today?", "Is it raining in {x}?", "Tell me the weather in {x}.",
                "Will it rain in {x}?", "Is it cold in {x}?", "Do I need an umbrella in {x}?",
            )
        ),
        f"The weather in {{{place}}} is {{r}}.",
    )  # fmt: skip


def _time(rng: Random) -> Tool:
    place = pick(rng, ("timezone", "city", "location"))
    return Tool(
        pick(rng, ("get_time", "get_current_time", "current_time", "clock")),
        pick(rng, ("Get the current time in a place", "Current time for a timezone")),
        ((place, "city"),),
        tuple(
            wording.replace("{x}", f"{{{place}}}")
            for wording in (
                "What time is it in {x}?", "What's the time in {x}?", "time in {x}",
                "Tell me the current time in {x}.",
            )
        ),
        f"The time in {{{place}}} is {{r}}.",
    )  # fmt: skip


def _convert(rng: Random) -> Tool:
    return Tool(
        pick(rng, ("convert_currency", "exchange", "currency_converter")),
        "Convert money from one currency to another",
        (("amount", "integer"), ("from", "currency"), ("to", "currency")),
        (
            "Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?",
            "What is {amount} {from} in {to}?", "{amount} {from} to {to}",
        ),
        "{amount} {from} is {r}.",
    )  # fmt: skip


def _search(rng: Random) -> Tool:
    query = pick(rng, ("query", "q", "text"))
    return Tool(
        pick(rng, ("search", "web_search", "search_web", "google")),
        pick(rng, ("Search the web", "Search the internet for a text")),
        ((query, "phrase"),),
        tuple(
            wording.replace("{x}", f"{{{query}}}")
            for wording in (
                "Search for {x}.", "Search the web for {x}", "Look up {x} on the web.", "Find {x} on the internet.",
                "google {x}",
            )
        ),
        f"I found this on {{{query}}}: {{r}}.",
    )  # fmt: skip


_KNOWN_TOOLS = (_weather, _weather, _time, _convert, _search)


_ACTIONS = (
    Tool(
        "send_email",
        "Send an email",
        (("to", "name"), ("subject", "word")),
        (
            "Send an email to {to} about {subject}.",
            "Email {to} with the subject {subject}.",
            "Write to {to} about {subject}.",
        ),
        "Done: the email to {to} is sent.",
    ),
    Tool(
        "set_timer",
        "Set a timer",
        (("minutes", "integer"),),
        (
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "timer {minutes} minutes",
            "Wake me in {minutes} minutes.",
        ),
        "Done: the timer is set for {minutes} minutes.",
    ),
    Tool(
        "play_music",
        "Play a song",
        (("song", "phrase"),),
        ("Play {song}.", "Play the song {song}", "I want to hear {song}."),
        "Done: {song} is playing.",
    ),
    Tool(
        "book_table",
        "Book a table in a city",
        (("city", "city"), ("people", "integer")),
        ("Book a table for {people} in {city}.", "I need a table in {city} for {people} people."),
        "Done: a table for {people} in {city}.",
    ),
    Tool(
        "turn_on_light",
        "Turn on the light in a room",
        (("room", "word"),),
        ("Turn on the light in the {room}.", "Light on in the {room}", "Switch on the {room} light."),
        "Done: the light in the {room} is on.",
    ),
)


def _invented_tool(rng: Random) -> Tool:
    """`lookup_zorp(item)`: a verb, a noun known or made up, and one or two parameters of any name."""
    verb = pick(rng, _VERBS)
    noun = pick(rng, _NOUNS) if rng.random() < 0.4 else invented_word(rng)
    first = pick(rng, _ITEM) if rng.random() < 0.6 else invented_word(rng)
    kind = pick(rng, ("word", "word", "city", "name", "code", "integer"))
    said = "look up" if verb == "lookup" else verb
    name = pick(rng, (f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.title()}", noun))
    requests = [
        f"{said} the {noun} for {{{first}}}", f"{said.title()} the {noun} of {{{first}}}.",
        f"What is the {noun} of {{{first}}}?", f"Can you {said} the {noun} for {{{first}}}?",
        f"{said} {noun} {{{first}}}", f"{noun} of {{{first}}}", f"I need the {noun} for {{{first}}}.",
        f"Use {name} with {first} {{{first}}}.", f"Call {name} for {{{first}}}", f"Tell me the {noun} of {{{first}}}.",
    ]  # fmt: skip
    parameters = [(first, kind)]
    report = f"The {noun} of {{{first}}} is {{r}}."
    if rng.random() < 0.25:
        second = pick(rng, _EXTRA) if rng.random() < 0.7 else invented_word(rng)
        if second != first:
            parameters.append((second, pick(rng, ("integer", "word"))))
            requests = [f"{request.rstrip('.?')} with {second} {{{second}}}" for request in requests]
    described = pick(
        rng,
        (
            f"{said.title()}s the {noun}",
            f"{said.title()} the {noun} of a {first}",
            f"The {noun} for a given {first}",
            noun,
        ),
    )
    return Tool(name, described, tuple(parameters), tuple(requests), report)


def random_argument(rng: Random, kind: str) -> Json:
    if kind == "integer":
        return rng.randrange(1, pick(rng, (10, 100, 100, 1000)))
    if kind == "city":
        return pick(rng, CITIES) if rng.random() < 0.6 else invented_word(rng).title()
    if kind == "name":
        return pick(rng, NAMES) if rng.random() < 0.6 else invented_word(rng).title()
    if kind == "currency":
        return pick(rng, ("EUR", "USD", "GBP", "JPY", "CHF", "euros", "dollars", "pounds", "yen", "SEK", "INR"))
    if kind == "code":
        return invented_code(rng)
    words = [
        pick(rng, COMMON_WORDS) if rng.random() < 0.6 else invented_word(rng) for _ in range(pick(rng, (1, 2, 3)))
    ]
    return " ".join(words) if kind == "phrase" else words[0]


def schema(rng: Random, tool: Tool) -> dict[str, Json]:
    """The OpenAI shape, with the optional parts sometimes there and the order of keys not fixed."""
    described = rng.random() < 0.4
    properties: dict[str, Json] = {}
    for name, kind in tool.parameters:
        entry: dict[str, Json] = {"type": "integer" if kind == "integer" else "string"}
        if described:
            entry["description"] = f"The {name}"
        properties[name] = entry
    parts: list[tuple[str, Json]] = [("type", "object"), ("properties", properties)]
    if rng.random() < 0.8:
        parts.append(("required", [name for name, _ in tool.parameters]))
    if rng.random() < 0.2:
        rng.shuffle(parts)
    function: list[tuple[str, Json]] = [
        ("name", tool.name),
        ("description", tool.description),
        ("parameters", dict(parts)),
    ]
    if rng.random() < 0.15:
        function.pop(1)
    if rng.random() < 0.15:
        rng.shuffle(function)
    return {"type": "function", "function": dict(function)}
