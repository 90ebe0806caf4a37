"""Calls of custom tools: their text in every dialect, and the grammar that holds it where a dialect allows that."""

import json
import random
from typing import Any

import pytest

from engine.text.structured.compiler import GrammarCompiler
from engine.text.structured.spec import GrammarSpec
from server.parsing.answer_format import AnswerFormat
from server.parsing.embedded_lark import embeddable
from server.parsing.parser import ArgumentsPart, Part, TextPart, ToolCallPart
from server.responses.rendering import EventWriter, ResponseOutput
from server.responses.tools import ToolTable
from server.schemas.chat import Tool, ToolUse
from server.schemas.responses import CustomCallItem, FunctionCallItem, MessageItem, OutputItem
from tests.e2e.agent_requests import CODEX_TOOLS, PATCH_GRAMMAR
from tests.unit.answers.grammars import ByteVocabulary
from tests.unit.responses_support import request_of

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+say "é" <b>\n+C:\\x\n*** Delete File: b\n*** End Patch'
TITLE = {"title": "shopping"}
TABLE = ToolTable(request_of(tools=CODEX_TOOLS))
TOOLS = [Tool.model_validate(tool) for tool in TABLE.chat_tools()]


def objects(key: str) -> tuple[str, str]:
    return tuple(
        json.dumps({"name": name, key: arguments}, ensure_ascii=False)
        for name, arguments in (("apply_patch", {"input": PATCH}), ("mcp__notes__read_note", TITLE))
    )  # type: ignore[return-value]


def of(dialect: str) -> str:
    """A call of the custom tool and one of the namespace's member, as models of `dialect` write them."""
    patch, note = json.dumps({"input": PATCH}, ensure_ascii=False), json.dumps(TITLE)
    match dialect:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects("arguments"))
        case "llama3_json":
            return "; ".join(objects("parameters"))
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects('arguments'))}]"
        case "mistral_args":
            return f"[TOOL_CALLS]apply_patch[ARGS]{patch}[TOOL_CALLS]mcp__notes__read_note[ARGS]{note}"
        case "qwen3_coder":
            return (
                f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{PATCH}\n</parameter>\n</function>\n"
                "</tool_call>\n<tool_call>\n<function=mcp__notes__read_note>\n<parameter=title>\nshopping\n</parameter>\n"
                "</function>\n</tool_call>"
            )
        case "glm45":
            return (
                f"<tool_call>apply_patch\n<arg_key>input</arg_key>\n<arg_value>{PATCH}</arg_value>\n</tool_call>\n"
                "<tool_call>mcp__notes__read_note\n<arg_key>title</arg_key>\n<arg_value>shopping</arg_value>\n</tool_call>"
            )
        case "pythonic":
            text = json.dumps(PATCH, ensure_ascii=False)
            return f'[apply_patch(input={text}), mcp__notes__read_note(title="shopping")]'
        case "deepseek_v31":
            begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
            calls = f"{begin}apply_patch{sep}{patch}{end}{begin}mcp__notes__read_note{sep}{note}{end}"
            return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"  # noqa: RUF001
        case "harmony":
            one = f"<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{patch}<|call|>"
            return f"{one}<|start|>assistant<|channel|>commentary to=functions.mcp__notes__read_note <|message|>{note}"
    raise AssertionError(dialect)


DIALECTS = [
    "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "glm45", "pythonic", "deepseek_v31", "harmony",
]  # fmt: skip


def items(answer_format: AnswerFormat, pieces: list[str]) -> list[tuple[Any, ...]]:
    """What a response says of a text that comes in pieces."""
    use = ToolUse.of(TOOLS, "auto")
    output = ResponseOutput(EventWriter(), answer_format.parser(use, prompt_tail="<|start|>assistant"), TABLE, None)
    for piece in pieces:
        output.push(piece, 1)
    output.finish("completed")
    return [_meaning(item) for item in output.items()]


def _meaning(item: OutputItem) -> tuple[Any, ...]:
    match item:
        case CustomCallItem():
            return None, item.name, item.input
        case FunctionCallItem():
            return item.namespace, item.name, json.loads(item.arguments)
        case MessageItem():
            return item.role, item.text
    raise AssertionError(item)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_is_the_same_wherever_its_text_is_cut(dialect: str) -> None:
    answer_format = AnswerFormat(dialect, "harmony" if dialect == "harmony" else "none")
    text = of(dialect)
    whole = items(answer_format, [text])
    assert whole == [(None, "apply_patch", PATCH), ("mcp__notes", "read_note", TITLE)]
    assert items(answer_format, list(text)) == whole
    for at in range(1, len(text)):
        assert items(answer_format, [text[:at], text[at:]]) == whole


FREE = {"apply_patch": PATCH_GRAMMAR}


@pytest.fixture(scope="module")
def coder() -> tuple[AnswerFormat, ByteVocabulary]:
    return AnswerFormat("qwen3_coder", "none"), ByteVocabulary()


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_grammar_holds_in_text_up_to_a_marker(coder: tuple[AnswerFormat, ByteVocabulary], choice: Any) -> None:
    answer_format, vocabulary = coder
    assert answer_format.follows(PATCH_GRAMMAR)
    grammar = answer_format.grammar(ToolUse.of(TOOLS, choice, free_texts=FREE), prompt_tail="")
    assert grammar is not None
    text = of("qwen3_coder")
    assert vocabulary.accepts(grammar, text)
    assert vocabulary.accepts(grammar, text.replace("End Patch\n", "End Patch\n\n"))
    for wrong in ("*** Begin", "+say", "*** Delete File: b\n", "End Patch"):
        assert not vocabulary.accepts(grammar, text.replace(wrong, "anything\n")), wrong
    assert vocabulary.accepts(grammar, "Hello.") == (choice == "auto")


def test_any_answer_that_the_grammar_allows_can_end(coder: tuple[AnswerFormat, ByteVocabulary]) -> None:
    answer_format, vocabulary = coder
    patch = [tool for tool in TOOLS if tool.function.name == "apply_patch"]
    grammar = answer_format.grammar(ToolUse.of(patch, "required", False, FREE), prompt_tail="")
    assert grammar is not None
    ended = [text for seed in range(20) if (text := vocabulary.sample(grammar, seed, longest=4000)) is not None]
    assert len(ended) > 10
    compiler = GrammarCompiler()
    alone = compiler.compile(GrammarSpec("grammar", PATCH_GRAMMAR))
    compiler.close()
    for text in ended:
        parts: list[Part] = []
        parser = answer_format.parser(ToolUse.of(patch, "auto"), prompt_tail="")
        assert parser is not None
        rng, at = random.Random(len(text)), 0
        while at < len(text):
            step = rng.randint(1, 9)
            parts += parser.push(text[at : at + step])
            at += step
        parts += parser.finish()
        assert not any(isinstance(part, TextPart) for part in parts)
        assert [part.name for part in parts if isinstance(part, ToolCallPart)] == ["apply_patch"]
        arguments = json.loads("".join(part.json for part in parts if isinstance(part, ArgumentsPart)))
        assert vocabulary.accepts(alone, arguments["input"])


@pytest.mark.parametrize(
    "grammar",
    [
        r"start: /(.|\n)+/",
        r"start: /[^x]*/",
        r"start: /a\sb/",
        r"start: /(?s:.)/",
        r"start: /a./s",
        "start: a\na: WS\n%import common.WS",
        "start: %json {}",
        "start: @other",
        'start: "a"\n%ignore " "',
        'start: "a" <[5]>',
        'begin: "a"',
        "start: \x00",
    ],
)
def test_what_could_not_end_or_stand_among_rules_is_not_taken(grammar: str) -> None:
    assert embeddable(grammar) is None


def test_two_grammars_of_equal_names_stay_apart(coder: tuple[AnswerFormat, ByteVocabulary]) -> None:
    answer_format, vocabulary = coder
    tools = [
        {"type": "custom", "name": name, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /./"}}
        for name in ("one", "two")
    ]
    chat = [Tool.model_validate(tool) for tool in ToolTable(request_of(tools=tools)).chat_tools()]
    free = {"one": 'start: word+\nword: A "!"\nA: "a"', "two": 'start: word\nword: A "?"\nA: /b|c/'}
    grammar = answer_format.grammar(ToolUse.of(chat, "required", True, free), prompt_tail="")
    assert grammar is not None

    def call(name: str, text: str) -> str:
        return f"<tool_call>\n<function={name}>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"

    for name, text, right in (("one", "a!a!", True), ("two", "c?", True), ("one", "c?", False), ("two", "a!", False)):
        assert vocabulary.accepts(grammar, call(name, text)) == right
