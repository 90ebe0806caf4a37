"""`tool_grammar`: the checked grammar that a request's tools and choice come to. Called by `prepare_chat`."""

import asyncio
import time
from collections.abc import Sequence

from engine.structured.compile import GrammarCompiler
from engine.structured.spec import GrammarSpec, InvalidGrammar, lark_of
from server.answers.answer_format import AnswerFormat
from server.answers.argument_grammar import Function, allowed_functions, enforced_functions
from server.protocol.tools import ToolUse

_BLAME_SECONDS = 0.5
"""To find out which of many costly schemas is one too many: each takes a check of its own."""


async def tool_grammar(
    answer_format: AnswerFormat, use: ToolUse, content: str | None, *, prompt_tail: str, compiler: GrammarCompiler
) -> str | None:
    """The text for `SamplingParams.grammar`; None where nothing is promised.

    `content` is the grammar of what the model says where it makes no call; None: it says what it likes. Raises
    `ValueError`, one sentence: it names the tool whose schema cannot be followed. Raises `CheckUnavailable`.
    """
    functions = enforced_functions(use) if content is None else allowed_functions(use)
    if functions is None:
        return None
    together = "the schemas of tools cannot be followed together"
    if functions:
        try:
            await compiler.check_async(await asyncio.to_thread(_any_of, functions, use))
        except InvalidGrammar as error:
            raise (await _blamed(functions, use, compiler) or ValueError(f"{together}: {error}")) from error
    text = await asyncio.to_thread(_text, answer_format, use, content, prompt_tail)
    if text is None:
        return None
    try:
        return await compiler.check_async(text)
    except InvalidGrammar as error:
        raise ValueError(f"{together}: {error}") from error


def _any_of(functions: Sequence[Function], use: ToolUse) -> str:
    """A grammar of all schemas, so that many tools are one check: only checked schemas are written into a dialect."""
    rules = ""
    for number, (function, position) in enumerate(zip(functions, use.positions, strict=True)):
        try:
            rules += f"f{number}" + lark_of(GrammarSpec("json", function.schema)).removeprefix("start")
        except InvalidGrammar as error:
            raise _refused(position, error) from error
    return f"start: {' | '.join(f'f{number}' for number in range(len(functions)))}\n{rules}"


def _text(answer_format: AnswerFormat, use: ToolUse, content: str | None, prompt_tail: str) -> str | None:
    if content is None or use.forced:
        return answer_format.grammar(use, prompt_tail=prompt_tail)
    return answer_format.around_content(content, use, prompt_tail=prompt_tail)


async def _blamed(functions: Sequence[Function], use: ToolUse, compiler: GrammarCompiler) -> ValueError | None:
    """What to say of the tool whose schema cannot be followed by itself, if it is found in time."""
    deadline = time.monotonic() + _BLAME_SECONDS
    for function, position in zip(functions, use.positions, strict=True):
        try:
            await compiler.compile_async(GrammarSpec("json", function.schema))
        except InvalidGrammar as error:
            return _refused(position, error)
        if time.monotonic() > deadline:
            break
    return None


def _refused(position: int, error: InvalidGrammar) -> ValueError:
    return ValueError(f"tools[{position}].function.parameters cannot be followed: {error}")
