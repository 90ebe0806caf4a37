"""Chats with tools: a call when one is needed, a plain answer when none is, a sentence once the result is there."""

import json
from random import Random

from models.demo.arithmetic import arithmetic, random_sum
from models.demo.dialogue import Check, Example, Json, Message, is_held_out
from models.demo.facts import fact
from models.demo.long_answers import echo
from models.demo.small_talk import SYSTEM_PROMPTS, talk
from models.demo.tool_box import COMMON_WORDS, Tool, random_argument, random_tool, schema
from models.demo.wording import invented_word, pick, rough


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
    """The whole round: request, call, result, and a sentence that says the result."""
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
    """The schemas of the wanted tools among up to two others, in any order."""
    tools = {tool.name: tool for tool in (*(random_tool(rng) for _ in range(pick(rng, (0, 0, 1, 1, 2)))), *wanted)}
    shuffled = list(tools.values())
    rng.shuffle(shuffled)
    return tuple(schema(rng, tool) for tool in shuffled)


def _maybe_system(rng: Random) -> tuple[Message, ...]:
    return (Message("system", pick(rng, SYSTEM_PROMPTS)),) if rng.random() < 0.25 else ()


def _adder(rng: Random) -> tuple[Tool, str, dict[str, Json], str]:
    """A calculator is called with a sum's operands rather than answered by heart."""
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
    """What the tool returns, and how the answer says it."""
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
