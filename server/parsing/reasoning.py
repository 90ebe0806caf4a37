"""`TaggedReasoning`: reasoning between two tags at an answer's beginning. Base of every dialect but harmony."""

import re

from server.parsing.parser import FedParser, Markers, ReasoningPart, TextPart, Waiting

_TURN = re.compile(r"<\||<｜|\[/INST\]|<end_of_turn>")  # noqa: RUF001
"""What chat templates write between turns."""


class TaggedReasoning(FedParser):
    """What stands between the tags is reasoning, what follows is content; newlines next to a tag belong to neither.

    Only an answer's beginning is looked at: a tag later on is something the answer says.
    """

    open_tag: str
    close_tag: str
    always = False
    """The model reasons unless the prompt says otherwise, and may leave the opening tag out."""

    def __init__(self, prompt_tail: str = "") -> None:
        self._opened = self.is_open(prompt_tail)
        super().__init__()

    @classmethod
    def is_open(cls, prompt_tail: str) -> bool:
        """Whether the answer begins inside reasoning."""
        _, opened, behind = prompt_tail.rpartition(cls.open_tag)
        if opened and cls.close_tag not in behind and not _TURN.search(behind):
            return True
        return cls.always and not cls.is_closed(prompt_tail)

    @classmethod
    def is_closed(cls, prompt_tail: str) -> bool:
        """Whether the prompt has ended the reasoning already, or skipped it."""
        _, closed, behind = prompt_tail.rpartition(cls.close_tag)
        return bool(closed) and not _TURN.search(behind)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        feed.keep()
        yield from feed.skip("\n")
        opened = yield from feed.take_marker(self.open_tag)
        passed = feed.forget()
        if opened or self._opened:
            yield from feed.skip("\n")
            yield from self._think()
        elif passed:
            self._parts.append(TextPart(passed))
        while True:
            if text := feed.take_all():
                self._parts.append(TextPart(text))
            if not (yield from feed.more()):
                return

    def _think(self) -> Waiting[None]:
        feed = self._feed
        end = Markers(self.close_tag)
        newlines: list[str] = []
        while True:
            text, marker = feed.step_until(end)
            if feed.ended and not marker:
                text += feed.take_all()
            plain = text.rstrip("\n")
            if plain:
                self._parts.append(ReasoningPart("".join((*newlines, plain))))
                newlines.clear()
            if len(plain) < len(text):
                newlines.append(text[len(plain) :])
            if marker:
                yield from feed.skip("\n")
                return
            if not (yield from feed.more()):
                return


# [think] `<think>…</think>`: Qwen3, DeepSeek-V3.1, GLM-4.5 and others, where the model or the prompt opens it.


class ThinkReasoning(TaggedReasoning):
    open_tag, close_tag = "<think>", "</think>"


# [deepseek_r1] DeepSeek-R1 and QwQ: `…</think>`, of models that always reason and may leave the opening tag out.


class DeepSeekR1Reasoning(TaggedReasoning):
    open_tag, close_tag = "<think>", "</think>"
    always = True


# [mistral] Mistral's reasoning models: `[THINK]…[/THINK]`.


class MistralReasoning(TaggedReasoning):
    open_tag, close_tag = "[THINK]", "[/THINK]"
