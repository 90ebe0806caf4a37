"""`tool_grammar`: the checked grammar that a request's tools and choice come to. Called by `prepare_chat`."""

from engine.structured.compile import GrammarCompiler
from engine.structured.spec import GrammarSpec, InvalidGrammar
from server.answers.answer_format import AnswerFormat
from server.answers.argument_grammar import allowed_functions, enforced_functions
from server.protocol.tools import ToolUse


def tool_grammar(
    answer_format: AnswerFormat, use: ToolUse, content: str | None, *, prompt_tail: str, compiler: GrammarCompiler
) -> str | None:
    """The text for `SamplingParams.grammar`; None where nothing is promised. Call it in a thread.

    `content` is the grammar of what the model says where it makes no call; None: it says what it likes. Raises
    `ValueError`, one sentence: it names the tool whose schema cannot be followed.
    """
    functions = enforced_functions(use) if content is None else allowed_functions(use)
    if functions is None:
        return None
    for function, position in zip(functions, use.positions, strict=True):
        try:
            compiler.compile(GrammarSpec("json", function.schema))
        except InvalidGrammar as error:
            raise ValueError(f"tools[{position}].function.parameters cannot be followed: {error}") from error
    if content is None or use.forced:
        text = answer_format.grammar(use, prompt_tail=prompt_tail)
    else:
        text = answer_format.around_content(content, use, prompt_tail=prompt_tail)
    if text is None:
        return None
    try:
        return compiler.check(text)
    except InvalidGrammar as error:
        raise ValueError(f"the schemas of tools cannot be followed together: {error}") from error
