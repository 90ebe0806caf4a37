"""`prepare_chat`: from a validated chat request to the engine's, and to what takes its answers apart.

Called by the routes of chat completions and responses.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from engine.io_processor import InputOutputProcessor, InvalidRequest
from engine.messages import AddRequest
from server.answers.parts import AnswerParser
from server.errors import BadRequest
from server.frontend import Frontend
from server.protocol.chat import ChatCompletionRequest
from server.protocol.common import INT31
from server.protocol.tools import ToolUse

_TAIL_CHARACTERS = 256
"""How much of the prompt's end tells whether its template opened the reasoning."""


class PreparedChat(NamedTuple):
    """A chat that can run."""

    request: AddRequest
    new_parser: Callable[[], AnswerParser | None]
    """Makes one choice's parser; None where all that the model writes is the answer's content."""
    visible_token_ids: frozenset[int]
    """Special tokens that the parsers look for, and the text must show."""


async def prepare_chat(request: ChatCompletionRequest, frontend: Frontend) -> PreparedChat:
    """Render, tokenise and check a chat, in a thread: others' streams go on. Raises `BadRequest`."""
    try:
        use = ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls)
    except ValueError as error:
        raise BadRequest(str(error), param="tool_choice") from error
    return await asyncio.to_thread(_prepare, request, use, frontend)


def _prepare(request: ChatCompletionRequest, use: ToolUse, frontend: Frontend) -> PreparedChat:
    processor, answer_format = frontend.processor, frontend.answer_format
    try:
        prompt = _render(request, processor)
        add_request = processor.preprocess(
            processor.tokenize(prompt, request.add_special_tokens),
            request.sampling_params(request.token_limit or INT31, request.alternatives),
            request_id=0,
            cache_salt=request.salt_key,
            clip_max_tokens=request.token_limit is None,
        )
    except InvalidRequest as error:
        raise _in_chat_terms(error, request) from error
    tail = prompt[-_TAIL_CHARACTERS:]
    return PreparedChat(
        add_request,
        lambda: answer_format.parser(use, prompt_tail=tail),
        answer_format.visible_token_ids,
    )


def _render(request: ChatCompletionRequest, processor: InputOutputProcessor) -> str:
    """The prompt's text."""
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools] if request.tool_choice != "none" else []
    messages = [message.for_template() for message in request.messages]
    begin_turn = request.add_generation_prompt and not request.continue_final_message
    text = processor.render_chat(messages, tools or None, begin_turn, **request.template_variables)
    if not request.continue_final_message:
        return text
    # Templates may strip a message's text; whatever they write behind it ends the turn.
    continued = request.messages[-1].text or ""
    final = continued.strip()
    begin = text.rfind(final)
    if begin < 0:
        raise InvalidRequest(
            "continue_final_message is true, but the model's chat template does not show the last message's content "
            "as it is; leave continue_final_message out",
            "continue_final_message",
        )
    return text[:begin] + final + continued[len(continued.rstrip()) :]


def _in_chat_terms(error: InvalidRequest, request: ChatCompletionRequest) -> BadRequest:
    """`error` with the names that its fields have in this endpoint."""
    if error.param == "prompt":
        return BadRequest(f"messages are not accepted: their {error}", param="messages")
    if error.param == "max_tokens" and request.max_completion_tokens is not None:
        renamed = str(error).replace("max_tokens", "max_completion_tokens")
        return BadRequest(renamed, param="max_completion_tokens")
    return BadRequest(str(error), param=error.param)
