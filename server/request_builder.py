"""`prepare_chat`: from a validated chat request to the engine's, and to what takes its answers apart.

Called by the routes of chat completions and responses.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import NamedTuple, TypeVar

import msgspec

from engine.messages import AddRequest
from engine.text.io_processor import InvalidRequest
from engine.text.structured.spec import CheckUnavailable, GrammarKind, GrammarSpec, InvalidGrammar
from server.errors import BadRequest, NotReady, refusal
from server.frontend import Frontend
from server.parsing.answer_format import tool_grammar
from server.parsing.parser import AnswerParser
from server.schemas.chat import ChatCompletionRequest, ToolUse
from server.schemas.generation import INT31, JsonObjectFormat, JsonSchemaFormat, ResponseFormat, SamplingFields

# [structured] `grammar_of`: from the form that a request wants for its answer to the grammar that the engine
# follows.
#
# Called by the preparation of completions and chats.

_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


async def grammar_of(request: SamplingFields, frontend: Frontend) -> str | None:
    """The grammar of a request's answers; None: they are free. Raises `BadRequest`, with the field, and `NotReady`."""
    asked = forms(request)
    if not asked:
        return None
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise BadRequest(f"{first} and {second} are both set; an answer has one form, so send one", param=second)
    [(field, spec)] = asked.items()
    try:
        return await frontend.grammars.compile_async(spec)
    except InvalidGrammar as error:
        raise refused(field, error) from error
    except CheckUnavailable as error:
        raise NotReady(f"{field} cannot be checked now: {error}") from error


def refused(field: str, error: InvalidGrammar) -> BadRequest:
    """The answer to a request whose `field` holds a grammar that cannot be followed."""
    return BadRequest(f"{field} is refused: {error}", param=field)


def forms(request: SamplingFields) -> dict[str, GrammarSpec]:
    """What `request` asks of its answers, by field."""
    asked: dict[str, GrammarSpec] = {}
    response_format: ResponseFormat | None = getattr(request, "response_format", None)
    if isinstance(response_format, JsonObjectFormat):
        asked["response_format"] = GrammarSpec("json_object")
    elif isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        spec = GrammarSpec("json_object") if schema is None else GrammarSpec("json", schema)
        asked["response_format.json_schema.schema"] = spec
    if request.structured_outputs is not None:
        for name, value in request.structured_outputs.forms.items():
            kind: GrammarKind = name  # type: ignore[assignment]  # the fields are named for the kinds
            asked[f"structured_outputs.{name}"] = GrammarSpec(kind, value)
    for field, kind in _GUIDED.items():
        value = getattr(request, field)
        if value is not None:
            asked[field] = GrammarSpec(kind, value)
    return asked


_TAIL_CHARACTERS = 256
"""How much of the prompt's end tells whether its template opened the reasoning."""

_UNTRUSTED = ThreadPoolExecutor(max_workers=2, thread_name_prefix="templates")
"""For chats that bring a template: seconds of waiting for those take no thread from the chats of others."""

Result = TypeVar("Result")


class PreparedChat(NamedTuple):
    """A chat that can run."""

    request: AddRequest
    new_parser: Callable[[], AnswerParser | None]
    """Makes one choice's parser; None where all that the model writes is the answer's content."""
    visible_token_ids: frozenset[int]
    """Special tokens that the parsers look for, and the text must show."""


async def prepare_chat(request: ChatCompletionRequest, frontend: Frontend) -> PreparedChat:
    """Render, tokenise and check a chat, in a thread: others' streams go on. Raises `BadRequest` and `NotReady`."""
    try:
        use = ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls)
    except ValueError as error:
        raise BadRequest(str(error), param="tool_choice") from error
    form = await grammar_of(request, frontend)
    prepared, tail = await in_thread(request.chat_template, lambda: _prepare(request, use, frontend))
    grammar = await _grammar(use, form, tail, frontend)
    if grammar is None:
        return prepared
    params = msgspec.structs.replace(prepared.request.sampling_params, grammar=grammar)
    return prepared._replace(request=msgspec.structs.replace(prepared.request, sampling_params=params))


async def in_thread(template: str | None, work: Callable[[], Result]) -> Result:
    """Do the work on a request in a thread; `template` is the one it brings, if any."""
    if template is None:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_UNTRUSTED, copy_context().run, work)


def _prepare(request: ChatCompletionRequest, use: ToolUse, frontend: Frontend) -> tuple[PreparedChat, str]:
    """The chat but for its grammar, and the end of its prompt."""
    processor, answer_format = frontend.processor, frontend.answer_format
    try:
        prompt = render_prompt(request, frontend)
        tail = prompt[-_TAIL_CHARACTERS:]
        max_tokens = request.token_limit or processor.defaults.max_new_tokens or INT31
        params = request.sampling_params(max_tokens, request.alternatives, processor)
        add_request = processor.preprocess(
            processor.tokenize(
                prompt, request.add_special_tokens, request.keep_last(processor, request.token_limit or 1)
            ),
            params,
            request_id=0,
            cache_salt=request.salt_key,
            clip_max_tokens=request.token_limit is None,
            priority=request.priority,
            adapter=frontend.adapter_of(request.model),
        )
    except InvalidRequest as error:
        raise _in_chat_terms(error, request) from error
    prepared = PreparedChat(
        add_request,
        lambda: answer_format.parser(use, prompt_tail=tail),
        answer_format.visible_token_ids(use),
    )
    return prepared, tail


async def _grammar(use: ToolUse, form: str | None, prompt_tail: str, frontend: Frontend) -> str | None:
    """What the whole answer must follow: calls that are promised, and the content's `form` where it is none."""
    try:
        return await tool_grammar(
            frontend.answer_format, use, form, prompt_tail=prompt_tail, compiler=frontend.grammars
        )
    except CheckUnavailable as error:
        raise NotReady(f"the grammar of tools or response_format cannot be checked now: {error}") from error
    except ValueError as error:
        raise BadRequest(str(error), param="tools" if use.tools else "response_format") from error


def render_prompt(request: ChatCompletionRequest, frontend: Frontend) -> str:
    """The prompt's text; call it in a thread. Raises `InvalidRequest` and `BadRequest`."""
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools] if request.tool_choice != "none" else []
    messages = [message.for_template() for message in request.messages]
    begin_turn = request.add_generation_prompt and not request.continue_final_message
    processor, variables = frontend.processor, request.template_variables
    if request.chat_template is None:
        text = processor.render_chat(messages, tools or None, begin_turn, **variables)
    elif frontend.config.server_config.trust_request_chat_template:
        text = processor.render_chat_with(request.chat_template, messages, tools or None, begin_turn, variables)
    else:
        raise BadRequest(
            "chat_template is set, but this server takes no templates from requests; leave it out, or start it "
            "with --trust-request-chat-template",
            param="chat_template",
        )
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
        return refusal(error, f"messages are not accepted: their {error}", "messages")
    if error.param == "max_tokens" and request.max_completion_tokens is not None:
        renamed = str(error).replace("max_tokens", "max_completion_tokens")
        return refusal(error, renamed, "max_completion_tokens")
    return refusal(error)


# [limits] `check_limits`: what this server's configuration lets a request ask for. Called by the routes.

MAX_SEQUENCES = 2048
"""Most sequences one request may fan out to."""


def check_limits(request: SamplingFields, prompts: int, frontend: Frontend) -> None:
    """Raise `BadRequest` for what this server's configuration does not allow."""
    limits = frontend.config.server_config
    if request.n > limits.max_n:
        raise BadRequest(f"n is {request.n}; it must be at most {limits.max_n} (max_n)", param="n")
    if len(request.stop) > limits.max_stop_strings:
        raise BadRequest(
            f"stop holds {len(request.stop)} strings; it may hold {limits.max_stop_strings} (max_stop_strings)",
            param="stop",
        )
    each = request.sequences_per_prompt
    if each > limits.max_n:
        raise BadRequest(f"best_of is {each}; it must be at most {limits.max_n} (max_n)", param="best_of")
    if prompts * each > MAX_SEQUENCES:
        raise BadRequest(
            f"prompt holds {prompts} prompts of {each} choices each; a request may have at most "
            f"{MAX_SEQUENCES} choices in all",
            param="prompt",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is set, but only a request with stream true has any", param="stream_options")
