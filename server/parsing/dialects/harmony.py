"""gpt-oss harmony: a sequence of messages. Each has a header with a channel and, for a call, its recipient.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant`, then
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`. The recipient may precede the channel,
as in the template's own calls: `<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{…}<|call|>`.
"""

import re
from collections.abc import Sequence

from server.parsing.grammar import ANY_TEXT, Function, LarkWriter
from server.parsing.parser import Markers, ReasoningPart, Waiting
from server.parsing.tool_calls import ToolCallParser
from server.schemas.chat_tools import ToolUse

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS = "analysis"
AFTER_ANALYSIS = ((END,), (START,), ("assistant",), (CHANNEL,), ("final", "commentary", "comment"))
"""The tokens from the end of the analysis to the next message's channel, which differs from `analysis`. `comment` is
the first token of `commentary` in gpt-oss's vocabulary."""
_HEADER = Markers(START, CHANNEL)
_HEADER_END = Markers(MESSAGE, END, CALL, RETURN)
_BODY_END = Markers(END, CALL, RETURN, START, CHANNEL)
TO = " to="
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_LONGEST_HEADER = 256


class HarmonyParser(ToolCallParser):
    """The analysis is reasoning, messages to a function are calls, all other messages are content.

    From `prompt_tail` follows in which header or message the text begins. Without tools, a message to a function is
    content, unchanged and with its header; with `reasoning` false, analysis is content.
    """

    def __init__(self, use: ToolUse, prompt_tail: str = "", reasoning: bool = True) -> None:
        self._reasoning = reasoning
        self._opened = open_header(prompt_tail)
        self._thought = False
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        header, opened, _ = self._opened.partition(MESSAGE)
        if opened:
            yield from self._read_body(header)
        elif CHANNEL in header:
            self._feed.begin_record()
            yield from self._read_header(header)
        elif header:
            self._feed.begin_record()
            if (yield from self._feed.take_marker(TO)):
                yield from self._read_header(TO)
            else:
                self._feed.end_record()
        while marker := (yield from self._content_until(_HEADER)):
            yield from self._read_header("" if marker == START else CHANNEL)

    def _read_header(self, header: str) -> Waiting[None]:
        """Read the rest of a header, which is recorded from its beginning, and the message after it."""
        feed = self._feed
        while True:
            end = _HEADER_END.find(feed.text, feed.at, feed.at + _LONGEST_HEADER)
            if end is not None:
                header += feed.take(end.start() - feed.at)
                feed.take(len(end[0]))
                if end[0] == MESSAGE:
                    return (yield from self._read_body(header))
                return self._record_is_content()
            if len(feed.text) - feed.at >= _LONGEST_HEADER:
                return self._record_is_content()
            if not (yield from feed.more()):
                # A header is never content, even if it is incomplete.
                feed.take_all()
                feed.end_record()
                return None

    def _read_body(self, header: str) -> Waiting[None]:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient and self._schemas:
            yield from self._read_call(recipient[1].removeprefix("functions."))
        elif recipient:
            self._record_is_content()
            yield from self._say_body()
        elif channel and channel[1] == "analysis" and self._reasoning:
            self._feed.end_record()
            yield from self._think()
        else:
            self._feed.end_record()
            if self._has_content and not self._after_call:
                self._pending_newlines.append("\n")
            yield from self._say_body()

    def _read_call(self, name: str) -> Waiting[None]:
        feed = self._feed
        character = yield from feed.skip_whitespace()
        if character not in ("{", ""):
            self._record_is_content()
            return (yield from self._say_body())
        self._begin_call(name)
        if character and (yield from self._stream_object(CALL)):
            yield from self._end_call(CALL, END)
        return None

    def _think(self) -> Waiting[None]:
        feed = self._feed
        separator = "\n" if self._thought else ""
        while True:
            text, marker = self._step_body()
            if feed.ended and not marker:
                text += feed.take_all()
            if text:
                self._parts.append(ReasoningPart(separator + text))
                separator = ""
                self._thought = True
            if marker or not (yield from feed.more()):
                return

    def _say_body(self) -> Waiting[None]:
        feed = self._feed
        while True:
            text, marker = self._step_body()
            self._add_content(text)
            if marker or not (yield from feed.more()):
                return

    def _step_body(self) -> tuple[str, str]:
        """Read a message's text, and the marker that ends it unless it begins the next header."""
        feed = self._feed
        match = _BODY_END.find(feed.text, feed.at)
        if match is None:
            return feed.step_until(_BODY_END)
        text = feed.take(match.start() - feed.at)
        if match[0] not in (START, CHANNEL):
            feed.take(len(match[0]))
        return text, match[0]


def is_spoken(template: str, architecture: str) -> bool:
    """Return whether a model with this chat template and architecture writes harmony."""
    return architecture.startswith("GptOss") or (CHANNEL in template and MESSAGE in template)


def forced(lark: LarkWriter, functions: Sequence[Function], prompt_tail: str) -> str:
    """Write an expression for exactly one call, after optional analysis."""
    return f"{analysis(lark, prompt_tail)} {call(lark, functions)}"


def free(lark: LarkWriter, functions: Sequence[Function], prompt_tail: str) -> str:
    """Write an expression for an answer or a call, after optional analysis and an optional preamble."""
    preamble = f"({lark.spelled(f'{CHANNEL}commentary{MESSAGE}')} {lark.until(END)} {lark.spelled(_NEXT)})?"
    final = f"{lark.spelled(FINAL)} {lark.rule(ANY_TEXT)}"
    return f"{analysis(lark, prompt_tail)} {preamble} {lark.any_of([call(lark, functions), final])}"


def analysis(lark: LarkWriter, prompt_tail: str) -> str:
    """Write an expression for optional analysis at the beginning, and the beginning of the next message."""
    opened = open_header(prompt_tail)
    if MESSAGE in opened:
        return f"{lark.until(END)} {lark.spelled(_NEXT)}"
    begin = f"{CHANNEL}analysis{MESSAGE}"
    whole = (
        f"{lark.spelled(begin.removeprefix(opened.removeprefix('assistant')))} {lark.until(END)} {lark.spelled(_NEXT)}"
    )
    return f"({whole})?"


def open_header(prompt_tail: str) -> str:
    """Return the part of the answer's first message that the prompt already contains, after its `<|start|>`."""
    _, started, header = prompt_tail.rpartition(START)
    return header if started and not any(end in header for end in (END, CALL, RETURN)) else ""


def call(lark: LarkWriter, functions: Sequence[Function]) -> str:
    calls = [
        f"{lark.spelled(f'{function.name} {CONSTRAIN}json{MESSAGE}')} {lark.json(function.schema)}"
        for function in functions
    ]
    return f"{lark.spelled(f'{CHANNEL}commentary to=functions.')} {lark.any_of(calls)}"


_NEXT = f"{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
