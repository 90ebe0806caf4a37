"""The grammars that force calls: what they accept and refuse; the parsers read all texts that they accept."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.config.paths import resolve_checkpoint
from engine.text.io_processor import InvalidRequest
from engine.text.structured.compiler import GrammarChecks, GrammarCompiler
from engine.text.structured.parser_setup import token_trie
from engine.text.structured.spec import GrammarSpec, InvalidGrammar
from engine.text.tokenizer import Tokenizer
from server.parsing.answer_format import AnswerFormat, tool_grammar
from server.parsing.grammar import LarkWriter
from server.schemas.chat_tools import FunctionTool, NamedFunction, ToolUse
from tests.unit.answers.dialect_texts import (
    CLOCK,
    TOOLS,
    WEATHER,
    WHOLE,
    Written,
    parsed,
    short_form,
    texts_in_short_form,
    tool,
)
from tests.unit.answers.grammars import ByteVocabulary

DIALECTS = sorted({written.dialect for written in WHOLE})
NAMED_NOW = NamedFunction.model_validate({"type": "function", "function": {"name": "now"}})


def made(dialect: str, special: bool = False, reasoning: str = "none") -> tuple[AnswerFormat, ByteVocabulary]:
    """The format, over a vocabulary in which all of its markers are special tokens, or none."""
    reasoning = "harmony" if dialect == "harmony" else reasoning
    markers = AnswerFormat(dialect, reasoning).markers if special else ()
    vocabulary = ByteVocabulary(markers)
    return AnswerFormat(dialect, reasoning, vocabulary.special), vocabulary


def grammar(answer_format: AnswerFormat, use: ToolUse, tail: str = "") -> str:
    text = answer_format.grammar(use, prompt_tail=tail)
    assert text is not None
    return text


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("written", texts_in_short_form(WHOLE))
def test_required_accepts_what_models_write(written: Written, special: bool) -> None:
    answer_format, vocabulary = made(written.dialect, special)
    assert vocabulary.accepts(grammar(answer_format, ToolUse.of(TOOLS, "required")), written.text)


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("dialect", "gap"),
    [("glm45", "\n"), ("glm47", "\n"), ("deepseek_v32", "\n\n"), ("deepseek_v4", "\n\n"), ("qwen3_coder", "\n\n")],
)
def test_required_accepts_the_line_breaks_that_templates_write_before_the_first_call(
    dialect: str, gap: str, special: bool
) -> None:
    """After reasoning, after reasoning that the prompt has ended, and without any."""
    written = next(each for each in WHOLE if each.dialect == dialect)
    text = gap + written.text
    use = ToolUse.of(TOOLS, "required")
    for reasoning, tail, before in (
        ("none", "", ""),
        ("think", "<think></think>", ""),
        ("think", "<think>", "So.</think>"),
    ):
        answer_format, vocabulary = made(dialect, special, reasoning)
        forced = grammar(answer_format, use, tail)
        assert vocabulary.accepts(forced, before + text)
        assert not vocabulary.accepts(forced, f"{before}{gap}It is warm.")
        parser = answer_format.parser(use, prompt_tail=tail)
        assert parser is not None
        found = parsed(parser, before + text)
        assert (found.content, found.calls) == ("", written.answer.calls)


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("written", texts_in_short_form(WHOLE))
def test_required_refuses_other_arguments_other_functions_and_plain_text(written: Written, special: bool) -> None:
    answer_format, vocabulary = made(written.dialect, special)
    forced = grammar(answer_format, ToolUse.of(TOOLS, "required"))
    assert not vocabulary.accepts(forced, "It is warm.")
    assert not vocabulary.accepts(forced, written.text.replace("3", "true"))
    assert not vocabulary.accepts(forced, written.text.replace("get_weather", "get_whether"))
    assert not vocabulary.accepts(forced, written.text.replace("days", "week"))


@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_a_second_call_is_refused_with_parallel_tool_calls_off(dialect: str) -> None:
    answer_format, vocabulary = made(dialect)
    forced = grammar(answer_format, ToolUse.of(TOOLS, "required", parallel_tool_calls=False))
    for written in WHOLE:
        if written.dialect == dialect:
            assert vocabulary.accepts(forced, written.text) == (len(written.answer.calls) == 1)


@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_a_named_function_is_the_only_one_that_can_be_called(dialect: str) -> None:
    answer_format, vocabulary = made(dialect)
    forced = grammar(answer_format, ToolUse.of(TOOLS, NAMED_NOW))
    written = next(each for each in WHOLE if each.dialect == dialect)
    assert not vocabulary.accepts(forced, written.text)
    text = vocabulary.sample(forced, seed=1)
    assert text is not None
    assert [name for name, _ in parsed(parser(answer_format), text).calls] == ["now"]


def parser(answer_format: AnswerFormat, tail: str = "") -> Any:
    return answer_format.parser(ToolUse.of(TOOLS, "auto"), prompt_tail=tail)


STRICT = [tool("get_weather", WEATHER, strict=True), tool("now", CLOCK)]


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_a_strict_tool_leaves_the_model_free_to_talk_and_holds_its_calls(dialect: str, special: bool) -> None:
    answer_format, vocabulary = made(dialect, special)
    free = grammar(answer_format, ToolUse.of(STRICT, "auto"))
    assert vocabulary.accepts(
        free, "It is warm." if dialect != "harmony" else "<|channel|>final<|message|>It is warm."
    )
    for written in WHOLE:
        if written.dialect == dialect:
            assert vocabulary.accepts(free, written.text)
            assert not vocabulary.accepts(free, written.text.replace("3", "true"))


@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_without_strict_tools_a_free_choice_is_not_constrained(dialect: str) -> None:
    assert made(dialect)[0].grammar(ToolUse.of(TOOLS, "auto"), prompt_tail="") is None
    assert made(dialect)[0].grammar(ToolUse.of(STRICT, "none"), prompt_tail="") is None


RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 8},
        "code": {"type": "string", "pattern": "^[a-z]{2,4}$"},
        "kind": {"enum": ["a", "b/c"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "maybe": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["code", "count"],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -5, "maximum": 5}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 18), marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_whatever_the_grammar_allows_parses_into_calls_that_fit_their_schema(
    dialect: str, special: bool, seeds: range
) -> None:
    tools = [tool("f", RICH), tool("g-2")]
    answer_format, vocabulary = made(dialect, special)
    forced = grammar(answer_format, ToolUse.of(tools, "required"))
    ended = 0
    for seed in seeds:
        text = vocabulary.sample(forced, seed)
        if text is None:
            continue
        ended += 1
        made_parser = answer_format.parser(ToolUse.of(tools, "auto"), prompt_tail="")
        assert made_parser is not None
        answer = parsed(made_parser, *text)
        assert answer.calls, text
        assert answer.content == "", text
        for name, arguments in answer.calls:
            check(tools, name, arguments, text)
    assert ended >= len(seeds) // 3


def check(tools: list[FunctionTool], name: str, arguments: str, text: str) -> None:
    given = json.loads(arguments)
    [called] = [each for each in tools if each.function.name == name]
    if called.function.parameters is None:
        assert given == {}, text
        return
    assert {"code", "count"} <= given.keys() <= RICH["properties"].keys(), text
    schema = json.dumps({**RICH, "additionalProperties": False})
    vocabulary = ByteVocabulary()
    # In the schema's order, in which llguidance reads objects.
    ordered = {key: given[key] for key in RICH["properties"] if key in given}
    assert vocabulary.accepts(f"%llguidance {{}}\nstart: %json {schema}\n", json.dumps(ordered)), text


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.text.structured.compiler._WALL_SECONDS", 300.0)
        yield compiler
    compiler.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "no such type"}}},
        {"properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"properties": {"a": {"type": "string", "pattern": "("}}},
    ],
)
def test_a_schema_that_cannot_be_followed_is_named_by_its_place(
    schema: dict[str, Any], compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.parsing.answer_format._BLAME_SECONDS", 60.0)
    use = ToolUse.of([tool("now", CLOCK), tool("bad", {"type": "object", **schema})], "required")
    with pytest.raises(ValueError, match=r"^tools\[1\]\.function\.parameters cannot be followed: it"):
        asyncio.run(
            tool_grammar(AnswerFormat("hermes", "none"), use, None, prompt_tail="", grammars=GrammarChecks(compiler))
        )


@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_grammars_pass_the_check_that_requests_grammars_pass(dialect: str, compiler: GrammarCompiler) -> None:
    answer_format = AnswerFormat(dialect, "harmony" if dialect == "harmony" else "think")
    for use in (ToolUse.of([tool("f", RICH), *TOOLS], "required"), ToolUse.of(STRICT, "auto")):
        text = asyncio.run(tool_grammar(answer_format, use, None, prompt_tail="", grammars=GrammarChecks(compiler)))
        assert text is not None
        assert text.startswith(grammar(answer_format, use))
    assert asyncio.run(
        GrammarChecks(compiler).check(answer_format.around_content('start: "yes"', ToolUse(()), prompt_tail=""))
    )


@pytest.mark.parametrize("dialect", ["gemma4", "lfm2", "qwen3_coder"])
def test_a_grammar_that_a_dialect_makes_much_longer_than_its_schemas_is_not_written(
    dialect: str, compiler: GrammarCompiler
) -> None:
    definitions = {f"d{number}": {"type": "integer"} for number in range(2000)}
    arguments = {f"a{number}": {"type": "integer"} for number in range(400)}
    use = ToolUse.of([tool("f", {"type": "object", "$defs": definitions, "properties": arguments})], "required")
    answer_format = AnswerFormat(dialect, "none")
    written: list[str] = []

    async def write(work: Callable[[], str]) -> str:
        written.append(work())
        return written[-1]

    with pytest.raises(ValueError, match=r"^the schemas of tools cannot be followed together: .*max_grammar_bytes"):
        asyncio.run(tool_grammar(answer_format, use, None, prompt_tail="", grammars=GrammarChecks(compiler, write)))
    assert len(written) == 1  # the schemas, and not the dialect's grammar around them


@pytest.mark.parametrize("dialect", ["hermes", "lfm2", "qwen3_coder"])
def test_descriptions_of_tools_do_not_count_as_their_grammar(dialect: str, compiler: GrammarCompiler) -> None:
    """200 tools of six described arguments had 270 KB in the dialect of LFM2, and were refused."""
    described = {"type": "string", "title": "T", "description": "d" * compiler.max_bytes}
    properties = {"description": described, "title": {"const": {"title": "Mr"}}}
    schema = {"type": "object", "properties": properties, "required": ["description", "title"]}
    use = ToolUse.of([tool("f", schema)], "required")
    text = asyncio.run(
        tool_grammar(AnswerFormat(dialect, "none"), use, None, prompt_tail="", grammars=GrammarChecks(compiler))
    )
    assert text is not None
    assert "ddd" not in text
    assert "description" in text
    assert '{"const":{"title":"Mr"}' in text


@pytest.mark.parametrize("keyword", ["items", "anyOf"])
def test_a_schema_that_is_nested_very_deeply_is_refused(keyword: str, compiler: GrammarCompiler) -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {keyword: [schema] if keyword == "anyOf" else schema}
    use = ToolUse.of([tool("f", {"type": "object", "properties": {"a": schema}})], "required")
    with pytest.raises(ValueError, match=r"^tools\[0\]\.function\.parameters cannot be followed: .*64 levels"):
        asyncio.run(
            tool_grammar(AnswerFormat("hermes", "none"), use, None, prompt_tail="", grammars=GrammarChecks(compiler))
        )


def test_content_whose_grammar_is_too_long_with_reasoning_is_not_blamed_on_tools(compiler: GrammarCompiler) -> None:
    content = f'start: "{"a" * (compiler.max_bytes - 20)}"'
    whole = tool_grammar(
        AnswerFormat("hermes", "think"), ToolUse(()), content, prompt_tail="", grammars=GrammarChecks(compiler)
    )
    with pytest.raises(InvalidRequest, match=r"^the form of the answer cannot be followed: .*max_grammar") as refused:
        asyncio.run(whole)
    assert refused.value.param == "response_format"


def test_a_text_that_is_too_long_is_refused_before_it_is_parsed(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("json", "[" * (compiler.max_bytes + 1))
    with pytest.raises(InvalidGrammar, match=r"^it has 262145 bytes; it may have at most 262144"):
        asyncio.run(GrammarChecks(compiler).compile(spec))


def test_what_is_free_needs_no_check(compiler: GrammarCompiler) -> None:
    use = ToolUse.of(TOOLS, "auto")
    nothing = tool_grammar(AnswerFormat("hermes", "none"), use, None, prompt_tail="", grammars=GrammarChecks(compiler))
    assert asyncio.run(nothing) is None


def test_forcing_a_call_of_a_model_without_a_known_dialect_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="--tool-call-parser"):
        AnswerFormat("none", "none").grammar(ToolUse.of(TOOLS, "required"), prompt_tail="")


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("tail", "before", "accepted"),
    [
        ("", "", True),
        ("", "<think>\nHm.\n</think>\n\n", True),
        ("", "Hm.\n</think>\n\n", False),
        ("<think>\n", "Hm.\n</think>\n\n", True),
        ("<think>\n", "", False),
        ("<think>\n\n</think>\n\n", "", True),
        ("<think>\n\n</think>\n\n", "<think>\nHm.</think>", False),
    ],
)
def test_reasoning_may_come_first_unless_the_prompt_has_settled_it(
    tail: str, before: str, accepted: bool, special: bool
) -> None:
    answer_format, vocabulary = made("hermes", special, "think")
    forced = grammar(answer_format, ToolUse.of(TOOLS, "required"), tail)
    assert vocabulary.accepts(forced, before + WHOLE[0].text) == accepted
    behind = answer_format.around_content('start: "yes" | "no"', ToolUse(()), prompt_tail=tail)
    assert vocabulary.accepts(behind, before + "yes") == accepted
    assert not vocabulary.accepts(behind, before + "maybe")


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("written", texts_in_short_form(WHOLE))
def test_calls_may_stand_in_the_place_of_content_that_has_a_form(written: Written, special: bool) -> None:
    answer_format, vocabulary = made(written.dialect, special, "think")
    either = answer_format.around_content('start: "yes" | "no"', ToolUse.of(TOOLS, "auto"), prompt_tail="")
    harmony = written.dialect == "harmony"
    final = "<|channel|>final<|message|>" if harmony else ""
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if harmony else "<think>Hm.</think>"
    for begin in ("", *([] if harmony and "analysis" in written.text else [thought])):
        assert vocabulary.accepts(either, f"{begin}{final}yes")
        assert vocabulary.accepts(either, begin + written.text)
        assert not vocabulary.accepts(either, f"{begin}{final}maybe")


def test_harmony_content_follows_analysis_in_the_final_channel() -> None:
    answer_format, vocabulary = made("harmony", special=True)
    behind = answer_format.around_content('start: "yes" | "no"', ToolUse(()), prompt_tail="<|start|>assistant")
    final = "<|channel|>final<|message|>yes"
    assert vocabulary.accepts(behind, final)
    assert vocabulary.accepts(behind, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}")
    assert not vocabulary.accepts(behind, "yes")


def test_a_grammar_of_several_parts_keeps_them_behind_reasoning() -> None:
    answer_format, vocabulary = made("hermes", reasoning="think")
    parts = {"grammars": [{"lark_grammar": 'start: "is " @word'}, {"name": "word", "lark_grammar": 'start: "so"'}]}
    behind = answer_format.around_content(json.dumps(parts), ToolUse(()), prompt_tail="")
    assert vocabulary.accepts(behind, "is so")
    assert vocabulary.accepts(behind, "<think>Hm.</think>is so")
    assert not vocabulary.accepts(behind, "so")


@pytest.mark.parametrize("dialect", ["pythonic", "qwen3_coder", "glm45", "gemma4", "minimax_m2", "minimax_m3"])
def test_an_argument_that_the_dialect_cannot_name_is_refused(dialect: str) -> None:
    use = ToolUse.of([tool("f", {"type": "object", "properties": {"a <b>": {}}})], "required")
    with pytest.raises(ValueError, match=r"^tools\[0\]\.function\.parameters has the property 'a <b>'"):
        made(dialect)[0].grammar(use, prompt_tail="")


def test_names_of_any_characters_can_be_forced_where_arguments_are_json() -> None:
    answer_format, vocabulary = made("hermes")
    key = 'a"\\\n\x01 é😀'
    use = ToolUse.of(
        [tool("f", {"type": "object", "properties": {key: {"const": key}}, "required": [key]})], "required"
    )
    call = {"name": "f", "arguments": {key: key}}
    text = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    assert vocabulary.accepts(grammar(answer_format, use), text)


def test_the_embedded_models_own_tokens_of_a_call_are_accepted() -> None:
    tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint(None))
    matcher = LLMatcher(
        token_trie(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0]),
        grammar(AnswerFormat("hermes", "none"), ToolUse.of(TOOLS, "required")),
    )
    token_ids = [*tokenizer.encode(WHOLE[0].text), tokenizer.eos_token_id]
    assert tokenizer.token_id("<tool_call>") in token_ids
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)


@pytest.mark.parametrize("text", ["\x7f", "\x00\x1f", "\u2028", '"/#%{}<[1]>\\n'])
def test_any_text_can_be_spelled_in_a_grammar(text: str) -> None:
    lark = LarkWriter({})
    assert ByteVocabulary().accepts(lark.grammar(lark.spelled(text)), text)


@pytest.mark.parametrize("dialect", short_form(dialect for dialect in DIALECTS if dialect != "harmony"))
@pytest.mark.parametrize(
    ("tail", "begin"), [("", "<think>\n"), ("<think>\n", "")], ids=["by the model", "by the prompt"]
)
def test_what_is_said_in_reasoning_is_not_held_to_strict_schemas(dialect: str, tail: str, begin: str) -> None:
    answer_format, vocabulary = made(dialect, reasoning="think")
    free = grammar(answer_format, ToolUse.of(STRICT, "auto"), tail)
    call = next(each.text for each in WHOLE if each.dialect == dialect)
    wrong = call.replace("3", "true")
    thought = f"{begin}Not {wrong} but {call}.\n</think>\n\n"
    assert vocabulary.accepts(free, f"{thought}It is warm.")
    assert vocabulary.accepts(free, f"{thought}{call}")
    assert not vocabulary.accepts(free, f"{thought}{wrong}")


@pytest.mark.parametrize("dialect", ["qwen3_coder", "minimax_m3", "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#/$defs/it"}] * 100 + [{"type": "number"}]},
        {"type": "object", "properties": {f"k{number}": {"$ref": "#/$defs/it"} for number in range(100)}},
    ],
    ids=["union", "object"],
)
def test_a_schema_that_refers_to_itself_many_times_has_a_short_grammar(dialect: str, schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/it"}}, "$defs": {"it": schema}}
    use = ToolUse.of([tool("f", parameters)], "required")
    written = AnswerFormat(dialect, "none").grammar(use, prompt_tail="")
    assert written is not None
    assert len(written) < 100_000
