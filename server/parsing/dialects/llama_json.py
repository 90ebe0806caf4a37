"""Llama 3: `{"name": "f", "parameters": {…}}`, several separated by `;`, optionally after `<|python_tag|>`.

Llama 4 writes the objects without separators, after `<|python_start|>`, a text or none, and `<|python_end|>`.
xLAM-2 writes a list without markers: `[{"name": "f", "arguments": {…}}, …]`.
"""

from collections.abc import Sequence

from server.parsing.dialects.pythonic import END, START
from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_list, call_object

TAG = "<|python_tag|>"


class LlamaJsonParser(CallObjectParser):
    """Reads objects at the beginning of the text, with or without a marker, and after every later marker.

    After `<|python_tag|>`, every object with a name is a call. Llama 4's markers are no part of the content, and an
    object after them is a call under the same conditions as at the beginning of the text.
    """

    markers = Markers(TAG)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        feed.begin_record()
        self.marked = False
        yield from self._read_calls_or_content()
        while marker := (yield from self._content_until(self.markers)):
            self.marked = marker == TAG
            if not self.marked:
                feed.begin_record()
            yield from self._read_calls_or_content()

    def _read_calls_or_content(self) -> Waiting[None]:
        """Read the calls that follow the record; without one, the record and white space after it are content."""
        if (yield from self._feed.skip_whitespace()) == "{":
            yield from self._read_calls()
        else:
            self._record_is_content()

    def _read_calls(self) -> Waiting[None]:
        """Read the next calls and their separators."""
        feed = self._feed
        while (yield from self._read_call()):
            feed.begin_record()
            if (yield from feed.skip_whitespace()) == ";":
                feed.take(1)
                yield from feed.skip_whitespace()
            if (yield from feed.next_character()) != "{":
                return self._record_is_content()


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for an answer's calls."""
    call = lark.rule(call_object(lark, functions, "parameters"))
    return call if once else f"{call} ({lark.spelled('; ')} {call})*"


TOOL_DIALECTS.register("llama3_json")(
    ToolDialect(
        LlamaJsonParser,
        calls,
        detect=lambda signs: signs.has_token(TAG) or TAG in signs.template,
        opening="{",
        optional=TAG,
        markers=(TAG,),
    )
)


def unseparated_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for an answer's calls in Llama 4."""
    call = lark.rule(call_object(lark, functions, "parameters"))
    return call if once else f"{call} {call}*"


class Llama4JsonParser(LlamaJsonParser):
    """Reads Llama 4's markers, which are ordinary text in answers of Llama 3."""

    markers = Markers(START, END)


TOOL_DIALECTS.register("llama4_json")(
    ToolDialect(
        Llama4JsonParser,
        unseparated_calls,
        detect=lambda signs: signs.has_token(START),
        opening="{",
        optional=START,
        markers=(START, END),
    )
)


class XlamParser(CallObjectParser):
    """Reads a list, or an object, at the beginning of the text; all else is content."""

    marked = False

    def _read(self) -> Waiting[None]:
        feed = self._feed
        feed.begin_record()
        match (yield from feed.skip_whitespace()):
            case "[":
                yield from self._read_list()
            case "{":
                yield from self._read_call()
            case _:
                self._record_is_content()
        yield from self._content_to_end()


TOOL_DIALECTS.register("xlam")(
    ToolDialect(
        XlamParser,
        call_list,
        detect=lambda signs: '[{"name": "tool_call_name", "arguments":' in signs.template,
        opening="[",
    )
)
