"""`ToolCallParser`: what the parsers of all dialects share: text around calls, and a call's way into parts."""

import json
import secrets
from collections.abc import Callable

from server.answers.feed import FedParser, Markers, Waiting
from server.answers.json_mender import JsonMender
from server.answers.parts import ArgumentsPart, TextPart, ToolCallPart
from server.answers.typed_arguments import typed_argument
from server.protocol.tools import ToolUse


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

    def _begin_call(self, name: str) -> None:
        self._feed.forget()
        if not self._after_call:
            self._glue_before = "".join(self._glue)
        self._glue.clear()
        self._after_call = True
        self._parts.append(ToolCallPart(self._calls, self.new_id(), name))
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

    def _stream_typed(self, types: frozenset[str], end: Markers, trim: str = "") -> Waiting[bool]:
        """Pass bare text up to the marker `end` on as an argument of one of `types`; whether the marker came.

        One `trim` next to either marker is not part of it. Where the text ends first, the value is left open.
        """
        feed = self._feed
        if trim:
            yield from feed.take_marker(trim)
        if types != {"string"}:
            pieces: list[str] = []
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
