"""Parsers over parsers: content behind reasoning, and only the first call. Put together by `AnswerFormat`."""

from server.answers.parts import AnswerParser, ArgumentsPart, Part, TextPart, ToolCallPart


class Behind:
    """Gives the content that `outer` finds to `inner`, which looks for calls in it."""

    def __init__(self, outer: AnswerParser, inner: AnswerParser) -> None:
        self._outer = outer
        self._inner = inner

    def push(self, text: str) -> list[Part]:
        return self._pass_on(self._outer.push(text))

    def finish(self) -> list[Part]:
        return [*self._pass_on(self._outer.finish()), *self._inner.finish()]

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        passed: list[Part] = []
        for part in parts:
            if isinstance(part, TextPart):
                passed += self._inner.push(part.text)
            else:
                passed.append(part)
        return passed


class FirstCall:
    """Leaves out every call of `parser` but the first, for a request that allows one."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Part]:
        return _without_later_calls(self._parser.push(text))

    def finish(self) -> list[Part]:
        return _without_later_calls(self._parser.finish())


def _without_later_calls(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not (isinstance(part, ToolCallPart | ArgumentsPart) and part.index)]
