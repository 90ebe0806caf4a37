"""Dialects that another package registers are detected, parsed and enforced like Kaon's own."""

import json
from collections.abc import Iterator, Sequence

import pytest

from server.parsing import registry
from server.parsing.answer_format import AnswerFormat
from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import ModelSigns, ReasoningDialect, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_object
from server.schemas.chat_tools import ToolUse
from tests.unit.answers.dialect_texts import PARIS, TOOLS, USE, parsed

BEGIN, END = "<<", ">>"


class AngleParser(CallObjectParser):
    """Calls as `<<{"name": "f", "arguments": {…}}>>`."""

    def _read(self) -> Waiting[None]:
        while (yield from self._content_until(Markers(BEGIN))):
            if (yield from self._read_call(END)):
                yield from self._feed.take_marker(END)


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    return f"{call_object(lark, functions, 'arguments')} {lark.spelled(END)}"


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for dialects in (registry.TOOL_DIALECTS, registry.REASONING_DIALECTS):
        # All are imported first, so that none registers only in the copy.
        known = {name: dialects[name] for name in dialects}
        monkeypatch.setattr(dialects, "_registered", known)
    registry.TOOL_DIALECTS.register("angle")(
        ToolDialect(
            AngleParser,
            calls,
            detect=lambda signs: BEGIN in signs.template,
            trigger=BEGIN,
            markers=(BEGIN, END),
            aliases=("angular",),
        )
    )
    registry.REASONING_DIALECTS.register("muse")(
        ReasoningDialect("<muse>", "</muse>", detect=lambda signs: "<muse>" in signs.template)
    )
    return


def test_they_are_detected_by_their_signs() -> None:
    signs = ModelSigns("{{ tools }} << >> <muse>", has_token=lambda _: False, architecture="LlamaForCausalLM")
    assert registry.detect_tool_dialect(signs) == "angle"
    assert registry.detect_reasoning_dialect(signs) == "muse"


def test_an_answer_is_taken_apart() -> None:
    parser = AnswerFormat("angular", "muse").parser(USE, prompt_tail="")
    assert parser is not None
    text = '<muse>well</muse>Here: <<{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}>>'
    answer = parsed(parser, text)
    assert answer.reasoning == "well"
    assert answer.content == "Here: "
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("get_weather", PARIS)]


def test_a_forced_call_has_a_grammar() -> None:
    grammar = AnswerFormat("angle", "none").grammar(ToolUse.of(TOOLS, "required"), prompt_tail="")
    assert grammar is not None
    assert "get_weather" in grammar
