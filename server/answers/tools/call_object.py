"""Calls written as a JSON object with the function's name and arguments: `{"name": "f", "arguments": {…}}`.

Base of the Hermes, Llama-3 JSON and older Mistral dialects.
"""

import json
import re
from collections.abc import Sequence

from server.answers.argument_grammar import Function
from server.answers.feed import Waiting
from server.answers.json_mender import mend
from server.answers.lark import LarkWriter
from server.answers.tools.base import ToolCallParser

_ARGUMENTS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")


class CallObjectParser(ToolCallParser):
    """Reads such objects. Their keys may come in any order; arguments before the name wait for it."""

    marked = True
    """A marker announced the object. Where none does, it is a call only with arguments, and of a tool in the request:
    anything else is an answer in JSON."""

    def _read_call(self, end_marker: str = "") -> Waiting[bool]:
        """Read the object that comes next, kept from its marker on; whether it was a whole call.

        If not, what does not belong to a call has become content.
        """
        feed = self._feed
        calls = self._calls
        name: str | None = None
        arguments: str | None = None
        feed.take(1)
        while True:
            character = yield from feed.skip_whitespace()
            if character in ("", "}"):
                break
            if character == ",":
                feed.take(1)
                continue
            if self._calls > calls and end_marker and (yield from self._comes(end_marker)):
                feed.forget()
                return True
            key = _string((yield from self._read_value()) if character in "\"'" else None)
            character = yield from feed.skip_whitespace()
            if key is None or character != ":":
                return self._broken_off(None if character else name, calls)
            feed.take(1)
            character = yield from feed.skip_whitespace()
            if key in _ARGUMENTS and name and character == "{" and arguments is None and self._calls == calls:
                self._begin_call(name)
                if not (yield from self._stream_object(end_marker)):
                    return False
                feed.keep()
                continue
            value = yield from self._read_value()
            if key == "name" and name is None:
                name = _string(value)
                broken = not name or not (self.marked or name in self._schemas)
            elif key in _ARGUMENTS and arguments is None and self._calls == calls:
                arguments = _object(value)
                broken = arguments is None
            else:
                broken = value is None
            if broken:
                character = yield from feed.next_character()
                return self._broken_off(None if character else name, calls)
        if self._calls == calls:
            if name is None or (arguments is None and not self.marked):
                self._no_call()
                return False
            self._begin_call(name)
            self._argue(arguments or ("{}" if character else ""))
        feed.forget()
        feed.take(1)
        return True

    def _broken_off(self, name: str | None, calls: int) -> bool:
        """Make a call that got no further than its name of `name`, or content of what was kept."""
        if name and self.marked and self._calls == calls:
            self._begin_call(name)
        else:
            self._no_call()
        return False


def _string(value: str | None) -> str | None:
    """The string that the JSON text `value` is, if it is one and is valid Unicode."""
    if value is None or not value.startswith('"'):
        return None
    text = str(json.loads(value))
    return None if _SURROGATE.search(text) else text


def _object(value: str | None) -> str | None:
    """The object that `value` is, as it is or as the text of a string; null is an empty one."""
    if value == "null":
        return "{}"
    if value is not None and value.startswith('"'):
        value = mend(_string(value) or "")
    return value if value is not None and value.startswith("{") else None


def call_object(lark: LarkWriter, functions: Sequence[Function], key: str) -> str:
    """An expression for one call of any of `functions`, with its arguments under `key`."""
    calls = [
        f"{lark.spelled(f'{function.name}{_TO_KEY}{key}{_TO_VALUE}')} {lark.json(function.schema)}"
        for function in functions
    ]
    return f"{lark.spelled(_OPENING)} {lark.any_of(calls)} {lark.spelled('}')}"


_OPENING, _TO_KEY, _TO_VALUE = '{"name": "', '", "', '": '
