"""`AnswerFormat`: the syntax of the loaded model's reasoning and tool calls. `tool_grammar`: enforces calls.

The format is created at the start, from the names of dialects or by detection. For each request it returns a parser of
the answer, and the grammar that makes the answer's calls match the schemas of the request's tools.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from engine.sampling_params import ReasoningBudget
from engine.text.chat_template import ChatTemplate
from engine.text.io_processor import InvalidRequest
from engine.text.structured.compiler import GrammarChecks
from engine.text.structured.spec import GrammarSpec, InvalidGrammar, lark_of
from engine.text.tokenizer import Tokenizer
from server.parsing.dialects import harmony
from server.parsing.embedded_lark import NotEmbeddable, TextGrammar
from server.parsing.grammar import (
    ANY_TEXT,
    Function,
    LarkWriter,
    allowed_functions,
    enforced_functions,
    literal_pattern,
    undescribed,
)
from server.parsing.parser import AnswerParser, ChainedParsers, FirstCall
from server.parsing.reasoning import TaggedReasoning, is_closed, is_open
from server.parsing.registry import (
    HARMONY,
    NONE,
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    ModelSigns,
    ReasoningDialect,
    ToolDialect,
    detect_reasoning_dialect,
    detect_tool_dialect,
    reasoning_names,
    tool_names,
)
from server.schemas.chat_tools import ToolUse

_AUTO = "auto"


class AnswerFormat:
    """The dialects of one model."""

    def __init__(
        self,
        tool_parser: str,
        reasoning_parser: str,
        special: Mapping[str, int] | None = None,
        token_id: Callable[[str], int | None] | None = None,
    ) -> None:
        """The parsers are names of dialects, or `none`. `special` has the ids of markers that are special tokens;
        `token_id` returns the id of any token. Raises `ValueError` with a sentence for an unknown name.
        """
        self.tool_parser = _known(tool_parser, tool_names(), "tool_call_parser")
        self.reasoning_parser = _known(reasoning_parser, reasoning_names(), "reasoning_parser")
        pair = {self.tool_parser, self.reasoning_parser}
        self._harmony = HARMONY in pair
        if self._harmony and not pair <= {HARMONY, NONE}:
            raise ValueError(
                f"tool_call_parser is {self.tool_parser} and reasoning_parser is {self.reasoning_parser}; harmony "
                "goes with harmony or none only"
            )
        self._tools: ToolDialect | None = None
        if self.tool_parser not in (NONE, HARMONY):
            self._tools = TOOL_DIALECTS[self.tool_parser]
        self._reasoning: ReasoningDialect | None = None
        if self.reasoning_parser not in (NONE, HARMONY):
            self._reasoning = REASONING_DIALECTS[self.reasoning_parser]
        self._opening, self._closing = (None, []) if token_id is None else self._reasoning_tokens(token_id)
        self._special = {marker: special[marker] for marker in self.markers if marker in special} if special else {}
        stops = () if token_id is None or self._tools is None else map(token_id, self._tools.stops)
        self._stop_token_ids = [stop for stop in stops if stop is not None]
        calls = () if self._harmony or self._tools is None else self._tools.markers
        self._call_token_ids = frozenset(self._special[marker] for marker in calls if marker in self._special)

    @staticmethod
    def check_names(tool_parser: str, reasoning_parser: str) -> None:
        """Raise `ValueError` with a sentence unless both are `auto`, `none` or names of dialects."""
        AnswerFormat(tool_parser if tool_parser != _AUTO else NONE, NONE)
        AnswerFormat(NONE, reasoning_parser if reasoning_parser != _AUTO else NONE)
        if _AUTO not in (tool_parser, reasoning_parser):
            AnswerFormat(tool_parser, reasoning_parser)

    @classmethod
    def of_model(
        cls,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        architecture: str,
        tool_parser: str = _AUTO,
        reasoning_parser: str = _AUTO,
    ) -> "AnswerFormat":
        """Create the format by name or, for `auto`, from the chat template, vocabulary and architecture.

        Raises `ValueError` with a sentence for an unknown name.
        """
        signs = ModelSigns(
            template=chat_template.source if chat_template is not None else "",
            has_token=lambda text: tokenizer.token_id(text) is not None,
            architecture=architecture,
        )
        chosen = {
            "tool": detect_tool_dialect(signs) if tool_parser == _AUTO else tool_parser,
            "reasoning": detect_reasoning_dialect(signs) if reasoning_parser == _AUTO else reasoning_parser,
        }
        if NONE not in chosen.values() and list(chosen.values()).count(HARMONY) == 1:
            # One parser was named, and the detected other one is incompatible with it.
            if tool_parser == _AUTO:
                chosen["tool"] = NONE
            elif reasoning_parser == _AUTO:
                chosen["reasoning"] = NONE
        plain = cls(chosen["tool"], chosen["reasoning"])
        special: dict[str, int] = {}
        for marker in plain.markers:
            token_id = tokenizer.token_id(marker)
            if token_id is not None and token_id in tokenizer.special_ids:
                special[marker] = token_id
        return cls(plain.tool_parser, plain.reasoning_parser, special, tokenizer.token_id)

    def _reasoning_tokens(self, token_id: Callable[[str], int | None]) -> tuple[int | None, list[list[int]]]:
        """Return the token that opens the reasoning and the token sequences that close it, for `ReasoningBudget`.

        None or an empty list where a marker is not a single token.
        """
        steps: Sequence[Sequence[str]]
        if self._harmony:
            opening, steps = harmony.ANALYSIS, harmony.AFTER_ANALYSIS
        elif self._reasoning is not None:
            opening, steps = self._reasoning.opening or self._reasoning.open_tag, ((self._reasoning.close_tag,),)
        else:
            return None, []
        closing = [[id for text in texts if (id := token_id(text)) is not None] for texts in steps]
        return token_id(opening), closing if all(closing) else []

    def reasoning_budget(self, max_tokens: int, *, prompt_tail: str) -> ReasoningBudget | None:
        """Create the budget that ends an answer's reasoning after `max_tokens`; None if no parser separates reasoning.

        Raises `LookupError` with a sentence if the markers of reasoning are not single tokens.
        """
        opening = self._opening
        is_opened = False
        if self._harmony:
            if self.reasoning_parser != HARMONY or harmony.MESSAGE in harmony.open_header(prompt_tail):
                return None
            max_tokens += 1  # A marker follows the channel's name.
        else:
            if self._reasoning is None or is_closed(self._reasoning, prompt_tail):
                return None
            if is_opened := is_open(self._reasoning, prompt_tail):
                opening = None
        if not self._closing or (opening is None and not is_opened):
            raise LookupError("the markers of this model's reasoning are not single tokens")
        return ReasoningBudget(max_tokens, self._closing, opening)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parsers search for."""
        if self._harmony:
            return harmony.MARKERS
        tags: tuple[str, ...] = ()
        if (reasoning := self._reasoning) is not None:
            tags = (reasoning.opening or reasoning.open_tag, reasoning.close_tag, *chain(*reasoning.content_tags))
        return (*tags, *(self._tools.markers if self._tools is not None else ()))

    def visible_token_ids(self, use: ToolUse) -> frozenset[int]:
        """Return the special tokens that must stay in the text, because the parser for `use` searches for them."""
        ids = frozenset(self._special.values())
        return ids if use.tools else ids - self._call_token_ids

    def stop_token_ids(self, use: ToolUse) -> list[int]:
        """Return the tokens that end an answer to `use`, next to the model's own."""
        return self._stop_token_ids if use.tools else []

    def parser(self, use: ToolUse, *, prompt_tail: str) -> AnswerParser | None:
        """Create the parser of one choice; None if all its text is content.

        `prompt_tail` is the suffix of the rendered prompt, in which the template may have opened or closed the
        reasoning. If no tool may be called, the markers of calls are plain text.
        """
        parser: AnswerParser | None = None
        if self._harmony:
            called = use if self.tool_parser == HARMONY else ToolUse(())
            parser = harmony.HarmonyParser(called, prompt_tail, self.reasoning_parser == HARMONY)
        else:
            call_marker = ""
            if use.tools and self._tools is not None:
                parser, call_marker = self._tools.parser(use), self._tools.trigger
            if self._reasoning is not None:
                reasoning = TaggedReasoning(self._reasoning, prompt_tail, call_marker)
                parser = ChainedParsers(reasoning, parser) if parser is not None else reasoning
        return FirstCall(parser) if parser is not None and use.once else parser

    def grammar(self, use: ToolUse, *, prompt_tail: str, max_bytes: float = math.inf) -> str | None:
        """Write the llguidance grammar that enforces `use` in the answer; None if nothing is to be enforced.

        A forced call and its arguments match the schemas of the tools. If calls are optional, their names and
        arguments are constrained as soon as one tool is strict or not all tools may be called; arguments of tools that
        are not strict are then any object. Raises `ValueError` if the model's syntax of calls is unknown, or if the
        grammar has more than `max_bytes`. `tool_grammar` checks whether the schemas can be enforced.
        """
        functions = enforced_functions(use)
        if functions is None:
            return None
        if self.tool_parser == NONE:
            if not use.forced:
                return None
            raise ValueError(
                "tool_choice asks for a call, and how this model writes tool calls is not known; start the server "
                "with --tool-call-parser, or leave tool_choice out"
            )
        lark = LarkWriter(self._special, max_bytes)
        if self._harmony:
            write = harmony.forced if use.forced else harmony.free
            return lark.grammar(write(lark, functions, prompt_tail))
        assert self._tools is not None
        self._check_keys(functions, use)
        thinking, optional = self._thinking(lark, prompt_tail)
        if use.forced:
            answer = _forced(lark, self._tools, functions, use.once)
            return lark.grammar(f"({thinking})? {answer}" if optional else f"{thinking} {answer}")
        free = _free(lark, self._tools, functions, use.once, ANY_TEXT)
        if not optional:
            return lark.grammar(f"{thinking} {free}")
        # Otherwise the grammar could match reasoning as content, and constrain calls that are quoted in it.
        assert self._reasoning is not None
        reasoning = f"/\\n*{literal_pattern(self._reasoning.open_tag)}(?s:.*)/"
        no_reasoning = lark.terminal(f"{ANY_TEXT} & ~{reasoning}")
        return lark.grammar(f"{thinking} {free} | {_free(lark, self._tools, functions, use.once, no_reasoning)}")

    def around_content(self, grammar: str, use: ToolUse, *, prompt_tail: str, max_bytes: float = math.inf) -> str:
        """Extend the llguidance `grammar` of the content by the reasoning that the model may write first.

        If tools may be called, calls may replace the content. Raises `ValueError` as `grammar` does.
        """
        lark = LarkWriter(self._special, max_bytes)
        content = f"@{_CONTENT}"
        functions = allowed_functions(use) if use.tools and self.tool_parser != NONE else []
        if self._harmony:
            opened = harmony.open_header(prompt_tail)
            if harmony.MESSAGE in opened and f"{harmony.CHANNEL}analysis" not in opened:
                return grammar
            thinking, content = harmony.analysis(lark, prompt_tail), f"{lark.spelled(harmony.FINAL)} {content}"
            if functions:
                content = lark.any_of([content, harmony.call(lark, functions)])
        else:
            thinking, optional = self._thinking(lark, prompt_tail)
            if not thinking and not functions:
                return grammar
            thinking = f"({thinking})?" if optional else thinking
            if self._reasoning is not None and self._reasoning.content_tags:
                gap = lark.rule(_NEWLINES)
                content = lark.any_of(
                    [content]
                    + [
                        f"{lark.spelled(begin)} {gap} {content} {gap} ({lark.spelled(end)})?"
                        for begin, end in self._reasoning.content_tags
                    ]
                )
            if functions:
                assert self._tools is not None
                self._check_keys(functions, use)
                content = lark.any_of([content, _forced(lark, self._tools, functions, use.once)])
        inner = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
        outer = {"lark_grammar": lark.grammar(f"{thinking} {content}")}
        return json.dumps({"grammars": [outer, {**inner[0], "name": _CONTENT}, *inner[1:]]})

    def refuses_text(self, lark: str) -> str | None:
        """Return why calls cannot be constrained by a client's grammar of free text, as a clause; None if they can."""
        if self.tool_parser == NONE:
            return "how this model writes calls is not known"
        try:
            grammar = TextGrammar.read(lark)
            if not grammar.is_recursive:
                grammar.terminals("", escaped=self._tools is None or not self._tools.writes_bare_text)
            elif self._tools is None or not self._tools.ends_text_with_line:
                return f"its rules refer to themselves and calls of the dialect {self.tool_parser} cannot follow that"
            elif not grammar.ends_before_a_line:
                return "its rules refer to themselves and a regular expression of it may match a line break"
        except NotEmbeddable as error:
            return str(error)
        return None

    def _thinking(self, lark: LarkWriter, prompt_tail: str) -> tuple[str, bool]:
        """Return an expression for the reasoning at the beginning, empty if there is none, and whether it is
        optional."""
        dialect = self._reasoning
        if dialect is None or is_closed(dialect, prompt_tail):
            return "", False
        rest = f"{lark.until(dialect.close_tag)} {lark.rule(_NEWLINES)} {lark.spelled(dialect.next_message)}"
        if is_open(dialect, prompt_tail):
            return rest, False
        return f"{lark.spelled(dialect.open_tag)} {rest}", True

    def _check_keys(self, functions: list[Function], use: ToolUse) -> None:
        """Raise `ValueError` for an argument whose name the dialect cannot represent."""
        assert self._tools is not None
        for function, position in zip(functions, use.positions, strict=True):
            properties = function.schema.get("properties")
            for key in properties if isinstance(properties, dict) else ():
                if not re.fullmatch(self._tools.keys, key):
                    raise ValueError(
                        f"tools[{position}].function.parameters has the property {key[:64]!r}, which tool calls of "
                        f"this model ({self.tool_parser}) cannot name; use letters, digits and _"
                    )


_CONTENT = "content"
_NEWLINES = r"/\n{0,4}/"


def _forced(lark: LarkWriter, dialect: ToolDialect, functions: list[Function], once: bool) -> str:
    calls = dialect.calls(lark, functions, once)
    if not dialect.trigger:
        return f"{_optional(lark, dialect)} {calls}"
    block = lark.rule(f"{lark.spelled(dialect.trigger)} {calls}")
    # Templates write line breaks between the beginning of an answer and the first call.
    first = f"{lark.rule(_NEWLINES)} {block}"
    if once or dialect.separator is None:
        return first
    return f"{first} ({lark.spelled(dialect.separator)} {block})*"


def _free(lark: LarkWriter, dialect: ToolDialect, functions: list[Function], once: bool, beginning: str) -> str:
    """Write an expression for text and calls. Text at the beginning must match the terminal `beginning`."""
    calls = lark.rule(dialect.calls(lark, functions, once))
    if dialect.trigger:
        first = lark.rule(f"{lark.until(dialect.trigger, beginning)} {calls}")
        further = "" if once else f"({lark.until(dialect.trigger)} {calls})*"
        return lark.any_of([f"{first} {further} {lark.rule(ANY_TEXT)}", lark.rule(beginning)])
    answer = f"{_optional(lark, dialect)} {calls}"
    other = lark.terminal(rf"/\s*([^\s\{dialect.opening}](?s:.*))?/ & {beginning}")
    return lark.any_of([answer, lark.rule(other)])


def _optional(lark: LarkWriter, dialect: ToolDialect) -> str:
    return f"{lark.spelled(dialect.optional)}?" if dialect.optional else ""


def _known(name: str, names: Mapping[str, str], field: str) -> str:
    """Return the dialect's main name. Raises `ValueError` for an unknown name."""
    if name != NONE and name not in names:
        raise ValueError(f"{field} is {name}; it must be auto, none or one of {', '.join(sorted(names))}")
    return names.get(name, NONE)


_BLAME_SECONDS = 0.5
"""Seconds for finding the invalid one of several costly schemas: each needs a separate check."""


async def tool_grammar(
    answer_format: AnswerFormat, use: ToolUse, content: str | None, *, prompt_tail: str, grammars: GrammarChecks
) -> str | None:
    """Return the text for `SamplingParams.grammar`; None if nothing is to be enforced.

    `content` is the grammar of content outside of calls; None means any text. Raises `InvalidRequest` for a tool whose
    schema cannot be enforced, and `CheckUnavailable`.
    """
    functions = enforced_functions(use) if content is None else allowed_functions(use)
    if functions is None:
        return None
    together = "the schemas of tools cannot be followed together"
    if functions:
        try:
            await grammars.check(await grammars.write(lambda: _any_of(functions, use)))
        except InvalidGrammar as error:
            blamed = await _blamed(functions, use, grammars)
            raise blamed or InvalidRequest(f"{together}: {error}", "tools") from error

    def write() -> str | None:
        if content is None or use.forced:
            return answer_format.grammar(use, prompt_tail=prompt_tail, max_bytes=grammars.max_bytes)
        return answer_format.around_content(content, use, prompt_tail=prompt_tail, max_bytes=grammars.max_bytes)

    try:
        text: str | None = await grammars.write(write)
        return None if text is None else await grammars.check(text)
    except InvalidGrammar as error:
        if functions:
            raise InvalidRequest(f"{together}: {error}", "tools") from error
        raise InvalidRequest(f"the form of the answer cannot be followed: {error}", "response_format") from error


def _any_of(functions: Sequence[Function], use: ToolUse) -> str:
    """Write one grammar of all schemas, so that many tools need one check. Only checked schemas go into a dialect."""
    rules = ""
    for number, (function, position) in enumerate(zip(functions, use.positions, strict=True)):
        try:
            rules += f"f{number}" + lark_of(GrammarSpec("json", undescribed(function.schema))).removeprefix("start")
        except InvalidGrammar as error:
            raise _refused(position, error) from error
    return f"start: {' | '.join(f'f{number}' for number in range(len(functions)))}\n{rules}"


async def _blamed(functions: Sequence[Function], use: ToolUse, grammars: GrammarChecks) -> InvalidRequest | None:
    """Return the error about the tool whose schema alone cannot be enforced; None if it is not found in time."""
    deadline = time.monotonic() + _BLAME_SECONDS
    for function, position in zip(functions, use.positions, strict=True):
        try:
            await grammars.compile(GrammarSpec("json", function.schema))
        except InvalidGrammar as error:
            return _refused(position, error)
        if time.monotonic() > deadline:
            break
    return None


def _refused(position: int, error: InvalidGrammar) -> InvalidRequest:
    path = f"tools[{position}].function.parameters"
    return InvalidRequest(f"{path} cannot be followed: {error}", path)
