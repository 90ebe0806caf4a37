"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, and since 2025 `[TOOL_CALLS]f[ARGS]{…}` or `f{…}`."""

import re
import secrets
import string
from collections.abc import Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_list

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BEGIN = Markers(BEGIN)
_NAME = re.compile(r"[\w.-]*")
_ID_CHARACTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Create an id that Mistral's chat templates accept: nine letters and digits."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class MistralParser(CallObjectParser):
    """Reads a list of objects, or a name and an object, after a marker."""

    new_id = staticmethod(new_call_id)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while (yield from self._content_until(_BEGIN)):
            if (yield from feed.skip_whitespace()) == "[":
                yield from self._read_list()
            elif (yield from feed.next_character()) == "{":
                yield from self._read_call()
            else:
                yield from self._read_named()

    def _read_named(self) -> Waiting[None]:
        """Read `name{…}`, with optional markers between name and object."""
        feed = self._feed
        name = yield from feed.take_word(_NAME)
        if (yield from feed.take_marker(CALL_ID)):
            yield from feed.take_word(_NAME)
        named = yield from feed.take_marker(ARGUMENTS)
        character = yield from feed.skip_whitespace()
        if not name or (character != "{" and not (named and not character)):
            return self._record_is_content()
        self._begin_call(name)
        if character:
            yield from self._stream_object()
        return None


def named_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for a call after its marker, with the marker in front of its arguments."""
    return lark.any_of(f"{lark.spelled(each.name + ARGUMENTS)} {lark.json(each.schema)}" for each in functions)


TOOL_DIALECTS.register("mistral_args")(
    ToolDialect(
        MistralParser,
        named_calls,
        detect=lambda signs: BEGIN in signs.template and ARGUMENTS in signs.template,
        trigger=BEGIN,
        separator="",
        markers=(BEGIN, ARGUMENTS, CALL_ID),
    )
)
TOOL_DIALECTS.register("mistral")(
    ToolDialect(
        MistralParser,
        call_list,
        detect=lambda signs: BEGIN in signs.template,
        trigger=BEGIN,
        markers=(BEGIN, ARGUMENTS, CALL_ID),
    )
)
