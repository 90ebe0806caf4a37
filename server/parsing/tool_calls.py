"""`ToolCallParser`: what the parsers of all dialects share: text around calls, and a call's way into parts."""

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.parsing.grammar import Function, LarkWriter
from server.parsing.json_repair import JsonMender, argument_types, mend, typed_argument
from server.parsing.parser import ArgumentsPart, FedParser, Markers, TextPart, ToolCallPart, Waiting
from server.schemas.chat import ToolUse


def new_call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser(FedParser):
    """Base of the dialects' parsers.

    Text around calls is content. Newlines next to a call are glue that chat templates put there: they are dropped at
    the content's beginning and end, and kept once where text goes on behind calls. A call counts from where its name
    is known and its arguments begin; what breaks off before is content, unchanged. Arguments that break off later
    stay as far as they are, and what cannot belong to them is content.
    """

    new_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(self, use: ToolUse) -> None:
        super().__init__()
        self._schemas = {tool.function.name: tool.function.parameters or {} for tool in use.tools}
        self._calls = 0
        self._argued = False
        """Some arguments of the last call came."""
        self._said = False
        """Some content came."""
        self._after_call = False
        """Nothing but newlines came since the last call."""
        self._glue: list[str] = []
        """Newlines that came last and may be glue."""
        self._glue_before = ""
        """The newlines before the last call."""

    # -- content ------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Content; newlines at its end wait for what comes next."""
        if self._after_call and text.startswith("\n"):
            behind = text.lstrip("\n")
            self._glue.append(text[: len(text) - len(behind)])
            text = behind
        plain = text.rstrip("\n")
        if plain:
            self._parts.append(
                TextPart(self._newlines() + plain) if self._glue or self._after_call else TextPart(plain)
            )
            self._said = True
        if len(plain) < len(text):
            self._glue.append(text[len(plain) :])

    def _newlines(self) -> str:
        """The newlines that go before content."""
        newlines = "".join(self._glue)
        self._glue.clear()
        if self._after_call:
            self._after_call = False
            return (newlines or self._glue_before) if self._said else ""
        return newlines

    def _say_until(self, markers: Markers) -> Waiting[str]:
        """Pass content on up to one of `markers`, read and kept from its beginning; empty at the end of the text."""
        feed = self._feed
        while True:
            match = markers.find(feed.text, feed.at)
            if match is not None:
                self._say(feed.take(match.start() - feed.at))
                feed.keep()
                return feed.take(match.end() - match.start())
            free = len(feed.text) - feed.at - markers.held(feed.text, feed.at)
            if free:
                self._say(feed.take(free))
            if not (yield from feed.more()):
                self._say(feed.take_all())
                self._end_content()
                return ""

    def _say_rest(self) -> Waiting[None]:
        """Pass all that comes on as content."""
        while True:
            self._say(self._feed.take_all())
            if not (yield from self._feed.more()):
                return self._end_content()

    def _end_content(self) -> None:
        if self._glue and not self._after_call:
            self._parts.append(TextPart("".join(self._glue)))
        self._glue.clear()

    def _no_call(self) -> None:
        """What was kept is content after all."""
        self._say(self._feed.forget())

    # -- calls --------------------------------------------------------------------------------------------------

    def _begin_call(self, name: str, id: str = "") -> None:
        """A call of the function `name`; `id` is the model's own, where its dialect has one."""
        self._feed.forget()
        if not self._after_call:
            self._glue_before = "".join(self._glue)
        self._glue.clear()
        self._after_call = True
        self._parts.append(ToolCallPart(self._calls, id or self.new_id(), name))
        self._calls += 1
        self._argued = False

    def _argue(self, fragment: str) -> None:
        """More of the arguments of the call that began last."""
        if fragment:
            self._argued = True
            self._parts.append(ArgumentsPart(self._calls - 1, fragment))

    def _close_arguments(self) -> None:
        """Close the object that was opened member by member."""
        self._argue("}" if self._argued else "{}")

    def _read_section(
        self, read_call: Callable[[], Waiting[bool]], call_begin: str, end: str, *, has_begun: bool
    ) -> Waiting[None]:
        """Read the calls of a section up to its marker `end`, each by `read_call` after its marker `call_begin`.

        `has_begun`: the first call's marker was read instead of the section's. `read_call` returns whether the call
        was complete.
        """
        feed = self._feed
        if not has_begun:
            yield from feed.skip_whitespace()
            if not (yield from feed.take_marker(call_begin)):
                self._no_call()
                return
        while (yield from read_call()):
            feed.keep()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(call_begin)):
                continue
            if (yield from feed.take_marker(end)):
                feed.forget()
            elif not (yield from self._cut_off(end, call_begin)):
                self._no_call()
            return

    def _stream_object(self, end_marker: str = "", before: str = "", spelled: str = "") -> Waiting[bool]:
        """Pass the JSON value that comes next on as arguments; whether it was complete.

        Missing brackets are mended where `end_marker`, the dialect's end of a call, comes instead. `before` goes with
        the value into arguments that are written member by member: where it turns wrong they are closed. Where no
        value comes, `spelled`, which the text has for `before`, is content.
        """
        feed = self._feed
        mender = JsonMender()
        is_member = bool(before)
        while True:
            feed.at = mender.read(feed.text, feed.at)
            if taken := mender.take():
                self._argue(before + taken)
                before = spelled = ""
            if mender.done:
                return True
            if mender.failed:
                if end_marker and (closers := mender.closers()) and (yield from self._comes(end_marker)):
                    self._argue(closers)
                    return True
                self._argue(mender.brackets())
                if is_member:
                    self._close_arguments()
                self._say(spelled + mender.unread())
                return False
            if not (yield from feed.more()):
                self._argue(before + mender.unread())
                return False

    def _stream_typed(self, types: frozenset[str], end: Markers, trim: str = "", *, lead: str = "") -> Waiting[bool]:
        """Pass bare text up to the marker `end` on as an argument of one of `types`; whether the marker came.

        One `trim` next to either marker is not part of it. Where the text ends first, the value is left open. `lead`:
        its beginning, where that was read already; empty where it is a string in any case.
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
                self._argue(text if "string" not in types else _quoted(text)[:-1])
                return False
            text = text.removesuffix(trim)
            value = typed_argument(text, types)
            self._argue(_quoted(text) if value is None else value)
            return True
        self._argue('"')
        held = ""
        while True:
            text, marker = feed.step_until(end)
            text = held + text
            held = trim if trim and text.endswith(trim) else ""
            self._argue(_quoted(text.removesuffix(held))[1:-1])
            if marker:
                self._argue('"')
                return True
            if not (yield from feed.more()):
                self._argue(_quoted(held + feed.take_all())[1:-1])
                return False

    def _comes(self, marker: str) -> Waiting[bool]:
        """Whether `marker` comes next; it stays unread."""
        feed = self._feed
        while not feed.text.startswith(marker, feed.at):
            if not marker.startswith(feed.text[feed.at :]) or not (yield from feed.more()):
                return False
        return True

    def _cut_off(self, *markers: str) -> Waiting[bool]:
        """Whether the text ends here, with at most the beginning of one of `markers`, which is read."""
        feed = self._feed
        while any(marker.startswith(feed.text[feed.at :]) for marker in markers):
            if not (yield from feed.more()):
                feed.take_all()
                feed.forget()
                return True
        return False

    def _read_value(self) -> Waiting[str | None]:
        """The JSON value that comes next, mended; None if it is none or the text ends in it."""
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
    """Reads such objects. Their keys may come in any order; arguments before the name wait for it."""

    name_key = "name"
    """The key of the function's name."""
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
            if key == self.name_key and name is None:
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

    def _read_list(self, end_marker: str = "") -> Waiting[bool]:
        """Read the next list of such objects, kept from its marker on; returns whether it was complete.

        `end_marker`: what follows the list. If the list breaks off, what belongs to no call has become content.
        """
        feed = self._feed
        feed.take(1)
        while (yield from feed.skip_whitespace()) == "{":
            if not (yield from self._read_call(end_marker)):
                return False
            feed.keep()
            separator = yield from feed.skip_whitespace()
            if separator not in (",", "]"):
                break
            feed.take(1)
            if separator == "]":
                feed.forget()
                return True
        self._no_call()
        return False

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


def call_object(lark: LarkWriter, functions: Sequence[Function], key: str, opening: str = '{"name": "') -> str:
    """An expression for one call of any of `functions`, with its arguments under `key`; `opening` is before a name."""
    calls = [
        f"{lark.spelled(f'{function.name}{_TO_KEY}{key}{_TO_VALUE}')} {lark.json(function.schema)}"
        for function in functions
    ]
    return f"{lark.spelled(opening)} {lark.any_of(calls)} {lark.spelled('}')}"


def call_list(
    lark: LarkWriter, functions: Sequence[Function], once: bool, key: str, opening: str = '{"name": "'
) -> str:
    """An expression for a list of such calls; of exactly one with `once`."""
    call = lark.rule(call_object(lark, functions, key, opening))
    further = "" if once else f"({lark.spelled(', ')} {call})*"
    return f"{lark.spelled('[')} {call} {further} {lark.spelled(']')}"


_TO_KEY, _TO_VALUE = '", "', '": '


# Calls whose arguments are a key and bare text each: GLM, Qwen3-Coder, MiniMax-M2, DeepSeek-V3.2 and others.


class MembersParser(ToolCallParser):
    """Reads a call's arguments one by one; the tool's schema says what type each is of."""

    members_end: str
    """The marker behind the last of them."""
    member_markers: tuple[str, ...]
    """Others that may stand where a text breaks off."""
    value_end: Markers
    trim = ""
    """One of these next to either end of a value is no part of it."""

    @abstractmethod
    def _read_key(self) -> Waiting[str | None]:
        """Read a key and what opens its value; None where they are not there."""

    def _types(self, schema: Mapping[str, Any], key: str) -> frozenset[str]:
        """The JSON types that the value of `key`, which was read last, may have."""
        return argument_types(schema, key)

    def _read_arguments(self, name: str) -> Waiting[bool]:
        """Read the arguments of the call of that function up to their end; whether it came."""
        feed = self._feed
        schema = self._schemas.get(name, {})
        opening = "{"
        while True:
            feed.keep()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(self.members_end)):
                feed.forget()
                self._close_arguments()
                return True
            key = yield from self._read_key()
            if key is None:
                if not (yield from self._cut_off(self.members_end, *self.member_markers)):
                    self._close_arguments()
                    self._no_call()
                return False
            feed.forget()
            self._argue(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            if not (yield from self._stream_typed(self._types(schema, key), self.value_end, self.trim)):
                return False
