"""Calls of custom tools: their text in every dialect, and the grammars that enforce it."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.text.structured.compiler import GrammarCompiler
from engine.text.structured.spec import GrammarSpec
from server.parsing.answer_format import AnswerFormat
from server.parsing.embedded_lark import TextGrammar
from server.parsing.parser import ArgumentsPart, Part, TextPart, ToolCallPart
from server.responses.rendering import EventWriter, ResponseOutput
from server.responses.tools import ToolTable
from server.schemas.chat import ChatCompletionRequest
from server.schemas.chat_tools import FunctionTool, ToolUse
from server.schemas.response_objects import CustomCallItem, FunctionCallItem, MessageItem, OutputItem
from tests.e2e.agent_requests import CODEX_TOOLS, PATCH_GRAMMAR
from tests.unit.answers.grammars import ByteVocabulary
from tests.unit.responses_support import request_of

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+say "é" <b>\n+C:\\x\n*** Delete File: b\n*** End Patch'
TITLE = {"title": "shopping"}
TABLE = ToolTable(request_of(tools=CODEX_TOOLS))
TOOLS = [FunctionTool.model_validate(tool) for tool in TABLE.chat_tools()]


def objects(key: str) -> tuple[str, str]:
    return tuple(
        json.dumps({"name": name, key: arguments}, ensure_ascii=False)
        for name, arguments in (("apply_patch", {"input": PATCH}), ("mcp__notes__read_note", TITLE))
    )  # type: ignore[return-value]


def of(dialect: str) -> str:
    """A call of the custom tool and one of a member of the namespace, as models of `dialect` write them."""
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
        case "deepseek_v32":
            tag, end = "<｜DSML｜", "</｜DSML｜"  # noqa: RUF001
            calls = "".join(
                f'{tag}invoke name="{name}">\n{tag}parameter name="{key}" string="true">{value}{end}parameter>\n'
                f"{end}invoke>\n"
                for name, key, value in (
                    ("apply_patch", "input", PATCH),
                    ("mcp__notes__read_note", "title", "shopping"),
                )
            )
            return f"{tag}function_calls>\n{calls}{end}function_calls>"
        case "gemma4":
            return "".join(
                f'<|tool_call>call:{name}{{{key}:<|"|>{value}<|"|>}}<tool_call|>'
                for name, key, value in (
                    ("apply_patch", "input", PATCH),
                    ("mcp__notes__read_note", "title", "shopping"),
                )
            )
        case "harmony":
            one = f"<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{patch}<|call|>"
            return f"{one}<|start|>assistant<|channel|>commentary to=functions.mcp__notes__read_note <|message|>{note}"
    raise AssertionError(dialect)


DIALECTS = [
    "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "glm45", "pythonic", "deepseek_v31", "gemma4",
    "deepseek_v32", "harmony",
]  # fmt: skip


def items(answer_format: AnswerFormat, pieces: list[str]) -> list[tuple[Any, ...]]:
    """The response to a text that arrives in pieces."""
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


@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_is_the_same_wherever_its_text_is_cut(dialect: str, apart: int) -> None:
    answer_format = AnswerFormat(dialect, "harmony" if dialect == "harmony" else "none")
    text = of(dialect)
    whole = items(answer_format, [text])
    assert whole == [(None, "apply_patch", PATCH), ("mcp__notes", "read_note", TITLE)]
    assert items(answer_format, list(text)) == whole
    for at in range(1, len(text), apart):
        assert items(answer_format, [text[:at], text[at:]]) == whole


FREE = {"apply_patch": PATCH_GRAMMAR}


def formats() -> list[AnswerFormat]:
    return [AnswerFormat(name, "harmony" if name == "harmony" else "none") for name in DIALECTS]


TAIL = "<|start|>assistant"


def grammar_of(
    answer_format: AnswerFormat, choice: Any, free: dict[str, str], tools: list[FunctionTool] = TOOLS
) -> str:
    for lark in free.values():
        assert answer_format.refuses_text(lark) is None
    text = answer_format.grammar(ToolUse.of(tools, choice, free_texts=free), prompt_tail=TAIL)
    assert text is not None
    return text


def custom(*names: str) -> list[FunctionTool]:
    """Custom tools with a grammar that is only shown to the model."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /./"}
    tools = [{"type": "custom", "name": name, "format": grammar} for name in names]
    return [FunctionTool.model_validate(tool) for tool in ToolTable(request_of(tools=tools)).chat_tools()]


def call_of(dialect: str, name: str, text: str) -> str:
    """A call of a custom tool as models of `dialect` write it."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    match dialect:
        case "gemma4":
            return f'<|tool_call>call:{name}{{input:<|"|>{text}<|"|>}}<tool_call|>'
        case "deepseek_v32":
            tag, end = "<｜DSML｜", "</｜DSML｜"  # noqa: RUF001
            parameter = f'{tag}parameter name="input" string="true">{text}{end}parameter>'
            call = f'{tag}invoke name="{name}">\n{parameter}\n{end}invoke>'
            return f"{tag}function_calls>\n{call}\n{end}function_calls>"
        case "qwen3_coder":
            return (
                f"<tool_call>\n<function={name}>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
            )
        case "glm45":
            return f"<tool_call>{name}\n<arg_key>input</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        case "pythonic":
            return f"[{name}(input={json.dumps(text, ensure_ascii=False)})]"
        case "llama3_json":
            return f'{{"name": "{name}", "parameters": {arguments}}}'
        case "mistral":
            return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]'
        case "mistral_args":
            return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
        case "deepseek_v31":
            begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
            return f"<｜tool▁calls▁begin｜>{begin}{name}{sep}{arguments}{end}<｜tool▁calls▁end｜>"  # noqa: RUF001
        case "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("answer_format", formats(), ids=DIALECTS)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_grammar_holds_in_every_dialect(answer_format: AnswerFormat, choice: Any) -> None:
    vocabulary, dialect = ByteVocabulary(), answer_format.tool_parser
    grammar = grammar_of(answer_format, choice, FREE)
    assert vocabulary.accepts(grammar, call_of(dialect, "apply_patch", PATCH))
    assert vocabulary.accepts(grammar, call_of(dialect, "apply_patch", PATCH + "\n"))
    for wrong in ("*** Begin", "+say", "*** Delete File: b\n", "End Patch"):
        assert not vocabulary.accepts(grammar, call_of(dialect, "apply_patch", PATCH.replace(wrong, "anything\n"))), (
            wrong
        )
    answer = "<|channel|>final<|message|>Hello." if dialect == "harmony" else "Hello."
    assert vocabulary.accepts(grammar, answer) == (choice == "auto")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler()
    yield compiler
    compiler.close()


@pytest.mark.parametrize("answer_format", formats(), ids=DIALECTS)
def test_any_answer_that_the_grammar_allows_can_end(answer_format: AnswerFormat, compiler: GrammarCompiler) -> None:
    vocabulary = ByteVocabulary()
    patch = [tool for tool in TOOLS if tool.function.name == "apply_patch"]
    named = {"type": "function", "function": {"name": "apply_patch"}}
    choice = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": ""}], "tool_choice": named}
    ).tool_choice
    grammar = grammar_of(answer_format, choice, FREE, patch)
    ended = [text for seed in range(3) if (text := vocabulary.sample(grammar, seed, longest=4000)) is not None]
    assert ended
    alone = compiler.compile(GrammarSpec("grammar", PATCH_GRAMMAR))
    for text in ended:
        parts: list[Part] = []
        parser = answer_format.parser(ToolUse.of(patch, "auto"), prompt_tail=TAIL)
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


TEXTS = [
    "", "a", "ab", 'a"b', "a\\b", "\n", "a\nb", "\t", "\r\n", "\x00", "\x1f", "\x7f", "é", "😀", "/", "1", "12.5", "A",
    "[x]", "x y", "\\n", '"', "\\", "a-b", "{}", "^", "$",
]  # fmt: skip


@pytest.mark.parametrize(
    "lark",
    [
        r"start: /(.|\n)+/",
        r"start: /[^x]*/",
        r"start: /(?s:.)/",
        r"start: /a.b/s",
        r"start: /a.b/",
        r"start: /\s/ | /\S\S/ | /\d+/ | /\W/ | /\w/ | /\D\D/",
        r'start: /[\x00-\x1f"\\]/',
        r"start: /[!-~]/ | /[^\s]b/",
        r"start: /[]^-]/ | /[a-b-]+/ | /\^/ | /\$/",
        r"start: /\x{22}|\x5c|\u00e9/",
        r"start: /A/i | /(?i:a)[B]/ | /(?s)a.b/ | /(?-s:a.b)/",
        r'start: "a"i "b"? | "\n" | "\\" | "\"" | "\x7f" | "é" | "\\n"',
        'start: "0".."9" | "a".."b"+',
        'start: [ "a" ] ( "b" | "\\"" | ) x\nx: | "y"\n',
        "start: A | a\nA: /a/\na: B\nB: /b/\n",
        "?start: word\n!word: WS | NUMBER | WORD\n%import common.WS\n%import common.NUMBER\n%import common.WORD\n",
        r"start: /a{1,2}/ | /(?:ab){1}/ | /(?P<n>é)/",
    ],
)
def test_the_escaped_form_of_a_grammar_is_that_of_its_texts(lark: str, compiler: GrammarCompiler) -> None:
    vocabulary = ByteVocabulary()
    alone = compiler.compile(GrammarSpec("grammar", lark))
    held = {name: grammar_of(AnswerFormat(name, "none"), "required", {"one": lark}, custom("one")) for name in WRITERS}
    matched = 0
    for text in TEXTS:
        expected = vocabulary.accepts(alone, text)
        matched += expected
        for name, grammar in held.items():
            assert vocabulary.accepts(grammar, call_of(name, "one", text)) == expected, (name, text)
    assert matched


WRITERS = ["hermes", "pythonic", "glm45", "qwen3_coder"]
"""Dialects that write strings in different ways."""


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: %json {}", "it uses %json"),
        ("start: @other", "it uses @other"),
        ('start: "a"\n%ignore " "', "it uses %ignore"),
        ('start: "a" <[5]>', "it uses <"),
        ('begin: "a"', "no rule `start`"),
        ("start: \x00", "it uses"),
        ("| start: /a/", "it begins with |"),
        ("start: A\n%import common.SH_COMMENT", "it imports SH_COMMENT"),
        ('start: "ab".."c"', "its range has the end ab"),
        ("start: /[[:alpha:]]/", "a class of classes"),
        ("start: /[a&&b]/", "a class of classes"),
        (r"start: /\pL/", r"it|its regular expression has \\p"),
        (r"start: /a\b/", r"its regular expression has \\b"),
        ("start: /^a/", "the anchor"),
        ("start: /a(?=b)/", "looks around"),
        ("start: /a/x", "the flags x"),
        ('start: "(" start ")" | "a"', "its rules refer to themselves"),
        ("start: a\na: b\nb: a?", "its rules refer to themselves"),
    ],
)
def test_a_grammar_that_calls_cannot_be_held_to_is_refused_in_words(grammar: str, reason: str) -> None:
    words = AnswerFormat("hermes", "none").refuses_text(grammar)
    assert words is not None
    assert re.search(reason, words)


def test_recursive_rules_hold_where_text_ends_with_a_line() -> None:
    nested = 'start: "(" start ")" | /[a-z]/'
    coder, vocabulary = AnswerFormat("qwen3_coder", "none"), ByteVocabulary()
    grammar = grammar_of(coder, "required", {"one": nested}, custom("one"))
    for text, right in (("((a))", True), ("a", True), ("(a", False), ("A", False)):
        assert vocabulary.accepts(grammar, call_of("qwen3_coder", "one", text)) == right
    assert "line break" in (coder.refuses_text('start: "(" start ")" | /[^x]/') or "")
    assert "dialect glm45" in (AnswerFormat("glm45", "none").refuses_text(nested) or "")
    assert "not known" in (AnswerFormat("none", "none").refuses_text("start: /a/") or "")


def test_a_long_chain_of_rules_is_followed() -> None:
    chain = "\n".join(f"r{number}: r{number + 1}" for number in range(5000))
    assert not TextGrammar.read(f"start: r0\n{chain}\nr5000: /a/").is_recursive


def test_two_grammars_of_equal_names_stay_apart() -> None:
    free = {"one": 'start: word+\nword: A "!"\nA: "a"', "two": 'start: word\nword: A "?"\nA: /b|c/'}
    for name in DIALECTS[:-1]:
        vocabulary = ByteVocabulary()
        grammar = grammar_of(AnswerFormat(name, "none"), "required", free, custom("one", "two"))
        for tool, text, right in (
            ("one", "a!a!", True), ("two", "c?", True), ("one", "c?", False), ("two", "a!", False),
        ):  # fmt: skip
            assert vocabulary.accepts(grammar, call_of(name, tool, text)) == right


@pytest.mark.parametrize(
    ("lark", "text", "right"),
    [
        ("start: /./", r"\u00e9", True),
        ("start: /[^x]/", r"\u20AC", True),
        (r"start: /\S/", r"\ud83d\ude00", True),
        ("start: /./", r"\ud83d", False),
        ("start: /./", r"\u0041", False),
        ('start: "é"', r"\u00E9", True),
        ('start: "é"', r"\u00ea", False),
        ("start: /😀/", r"\uD83D\uDE00", True),
        ("start: /[^é]/", r"\u00ea", False),
        ("start: /[a-z]/", r"\u00e9", False),
    ],
)
def test_characters_beyond_ascii_may_be_escaped(lark: str, text: str, right: bool) -> None:
    grammar = grammar_of(AnswerFormat("hermes", "none"), "required", {"one": lark}, custom("one"))
    call = call_of("hermes", "one", "@").replace("@", text)
    assert ByteVocabulary().accepts(grammar, call) == right
