"""`ToolCallParser`: the base class of the dialects' parsers, and the two families of parsers below it."""

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.parsing.grammar import Function, LarkWriter
from server.parsing.json_repair import JsonMender, argument_types, mend, typed_argument
from server.parsing.parser import ArgumentsPart, FedParser, Markers, TextPart, ToolCallPart, Waiting
from server.schemas.chat_tools import ToolUse


def new_call_id() -> str:
    """Create an id in the form of OpenAI's ids."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser(FedParser):
    """Base of the dialects' parsers.

    Text outside of calls is content. Newlines next to a call come from chat templates: they are dropped at the
    beginning and end of the content, and preserved once where content continues after calls. A call begins where its
    name is known and its arguments begin. If the text is invalid before that, it is content, unchanged. If arguments
    are invalid, the part before the error stays, and the text after it is content.
    """

    new_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(self, use: ToolUse) -> None:
        super().__init__()
        self._schemas = {tool.function.name: tool.function.parameters or {} for tool in use.tools}
        self._calls = 0
        self._has_arguments = False
        """Whether some arguments of the last call were read."""
        self._has_content = False
        """Whether some content was read."""
        self._after_call = False
        """Whether only newlines were read since the last call."""
        self._pending_newlines: list[str] = []
        """The newlines read last, which are dropped if a call follows."""
        self._newlines_before_call = ""
        """The newlines that preceded the last call."""
        self._announced = False
        """Whether a marker of calls was read."""

    # -- content ------------------------------------------------------------------------------------------------

    def _add_content(self, text: str) -> None:
        """Pass on content. Newlines at its end wait until the next text is known."""
        if self._after_call and text.startswith("\n"):
            rest = text.lstrip("\n")
            self._pending_newlines.append(text[: len(text) - len(rest)])
            text = rest
        plain = text.rstrip("\n")
        if plain:
            self._parts.append(
                TextPart(self._take_newlines() + plain)
                if self._pending_newlines or self._after_call
                else TextPart(plain)
            )
            self._has_content = True
        if len(plain) < len(text):
            self._pending_newlines.append(text[len(plain) :])

    def _take_newlines(self) -> str:
        """Return the pending newlines that precede further content."""
        newlines = "".join(self._pending_newlines)
        self._pending_newlines.clear()
        if self._after_call:
            self._after_call = False
            return (newlines or self._newlines_before_call) if self._has_content else ""
        return newlines

    def _content_until(self, markers: Markers) -> Waiting[str]:
        """Pass on content up to one of `markers`, which is read and recorded. Returns it; empty at the end of the
        text."""
        feed = self._feed
        while True:
            match = markers.find(feed.text, feed.at)
            if match is not None:
                self._add_content(feed.take(match.start() - feed.at))
                feed.begin_record()
                self._announced = True
                return feed.take(match.end() - match.start())
            free = len(feed.text) - feed.at - markers.held(feed.text, feed.at)
            if free:
                self._add_content(feed.take(free))
            if not (yield from feed.more()):
                self._add_content(feed.take_all())
                self._end_content()
                return ""

    def _content_to_end(self) -> Waiting[None]:
        """Pass on the rest of the text as content."""
        while True:
            self._add_content(self._feed.take_all())
            if not (yield from self._feed.more()):
                return self._end_content()

    def _end_content(self) -> None:
        if self._pending_newlines and not self._after_call:
            self._parts.append(TextPart("".join(self._pending_newlines)))
        self._pending_newlines.clear()

    def _record_is_content(self) -> None:
        """End the record, and pass on the recorded text as content, unless it is the beginning of a call that was cut
        off."""
        feed = self._feed
        text = feed.end_record()
        if self._announced and feed.cut_off and (feed.at == len(feed.text) or feed.in_marker):
            feed.take_all()
            self._pending_newlines.clear()
        else:
            self._add_content(text)

    # -- calls --------------------------------------------------------------------------------------------------

    def _begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of the function `name`. `id` is the model's own id, if its dialect has ids."""
        self._feed.end_record()
        if not self._after_call:
            self._newlines_before_call = "".join(self._pending_newlines)
        self._pending_newlines.clear()
        self._after_call = True
        self._parts.append(ToolCallPart(self._calls, id or self.new_id(), name))
        self._calls += 1
        self._has_arguments = False

    def _add_arguments(self, fragment: str) -> None:
        """Pass on a further piece of the arguments of the last call."""
        if fragment:
            self._has_arguments = True
            self._parts.append(ArgumentsPart(self._calls - 1, fragment))

    def _close_arguments(self) -> None:
        """Close the arguments' object, which is written member by member."""
        self._add_arguments("}" if self._has_arguments else "{}")

    def _read_section(
        self, read_call: Callable[[], Waiting[bool]], call_begin: str, *ends: str, has_begun: bool
    ) -> Waiting[None]:
        """Read the calls of a section up to a marker of `ends`, each by `read_call` after the marker `call_begin`.

        `has_begun`: the first call's marker was read instead of the section's. `read_call` returns whether the call
        was complete.
        """
        feed = self._feed
        if not has_begun:
            yield from feed.skip_whitespace()
            if not (yield from feed.take_marker(call_begin)):
                self._record_is_content()
                return
        while (yield from read_call()):
            feed.begin_record()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(call_begin)):
                continue
            if (yield from self._take_any(ends)):
                feed.end_record()
            elif not (yield from self._cut_off(*ends, call_begin)):
                self._record_is_content()
            return

    def _take_any(self, markers: Sequence[str]) -> Waiting[bool]:
        """Read one of `markers` if it follows. Returns whether it did."""
        for marker in markers:
            if (yield from self._feed.take_marker(marker)):
                return True
        return False

    def _end_call(self, *markers: str) -> Waiting[bool]:
        """Read white space and one of `markers`, which end a call. Returns whether it was read; other text is content.

        If the text ends here, or within a marker, it is read too.
        """
        feed = self._feed
        feed.begin_record()
        yield from feed.skip_whitespace()
        if (yield from self._take_any(markers)):
            feed.end_record()
            return True
        if not (yield from self._cut_off(*markers)):
            self._record_is_content()
        return False

    def _stream_object(self, end_marker: str = "", before: str = "", spelled: str = "") -> Waiting[bool]:
        """Pass on the next JSON value as arguments. Returns whether it was complete.

        If `end_marker`, the dialect's end of a call, follows instead of closing brackets, the brackets are added. With
        `before`, the value is one member of the arguments, and `before` is written in front of it; after an invalid
        value the arguments are closed. If no value follows, `spelled`, the model's text for `before`, is content.
        """
        feed = self._feed
        mender = JsonMender()
        is_member = bool(before)
        while True:
            feed.at = mender.read(feed.text, feed.at)
            if taken := mender.take():
                self._add_arguments(before + taken)
                before = spelled = ""
            if mender.done:
                return True
            if mender.failed:
                if end_marker and (closers := mender.closers()) and (yield from self._feed.comes(end_marker)):
                    self._add_arguments(closers)
                    return True
                self._add_arguments(mender.brackets())
                if is_member:
                    self._close_arguments()
                self._add_content(spelled + mender.unread())
                return False
            if not (yield from feed.more()):
                self._add_arguments(before + mender.unread())
                return False

    def _stream_typed(self, types: frozenset[str], end: Markers, trim: str = "", *, lead: str = "") -> Waiting[bool]:
        """Pass on bare text up to the marker `end` as an argument of one of `types`. Returns whether the marker
        followed.

        One `trim` at either end of the value is dropped. If the text ends before the marker, the value stays
        incomplete. `lead` is the beginning of the value if it was read already, except for a string.
        """
        feed = self._feed
        if trim:
            yield from feed.take_marker(trim)
        if types != {"string"}:
            pieces = [lead]
            closed = yield from feed.take_until(end, pieces)
            text = "".join(pieces)
            if not closed:
                text = text[: len(text) - end.held(text, 0)]
                self._add_arguments(text if "string" not in types else _quoted(text)[:-1])
                return False
            text = text.removesuffix(trim)
            value = typed_argument(text, types)
            self._add_arguments(_quoted(text) if value is None else value)
            return True
        self._add_arguments('"')
        held = ""
        while True:
            text, marker = feed.step_until(end)
            text = held + text
            held = trim if trim and text.endswith(trim) else ""
            self._add_arguments(_quoted(text.removesuffix(held))[1:-1])
            if marker:
                self._add_arguments('"')
                return True
            if not (yield from feed.more()):
                self._add_arguments(_quoted(held + feed.take_all())[1:-1])
                return False

    def _cut_off(self, *markers: str) -> Waiting[bool]:
        """Return whether the text ends here, or with a prefix of one of `markers`, which is read."""
        feed = self._feed
        while any(marker.startswith(feed.text[feed.at :]) for marker in markers):
            if not (yield from feed.more()):
                feed.take_all()
                feed.end_record()
                return True
        return False

    def _read_value(self) -> Waiting[str | None]:
        """Read the next JSON value and repair it. Returns None if it is invalid or incomplete."""
        feed = self._feed
        mender = JsonMender()
        pieces: list[str] = []
        while True:
            begin = feed.at
            end = mender.read(feed.text, begin)
            feed.take(end - begin)
            pieces.append(mender.take())
            if mender.done:
                return "".join(pieces)
            if mender.failed:
                return None
            if not (yield from feed.more()):
                mender.end()
                pieces.append(mender.take())
                return "".join(pieces) if mender.done else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Calls written as a JSON object with name and arguments: Hermes, Llama 3, older Mistral.

_ARGUMENTS = ("arguments", "parameters")
_SURROGATE = re.compile("[\ud800-\udfff]")


class CallObjectParser(ToolCallParser):
    """Reads such objects. Keys may be in any order; arguments that precede the name are held back until it is
    known."""

    name_key = "name"
    """The key of the function's name."""
    marked = True
    """Whether a marker precedes each object. Without a marker, an object is a call only if it has arguments and the
    name of a tool in the request; any other object is an answer in JSON."""

    def _read_call(self, end_marker: str = "") -> Waiting[bool]:
        """Read the next object, recorded from its marker. Returns whether it was a complete call.

        If not, the text that belongs to no call has become content.
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
            if self._calls > calls and end_marker and (yield from self._feed.comes(end_marker)):
                feed.end_record()
                return True
            key = string_of((yield from self._read_value()) if character in "\"'" else None)
            character = yield from feed.skip_whitespace()
            if key is None or character != ":":
                return self._broken_off(None if character else name, calls)
            feed.take(1)
            character = yield from feed.skip_whitespace()
            if key in _ARGUMENTS and name and character == "{" and arguments is None and self._calls == calls:
                self._begin_call(name)
                if not (yield from self._stream_object(end_marker)):
                    return False
                feed.begin_record()
                continue
            value = yield from self._read_value()
            if key == self.name_key and name is None:
                name = string_of(value)
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
                self._record_is_content()
                return False
            self._begin_call(name)
            self._add_arguments(arguments or ("{}" if character else ""))
        feed.end_record()
        feed.take(1)
        return True

    def _read_list(self, end_marker: str = "") -> Waiting[bool]:
        """Read the next list of such objects, recorded from its marker. Returns whether it was complete.

        If `end_marker`, which is not read, follows instead of the closing bracket, the list is complete too. If it is
        incomplete, the text that belongs to no call has become content.
        """
        feed = self._feed
        calls = self._calls
        feed.take(1)
        while (yield from feed.skip_whitespace()) == "{":
            if not (yield from self._read_call(end_marker)):
                return False
            feed.begin_record()
            if (yield from feed.skip_whitespace()) != ",":
                break
            feed.take(1)
        is_closed = self._calls > calls and (yield from feed.next_character()) == "]"
        if is_closed:
            feed.take(1)
        elif not (self._calls > calls and end_marker and (yield from self._feed.comes(end_marker))):
            self._record_is_content()
            return False
        feed.end_record()
        return True

    def _broken_off(self, name: str | None, calls: int) -> bool:
        """Handle an incomplete object: pass on a call without arguments if `name` is known, else the record as
        content."""
        if name and self.marked and self._calls == calls:
            self._begin_call(name)
        else:
            self._record_is_content()
        return False


def string_of(value: str | None) -> str | None:
    """Decode the JSON text `value` if it is a string of valid Unicode, else return None."""
    if value is None or not value.startswith('"'):
        return None
    text = str(json.loads(value))
    return None if _SURROGATE.search(text) else text


def _object(value: str | None) -> str | None:
    """Return the JSON text of the object in `value`, which may be an object, a string with an object, or null
    (empty)."""
    if value == "null":
        return "{}"
    if value is not None and value.startswith('"'):
        value = mend(string_of(value) or "")
    return value if value is not None and value.startswith("{") else None


def call_object(lark: LarkWriter, functions: Sequence[Function], key: str, opening: str = '{"name": "') -> str:
    """Write an expression for a call of any of `functions`, with its arguments under `key`. `opening` precedes a
    name."""
    calls = [
        f"{lark.spelled(f'{function.name}{_TO_KEY}{key}{_TO_VALUE}')} {lark.json(function.schema)}"
        for function in functions
    ]
    return f"{lark.spelled(opening)} {lark.any_of(calls)} {lark.spelled('}')}"


def call_list(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for a list of calls with their arguments under `arguments`; of exactly one with `once`."""
    call = lark.rule(call_object(lark, functions, "arguments"))
    further = "" if once else f"({lark.spelled(', ')} {call})*"
    return f"{lark.spelled('[')} {call} {further} {lark.spelled(']')}"


_TO_KEY, _TO_VALUE = '", "', '": '


# Calls whose arguments are a key and bare text each: GLM, Qwen3-Coder, MiniMax-M2, DeepSeek-V3.2 and others.


class MembersParser(ToolCallParser):
    """Reads a call's arguments one by one. The tool's schema gives the type of each."""

    members_end: str
    """The marker after the last argument."""
    member_markers: tuple[str, ...]
    """Other markers that an incomplete text may end with."""
    value_end: Markers
    trim = ""
    """Text that is dropped once at either end of a value."""

    @abstractmethod
    def _read_key(self) -> Waiting[str | None]:
        """Read a key and the opening marker of its value. Returns None if they do not follow."""

    def _types(self, schema: Mapping[str, Any], key: str) -> frozenset[str]:
        """Return the JSON types that the value of `key`, the last read key, may have."""
        return argument_types(schema, key)

    def _read_arguments(self, name: str) -> Waiting[bool]:
        """Read the arguments of a call of the function `name`. Returns whether they were complete."""
        feed = self._feed
        schema = self._schemas.get(name, {})
        opening = "{"
        while True:
            feed.begin_record()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(self.members_end)):
                feed.end_record()
                self._close_arguments()
                return True
            key = yield from self._read_key()
            if key is None:
                if not (yield from self._cut_off(self.members_end, *self.member_markers)):
                    self._close_arguments()
                    self._record_is_content()
                return False
            feed.end_record()
            self._add_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            if not (yield from self._stream_typed(self._types(schema, key), self.value_end, self.trim)):
                return False
