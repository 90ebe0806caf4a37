"""Questions that ask for JSON, and chats with tools.

JSON answers have keys and values copied from the prompt, facts and sums wrapped in an object, or lists. Tool chats
call a function if one is needed, answer directly if none is, and report a result in a sentence.
"""

import json
from dataclasses import dataclass
from random import Random

from tools.demo.chats import SYSTEM_PROMPTS, arithmetic, echo, fact, outside, random_sum, short_fact, talk
from tools.demo.examples import (
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    NAMES,
    SURNAMES,
    THINGS,
    Check,
    Example,
    Json,
    Message,
    ask,
    invented_code,
    invented_word,
    is_held_out,
    joined,
    pick,
    rough,
    words,
)

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
# A sentence that contains several fields, and the fields to extract from it.
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
    """A sum, a fact or small talk, in an object under the key that the prompt names, or under "answer"."""
    found: Json
    working: dict[str, Json] = {}
    roll = rng.random()
    if roll < 0.1:
        chat = talk(rng) if rng.random() < 0.7 else outside(rng)
        return _json_example(rng, str(chat.messages[0].content), {"answer": chat.answer}, chat.keys)
    if roll < 0.5:
        sum_ = random_sum(rng)
        question, found, key = sum_.question(rng), sum_.result, sum_.key
        working = {"sum": str(sum_)}  # written out before its result is needed: see `tools.demo.chats`
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
    """The instruction to answer in JSON is in the question, in the system prompt, or in both."""
    system = pick(rng, JSON_SYSTEM_PROMPTS) if not demanded or rng.random() < 0.2 else None
    if not demanded and rng.random() < 0.6:
        system = None
        demand = pick(rng, _DEMANDS)
        question = f"{demand}: {question}" if rng.random() < 0.7 else f"{question} {demand}."
    answer = json.dumps(value, ensure_ascii=False)
    return ask("JSON", question, answer, keys=keys or (f"json:{question.lower()}",), check=Check.JSON, system=system)


# The functions that tool chats offer: a few common ones, and any number of invented ones. Half of them are invented,
# with their names and parameters, so that the model learns to copy from the schema in the prompt instead of recalling
# known ones.

COMMON_WORDS = (*ANIMALS, *FOODS, *THINGS, *COLOURS)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: parameters' names and kinds, requests with `{parameter}` gaps, and sentences for the result
    `{r}`."""

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
    """A function such as `lookup_zorp(item)`: a verb, a known or invented noun, and one or two parameters of any
    name."""
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
    """The function in OpenAI's format; optional members are sometimes present, and the order of keys varies."""
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


def tool_call(rng: Random) -> Example:
    tool, question, arguments, keys = _request(rng)
    messages = (*_maybe_system(rng), Message("user", question), _call(tool, arguments))
    return Example("tool call", keys, messages, Check.TOOL_CALL, tools=_offered(rng, tool))


def no_tool_needed(rng: Random) -> Example:
    plain = pick(rng, (talk, talk, fact, fact, arithmetic, echo))(rng)
    offered = _offered(rng, random_tool(rng))
    messages = (*_maybe_system(rng), *plain.messages)
    return Example("tools offered, none needed", plain.keys, messages, plain.check, plain.needle, offered)


def tool_result(rng: Random) -> Example:
    """A whole round: request, call, result, and a sentence that reports the result."""
    tool, question, arguments, keys = _request(rng)
    if rng.random() < 0.08:
        problem = pick(rng, ("not found", "timeout", f"unknown {invented_word(rng)}", "no such item"))
        content, needle = json.dumps({"error": problem}), problem
        said = f"The tool reported an error: {problem}."
    else:
        content, needle = _result(rng, tool, arguments)
        said = tool.report.format(**arguments, r=needle)
    messages = (
        *_maybe_system(rng), Message("user", question), _call(tool, arguments), Message("tool", content),
        Message("assistant", said),
    )  # fmt: skip
    return Example("answer from a tool result", keys, messages, Check.CONTAINS, needle, _offered(rng, tool))


def _request(rng: Random) -> tuple[Tool, str, dict[str, Json], tuple[str, ...]]:
    if rng.random() < 0.12:
        tool, question, arguments, key = _adder(rng)
        return tool, rough(rng, question), arguments, (f"tool:{tool.name}:{key}",)
    tool = random_tool(rng)
    arguments = {name: random_argument(rng, kind) for name, kind in tool.parameters}
    question = pick(rng, tool.requests).format(**arguments)
    if rng.random() < 0.3:
        question = question.rstrip(".?")
    if rng.random() < 0.15:
        question = f"{pick(rng, ('Please ', 'Hey, ', 'Can you tell me: '))}{question}"
    return tool, question, arguments, (f"tool:{tool.name}:{next(iter(arguments.values()))}",)


def _offered(rng: Random, *wanted: Tool) -> tuple[dict[str, Json], ...]:
    """The schemas of the needed tools among up to two others, in any order."""
    tools = {tool.name: tool for tool in (*(random_tool(rng) for _ in range(pick(rng, (0, 0, 1, 1, 2)))), *wanted)}
    shuffled = list(tools.values())
    rng.shuffle(shuffled)
    return tuple(schema(rng, tool) for tool in shuffled)


def _maybe_system(rng: Random) -> tuple[Message, ...]:
    return (Message("system", pick(rng, SYSTEM_PROMPTS)),) if rng.random() < 0.25 else ()


def _adder(rng: Random) -> tuple[Tool, str, dict[str, Json], str]:
    """A calculator that is called with a sum's operands, in place of a direct answer."""
    sum_ = random_sum(rng, "+" if rng.random() < 0.6 else "-")
    while is_held_out((sum_.key,)):
        sum_ = random_sum(rng, "+" if rng.random() < 0.6 else "-")
    first, second = pick(rng, (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    name = pick(rng, ("add", "add_numbers", "sum")) if sum_.operator == "+" else pick(rng, ("subtract", "minus"))
    verb = "Add" if sum_.operator == "+" else "Subtract"
    if rng.random() < 0.3:
        name, text = pick(rng, ("calculator", "calculate", "evaluate")), f"{sum_.a} {sum_.operator} {sum_.b}"
        tool = Tool(name, "Calculate an expression", (("expression", "string"),), (), "The result is {r}.")
        return tool, sum_.question(rng), {"expression": text}, sum_.key
    tool = Tool(name, f"{verb} two numbers", ((first, "integer"), (second, "integer")), (), "The result is {r}.")
    return tool, sum_.question(rng), {first: sum_.a, second: sum_.b}, sum_.key


def _call(tool: Tool, arguments: dict[str, Json]) -> Message:
    return Message("assistant", None, ({"name": tool.name, "arguments": arguments},))


def _result(rng: Random, tool: Tool, arguments: dict[str, Json]) -> tuple[str, str]:
    """The result of the tool, and the sentence that reports it."""
    if tool.report.startswith("Done"):
        content: str = pick(
            rng, ("ok", '{"status": "ok"}', "done", '{"ok": true}', '{"status": "sent"}', "success", "null")
        )
        return content, tool.report.split()[-1].rstrip(".") if "{" not in tool.report.split()[-1] else "Done"
    number, word = (
        rng.randrange(pick(rng, (10, 100, 1000))),
        pick(rng, COMMON_WORDS) if rng.random() < 0.5 else invented_word(rng),
    )
    plain = pick(
        rng, (str(number), word, f"{word}, {number}", f"{number} {pick(rng, ('C', 'EUR', 'km', 'kg', 'degrees'))}")
    )
    if "weather" in tool.name:
        sky = pick(rng, ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy", "hot", "cold"))
        plain = pick(rng, (f"{sky}, {rng.randrange(40)} C", sky, f"{sky} with {rng.randrange(40)} degrees"))
        if rng.random() < 0.4:
            degrees, key = rng.randrange(-10, 40), pick(rng, ("temperature", "temp", "degrees", "temp_c"))
            pairs = {key: degrees, pick(rng, ("condition", "weather", "sky")): sky}
            return json.dumps(pairs), f"{sky}, {degrees}"
    if "time" in tool.name or tool.name == "clock":
        plain = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    if tool.report == "The result is {r}.":
        plain = str(rng.randrange(-99, 199))
    if "amount" in arguments:
        plain = f"{rng.randrange(1, 9999)}{pick(rng, ('', f'.{rng.randrange(100):02}'))} {arguments['to']}"
    if rng.random() < 0.4:
        key = pick(rng, ("result", "value", "answer", "data", invented_word(rng)))
        return json.dumps({key: int(plain) if plain.removeprefix("-").isdigit() else plain}), plain
    return plain, plain
