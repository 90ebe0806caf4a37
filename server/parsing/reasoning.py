"""`TaggedReasoning`: parses reasoning between two tags at the beginning of an answer. Registers one dialect per pair
of tags."""

import re

from server.parsing.parser import FedParser, Markers, ReasoningPart, TextPart, Waiting
from server.parsing.registry import REASONING_DIALECTS, ReasoningDialect

_TURN = re.compile(r"<\||<｜|\[/INST\]|<end_of_turn>|<seed:eos>|<SPECIAL_1|\[e~\[|\[\|")  # noqa: RUF001
"""Markers that chat templates write between turns."""
_DEEPSEEK = "<｜"  # noqa: RUF001
"""The beginning of DeepSeek's markers. Templates of other families remove reasoning from earlier turns by its closing
tag alone, although their models may not reason (LFM2.5)."""


def is_open(dialect: ReasoningDialect, prompt_tail: str) -> bool:
    """Return whether the answer begins inside reasoning."""
    _, opened, rest = prompt_tail.rpartition(dialect.open_tag)
    if opened and dialect.close_tag not in rest and not _TURN.search(rest):
        return True
    return dialect.always and not is_closed(dialect, prompt_tail)


def is_closed(dialect: ReasoningDialect, prompt_tail: str) -> bool:
    """Return whether the prompt has already closed the reasoning, or skipped it."""
    _, closed, rest = prompt_tail.rpartition(dialect.close_tag)
    return bool(closed) and dialect.open_tag not in rest and not _TURN.search(rest)


class TaggedReasoning(FedParser):
    """Text between the tags is reasoning, text after them is content; newlines next to a tag are dropped.

    Tags around the content are dropped, and the text that begins a further message.

    Tags are recognised only at the beginning of an answer. A later tag is content. A closing tag of reasoning that is
    not open is dropped there: models write it whose templates show turns without reasoning in that form.
    """

    def __init__(self, dialect: ReasoningDialect, prompt_tail: str = "", call_marker: str = "") -> None:
        """`call_marker` begins a call, if calls are allowed and begin with a marker."""
        self._dialect = dialect
        self._call_marker = call_marker
        self._opened = is_open(dialect, prompt_tail)
        super().__init__()

    def _read(self) -> Waiting[None]:
        feed = self._feed
        feed.begin_record()
        yield from feed.skip("\n")
        opened = yield from feed.take_marker(self._dialect.open_tag)
        if opened or self._opened:
            feed.end_record()
            yield from feed.skip("\n")
            yield from self._think()
            yield from feed.take_marker(self._dialect.next_message)
            feed.begin_record()
        elif (yield from feed.take_marker(self._dialect.close_tag)):
            feed.end_record()
            yield from feed.skip("\n")
            feed.begin_record()
        for begin, end in self._dialect.content_tags:
            if (yield from feed.take_marker(begin)):
                feed.end_record()
                yield from feed.skip("\n")
                newlines, marker = yield from self._pass_up_to(Markers(end), TextPart)
                if marker:
                    yield from feed.skip("\n")
                    yield from feed.take_marker(self._dialect.next_message)
                elif newlines:
                    self._parts.append(TextPart(newlines))
                break
        if passed := feed.end_record():
            self._parts.append(TextPart(passed))
        while True:
            if text := feed.take_all():
                self._parts.append(TextPart(text))
            if not (yield from feed.more()):
                return

    def _think(self) -> Waiting[None]:
        """Read reasoning and its closing tag.

        Models may begin a call without closing the reasoning. Text from a call on waits until the closing tag shows
        that it is reasoning; if none follows, the reasoning has ended before the call.
        """
        feed, close_tag = self._feed, self._dialect.close_tag
        markers = filter(None, (close_tag, self._call_marker))
        newlines, marker = yield from self._pass_up_to(Markers(*markers), ReasoningPart)
        if marker != close_tag and marker:
            pieces = [marker]
            if (yield from feed.take_until(Markers(close_tag), pieces)):
                self._parts.append(ReasoningPart(newlines + "".join(pieces).rstrip("\n")))
            else:
                self._parts.append(TextPart("".join(pieces)))
        yield from feed.skip("\n")

    def _pass_up_to(self, end: Markers, part: type[ReasoningPart | TextPart]) -> Waiting[tuple[str, str]]:
        """Pass on text up to one of the markers `end`, and read the marker.

        Returns the newlines before the marker, which were not passed on, and the marker, empty at the end of the text.
        """
        feed = self._feed
        newlines: list[str] = []
        while True:
            text, marker = feed.step_until(end)
            if feed.ended and not marker:
                text += feed.take_all()
            plain = text.rstrip("\n")
            if plain:
                self._parts.append(part("".join((*newlines, plain))))
                newlines.clear()
            if len(plain) < len(text):
                newlines.append(text[len(plain) :])
            if marker or not (yield from feed.more()):
                return "".join(newlines), marker


REASONING_DIALECTS.register("seed_oss")(
    ReasoningDialect("<seed:think>", "</seed:think>", detect=lambda signs: "<seed:think>" in signs.template)
)
REASONING_DIALECTS.register("minimax_m3")(
    ReasoningDialect("<mm:think>", "</mm:think>", detect=lambda signs: "<mm:think>" in signs.template)
)
REASONING_DIALECTS.register("gemma4")(
    ReasoningDialect(
        "<|channel>thought",
        "<channel|>",
        detect=lambda signs: "<|channel>" in signs.template,
        opening="<|channel>",
    )
)
REASONING_DIALECTS.register("cohere_command")(
    ReasoningDialect(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        detect=lambda signs: "<|START_THINKING|>" in signs.template,
        content_tags=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
        aliases=("command_a", "cohere_command3", "cohere_command4"),
    )
)
# The next two dialects are like "think", and also have tags around the content.
REASONING_DIALECTS.register("hunyuan_a13b")(
    ReasoningDialect(
        "<think>",
        "</think>",
        detect=lambda signs: "<think>" in signs.template and "<answer>" in signs.template,
        content_tags=(("<answer>", "</answer>"),),
    )
)
REASONING_DIALECTS.register("ernie45")(
    ReasoningDialect(
        "<think>",
        "</think>",
        detect=lambda signs: (
            "<think>" in signs.template
            and ("<response></response>" in signs.template or signs.has_token("<response>"))
        ),
        content_tags=(("<response>", "</response>"),),
    )
)
REASONING_DIALECTS.register("mistral")(
    ReasoningDialect(
        "[THINK]",
        "[/THINK]",
        detect=lambda signs: "[THINK]" in signs.template or signs.has_token("[THINK]"),
    )
)
REASONING_DIALECTS.register("apertus")(
    ReasoningDialect("<|inner_prefix|>", "<|inner_suffix|>", detect=lambda signs: "<|inner_prefix|>" in signs.template)
)
REASONING_DIALECTS.register("longcat")(
    ReasoningDialect("<longcat_think>", "</longcat_think>", detect=lambda signs: "<longcat_think>" in signs.template)
)
# Solar Open writes reasoning, content and calls as messages of their own.
REASONING_DIALECTS.register("solar_open")(
    ReasoningDialect(
        "<|think|>",
        "<|end|>",
        detect=lambda signs: "<|think|>" in signs.template and "<|tool_call:begin|>" in signs.template,
        content_tags=(("<|content|>", "<|end|>"),),
        next_message="<|begin|>assistant",
    )
)
REASONING_DIALECTS.register("hy_v3_opensource")(
    ReasoningDialect(
        "<think:opensource>",
        "</think:opensource>",
        detect=lambda signs: "<think:opensource>" in signs.template or signs.has_token("<think:opensource>"),
    )
)
# The next two dialects have plain text for tags.
REASONING_DIALECTS.register("apriel")(
    ReasoningDialect(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        detect=lambda signs: "[BEGIN FINAL RESPONSE]" in signs.template,
        content_tags=(("", "[END FINAL RESPONSE]"),),
    )
)
REASONING_DIALECTS.register("granite")(
    ReasoningDialect(
        "Here is my thought process:",
        "Here is my response:",
        detect=lambda signs: "Here is my thought process:" in signs.template,
    )
)
# Qwen3, DeepSeek-V3.1, GLM-4.5, MiniMax-M2, Kimi-K2 and others, where the model or the prompt opens the reasoning.
REASONING_DIALECTS.register("think")(
    ReasoningDialect(
        "<think>",
        "</think>",
        detect=lambda signs: (
            "<think>" in signs.template
            or ("</think>" in signs.template and _DEEPSEEK not in signs.template)
            or ("</think>" not in signs.template and signs.has_token("<think>") and signs.has_token("</think>"))
        ),
        aliases=(
            *("qwen3", "glm45", "glm47", "deepseek_v3", "deepseek_v4", "deepseek_v41", "minimax_m2", "kimi_k2"),
            *("nemotron_v3", "mimo", "olmo3", "ling3", "hy_v3", "poolside_v1", "step3p5", "holo2"),
        ),
    )
)
# DeepSeek-R1, which always reasons and may omit the opening tag.
REASONING_DIALECTS.register("deepseek_r1")(
    ReasoningDialect("<think>", "</think>", detect=lambda signs: "</think>" in signs.template, always=True)
)
