"""Turns the body of a request into sequences for the engine, for every endpoint that generates.

The steps, in this order: `accept` reads and validates the body and refuses requests that cannot be served now; the
grammar of the response format is compiled; the chat is rendered, tokenised and checked in a thread; the grammar of the
tool calls is compiled; `new_sequences` creates the messages for the core. `prepare_chat` does all steps but the first
and the last for chats, and `chat_sequences` the last; `server.routes.completions` does them for its prompts.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.config.server import ServerConfig
from engine.sampling_params import SamplingParams
from engine.text.io_processor import CheckedPrompt, InputOutputProcessor, InvalidRequest, NewSequence
from engine.text.process_watch import ProcessWatch
from engine.text.structured.compiler import GrammarChecks
from engine.text.structured.spec import CheckUnavailable, GrammarKind, GrammarSpec, InvalidGrammar
from server.access_log import facts_of
from server.error_answers import refusal
from server.errors import BadRequest, BodyTooLarge, NotReady, RequestTimeout, UnsupportedMediaType
from server.frontend import Frontend, ServedModel
from server.ignored import ignore
from server.limits.admission import counted_refusals
from server.limits.jobs import MANY_OBJECTS, OwnerJobs
from server.limits.owners import Owner, is_loopback
from server.middleware import owner_of
from server.models import Models
from server.parsing.answer_format import AnswerFormat, tool_grammar
from server.parsing.parser import AnswerParser
from server.schemas.body import JSON, Model, RequestModel, num_containers, parse_object, validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.chat_tools import CustomTool, TextGrammar, ToolUse
from server.schemas.generation import (
    INT31,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
)
from server.schemas.messages import MessagesRequest
from server.schemas.pooling import PoolingFields
from server.streaming.resumable import ResumableStreams
from server.streaming.sse import while_connected

MAX_SEQUENCES = 2048
"""Most sequences that one request may run."""

_QUICKLY_PARSED_BYTES = 32 * 2**10
"""Larger bodies are parsed in a thread: parsing them may take longer than a stream may wait for its next chunk."""

MAX_TABLE_ENTRIES = 2**17
"""Most entries of logit biases, stop tokens and bad words in all choices of one request together: 128 times 1024."""

_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older fields that set the form of the answer, with the kind of grammar of each."""

_CURLS_DEFAULT = "application/x-www-form-urlencoded"

_MAX_SHOWN = 60
"""Most characters of a header that an error message shows."""

MANY_PARTS = 256
"""Chats of more messages and tool calls have few threads of their own: each that is rendered takes the interpreter's
lock in turns with the event loop."""

_TAIL_CHARACTERS = 256
"""Length of the prompt's suffix that is searched for whether the template has opened the reasoning."""

Result = TypeVar("Result")
Accepted = TypeVar("Accepted", bound=SamplingFields | MessagesRequest | PoolingFields)


def resumed(http: Request) -> Response | None:
    """Return the rest of a stream that the client has received in part; None for a new request. Raises `BadRequest`.

    The body, a copy of the one that began the stream, is not read.
    """
    last_event_id = http.headers.get("last-event-id")
    if last_event_id is None:
        return None
    return Models.of(http.app).shared.streams.resume(last_event_id, owner_of(http.scope), http.scope.get("state"))


def holder_of_stream(http: Request, request: SamplingFields) -> ResumableStreams | None:
    """Return the store of resumable streams if the request asks for a resumable stream, else None."""
    options = request.stream_options
    asks = (options is not None and options.resumable) or http.headers.get("x-kaon-resumable", "").lower() == "true"
    return Models.of(http.app).shared.streams if asks else None


@asynccontextmanager
async def accept(http: Request, model: type[Accepted]) -> AsyncIterator[tuple[Accepted, Frontend, Owner]]:
    """Yield the validated body, the front end and the owner of a request, for all work before `Generation.respond`.

    Raises `ApiError` if the body, the model's name or the server's state does not allow the request, or its timeout
    passes within the context. Refusals within the context are counted.
    """
    began = asyncio.get_running_loop().time()
    models, owner = Models.of(http.app), owner_of(http.scope)
    with counted_refusals(models.shared.metrics):
        async with (
            reading(http, model, models.config.server_config) as request,
            while_connected(http.receive),
            _until_timeout(began, request.timeout, models.config.server_config.request_timeout),
            models.use(request.model, owner) as frontend,
        ):
            if not isinstance(request, PoolingFields):
                frontend.check_generates()
            facts_of(http.scope).model = request.model
            yield request, frontend, owner
            drop_input(request)


@asynccontextmanager
async def _until_timeout(began: float, *timeouts: float | None) -> AsyncIterator[None]:
    """Cancel the block and raise `RequestTimeout` when the shortest of `timeouts` has passed since `began`."""
    seconds = min((each for each in timeouts if each is not None), default=math.inf)
    limit = asyncio.timeout_at(None if seconds == math.inf else began + seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RequestTimeout.after(seconds) from error


def drop_input(request: RequestModel) -> None:
    """Empty the list `input_field`, once the prompt has been made: each full garbage collection visits its objects."""
    if request.input_field is not None:
        getattr(request, request.input_field).clear()


async def read_request(request: Request, model: type[Model], limits: ServerConfig) -> Model:
    """Read and validate the body. Raises `BadRequest`, `BodyTooLarge`, `UnsupportedMediaType`, `TooManyJobs`."""
    async with reading(request, model, limits) as read:
        return read


@asynccontextmanager
async def reading(request: Request, model: type[Model], limits: ServerConfig) -> AsyncIterator[Model]:
    """As `read_request`, for a request that is used only within the context: few that hold many objects exist at a
    time."""
    _check_media_type(request)
    _check_encoding(request.headers.get("content-encoding"))
    models = Models.of(request.app)
    max_bytes = models.max_request_bytes_once_loaded
    body = await read_body(request, max_bytes)

    def parse() -> Model:
        return validate(parse_object(body, max_bytes), model, allow_unknown=limits.allow_unknown_fields)

    if len(body) <= _QUICKLY_PARSED_BYTES:
        yield parse()
        return
    jobs = models.shared.jobs.of(owner_of(request.scope))
    async with jobs.objects(body) as free:
        read, has_few = await jobs.body(lambda: (parse(), num_containers(body) <= MANY_OBJECTS))
        if has_few:
            free()
        yield read


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body, at most `max_bytes`. Raises `BodyTooLarge`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        _refuse_size(f"has {declared} bytes", max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            _refuse_size("is larger", max_bytes)
    return bytes(body)


def _check_media_type(request: Request) -> None:
    """Refuse a media type other than JSON. A body without a media type is parsed as JSON.

    curl's default type is accepted too from this machine, but not with an `Origin` header: a page in a browser may
    send that type to any address without a preflight request.
    """
    content_type = request.headers.get("content-type")
    media_type = (content_type or JSON).partition(";")[0].strip().lower()
    if media_type == JSON or (media_type.startswith("application/") and media_type.endswith("+json")):
        return
    is_local = request.client is None or is_loopback(request.client.host)
    if media_type == _CURLS_DEFAULT and is_local and "origin" not in request.headers:
        return
    raise UnsupportedMediaType(
        f"Content-Type is {media_type[:_MAX_SHOWN]}; it must be {JSON} (curl: -H 'Content-Type: {JSON}')"
    )


def _check_encoding(encoding: str | None) -> None:
    """Refuse a compressed body: its decompressed size could be far more than `max_request_bytes`."""
    if encoding and encoding.strip().lower() != "identity":
        raise UnsupportedMediaType(f"Content-Encoding is {encoding[:_MAX_SHOWN]}; send the body uncompressed")


def _refuse_size(what: str, max_bytes: int) -> NoReturn:
    raise BodyTooLarge(f"the request body {what}; this server takes at most {max_bytes} bytes (max_request_bytes)")


def check_request_limits(
    request: SamplingFields,
    frontend: Frontend,
    *,
    num_prompts: int = 1,
    num_choices: int | None = None,
    least_stop_strings: int = 0,
) -> None:
    """Raise `BadRequest` if a value exceeds a limit of the configuration. `num_choices` defaults to `n`;
    `least_stop_strings` are allowed with any configuration."""
    limits = frontend.config.server_config
    most_stop_strings = max(limits.max_stop_strings, least_stop_strings)
    if request.n > limits.max_n:
        raise BadRequest(f"n is {request.n}; it must be at most {limits.max_n} (max_n)", param="n")
    if len(request.stop) > most_stop_strings:
        raise BadRequest(
            f"stop holds {len(request.stop)} strings; it may hold {most_stop_strings} (max_stop_strings)",
            param="stop",
        )
    num_choices = num_choices or request.n
    if num_choices > limits.max_n:
        raise BadRequest(f"best_of is {num_choices}; it must be at most {limits.max_n} (max_n)", param="best_of")
    if num_prompts * num_choices > MAX_SEQUENCES:
        raise BadRequest(
            f"prompt holds {num_prompts} prompts of {num_choices} choices each; a request may have at most "
            f"{MAX_SEQUENCES} choices in all",
            param="prompt",
        )
    _check_tables(request, num_prompts * num_choices)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is set, but only a request with stream true has any", param="stream_options")


def check_repeated(field: str, num_characters: int, num_times: int, frontend: Frontend) -> int:
    """Return how many characters `field` has where it is read `num_times` times: with each prompt of a request.

    Raises `BadRequest` if these are more than the largest body: a short request could stand for gigabytes of tokens.
    """
    total = num_characters * num_times
    if num_times > 1 and total > (most := frontend.max_request_bytes):
        raise BadRequest(
            f"{field} has {num_characters} characters, which are read {num_times} times, with each prompt; these may "
            f"be at most {most} in all (max_request_bytes); shorten it, or send fewer prompts",
            param=field,
        )
    return total


def _check_tables(request: SamplingFields, num_sequences: int) -> None:
    """Raise `BadRequest` if the per-sequence lists of a request have too many entries in all its sequences together.

    A single sequence may have as many as the limits of the fields allow.
    """
    lists: dict[str, Collection[object]] = {
        "logit_bias": request.logit_bias,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.allowed_token_ids or (),
        "bad_words": request.bad_words,
    }
    entries = sum(map(len, lists.values()))
    if num_sequences > 1 and num_sequences * entries > MAX_TABLE_ENTRIES:
        longest = max(lists, key=lambda field: len(lists[field]))
        raise BadRequest(
            f"{longest} and the other lists of {', '.join(lists)} hold {entries} entries, and {num_sequences} choices "
            f"have {num_sequences * entries} in all; a request may have at most {MAX_TABLE_ENTRIES}; ask for fewer "
            "choices, or shorten the lists",
            param=longest,
        )


# -- chats ------------------------------------------------------------------------------------------------------


class PreparedChat(NamedTuple):
    """A chat that is ready for `new_sequences`."""

    prompt: CheckedPrompt
    grammar: str | None
    visible_token_ids: frozenset[int]
    """Special tokens that the parsers search for, so that the detokenizer must not drop them."""
    new_parser: Callable[[], AnswerParser | None]
    """Creates the parser of one choice; returns None if all output text is content."""


async def prepare_chat(
    request: ChatCompletionRequest, frontend: Frontend, owner: Owner, free_texts: Mapping[str, str] | None = None
) -> PreparedChat:
    """Render, tokenise and check a chat. Raises `BadRequest`, `NotReady` and `Overloaded`.

    `free_texts` as in `ToolUse`, by default those of the request's custom tools. The work runs in threads, shared
    fairly among owners, so that streams and other owners' requests continue.
    """
    model, jobs = frontend.loaded, frontend.jobs.of(owner)
    grammars = GrammarChecks(model.grammars, jobs.text, jobs.grammar)
    if free_texts is None:
        free_texts = await compile_text_forms(_text_forms(request), frontend, owner)
    try:
        use = ToolUse.of(request.tools, request.tool_choice, request.parallel_tool_calls, free_texts)
    except ValueError as error:
        raise BadRequest(str(error), param="tool_choice") from error
    grammar = await compile_response_grammar(request, frontend, owner)
    num_parts = sum(1 + len(message.tool_calls or ()) for message in request.messages)
    prompt, tail = await in_thread(
        jobs,
        request.chat_template,
        lambda watch: _check_chat(request, model, frontend, watch),
        is_large=num_parts > MANY_PARTS,
    )
    grammar = await _grammar_with_tools(use, grammar, tail, model.answer_format, grammars)
    answer_format = model.answer_format
    if (limit := request.reasoning_limit) is not None:
        try:
            budget = answer_format.reasoning_budget(limit, prompt_tail=tail)
            prompt = prompt._replace(params=msgspec.structs.replace(prompt.params, reasoning_budget=budget))
        except LookupError as error:
            ignore(f"thinking budget ({error})")
    if not request.ignore_eos and (stops := answer_format.stop_token_ids(use)):
        stops = [*(prompt.params.stop_token_ids or ()), *stops]
        prompt = prompt._replace(params=msgspec.structs.replace(prompt.params, stop_token_ids=stops))
    return PreparedChat(
        prompt,
        grammar,
        answer_format.visible_token_ids(use),
        lambda: answer_format.parser(use, prompt_tail=tail),
    )


async def in_thread(
    jobs: OwnerJobs, template: str | None, work: Callable[[ProcessWatch], Result], *, is_large: bool = False
) -> Result:
    """Run `work`, which renders a chat, in a thread. `template` is the chat template in the request, if any;
    `is_large` as in `OwnerJobs.text`.

    If the caller is cancelled, the process that renders the request's template ends: other clients may need its slot.
    """
    watch = ProcessWatch()
    if template is None:
        return await jobs.text(lambda: work(watch), is_large=is_large)
    try:
        return await jobs.template(lambda: work(watch))
    except asyncio.CancelledError:
        watch.is_abandoned = True
        watch.end()
        raise


def _check_chat(
    request: ChatCompletionRequest, model: ServedModel, frontend: Frontend, watch: ProcessWatch
) -> tuple[CheckedPrompt, str]:
    """Return the tokenised prompt, and the last characters of its text."""
    processor = model.processor
    try:
        if request.truncate_prompt_tokens is None:
            # Stored items that the request refers to may be much longer than the largest body.
            processor.check_length(sum(len(message.text or "") for message in request.messages))
        text = render_prompt(request, model, frontend, watch)
        max_tokens = request.token_limit or processor.defaults.max_new_tokens or INT31
        params = sampling_params(request, max_tokens, request.alternatives, request.prompt_logprobs, processor)
        kept = num_kept_tokens(request, request.token_limit or 1, processor)
        token_ids = processor.tokenize(text, request.add_special_tokens, kept)
        prompt = processor.check(token_ids, params, clip_max_tokens=request.token_limit is None)
    except InvalidRequest as error:
        raise _with_chat_field_names(error, request) from error
    return prompt, text[-_TAIL_CHARACTERS:]


def render_prompt(
    request: ChatCompletionRequest, model: ServedModel, frontend: Frontend, watch: ProcessWatch | None = None
) -> str:
    """Render the text of the prompt; call it in a thread. Raises `InvalidRequest` and `BadRequest`.

    `watch` ends the process that renders a template of the request."""
    tools = [tool.for_template() for tool in request.tools] if request.tool_choice != "none" else []
    messages = _with_tool_names([message.for_template() for message in request.messages])
    begin_turn = request.add_generation_prompt and not request.continue_final_message
    processor = model.processor
    variables = {**frontend.config.server_config.default_chat_template_kwargs, **request.template_variables}
    if request.chat_template is None:
        text = processor.render_chat(messages, tools or None, begin_turn, **variables)
    elif frontend.config.server_config.trust_request_chat_template:
        text = processor.render_chat_with(request.chat_template, messages, tools or None, begin_turn, variables, watch)
    else:
        raise BadRequest(
            "chat_template is set, but this server takes no templates from requests; leave it out, or start it "
            "with --trust-request-chat-template",
            param="chat_template",
        )
    if not request.continue_final_message:
        return text
    # Templates may strip a message's text, and close the turn after it. The prompt must end with the unchanged text.
    continued = request.messages[-1].text or ""
    final = continued.strip()
    begin = last_index(text, final)
    if begin < 0:
        raise InvalidRequest(
            "continue_final_message is true, but the model's chat template does not show the last message's content "
            "as it is; leave continue_final_message out",
            "continue_final_message",
        )
    return text[:begin] + final + continued[len(continued.rstrip()) :]


def _with_tool_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Name the function in each result of a call, which clients identify by the call's id alone. FunctionGemma's
    template refuses results without a name, and others show it."""
    names: dict[str, str] = {}
    for message in messages:
        names.update((call["id"], call["function"]["name"]) for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def last_index(text: str, part: str) -> int:
    """Return `text.rfind(part)` in linear time. Python's search from the end may compare all of `part` at each
    index."""
    found = text[::-1].find(part[::-1])
    return found if found < 0 else len(text) - found - len(part)


def _with_chat_field_names(error: InvalidRequest, request: ChatCompletionRequest) -> BadRequest:
    """Convert `error`, with the names that the fields have in a chat request."""
    if error.param == "prompt":
        return refusal(error, f"messages are not accepted: their {error}", "messages")
    if error.param == "max_tokens" and request.max_completion_tokens is not None:
        renamed = str(error).replace("max_tokens", "max_completion_tokens")
        return refusal(error, renamed, "max_completion_tokens")
    return refusal(error)


# -- grammars ---------------------------------------------------------------------------------------------------


async def compile_response_grammar(request: SamplingFields, frontend: Frontend, owner: Owner) -> str | None:
    """Compile the grammar of the response format that a request sets; None if it sets none.

    Raises `BadRequest`, `NotReady` and `Overloaded`.
    """
    forms = dict(_forms(request))
    if not forms:
        return None
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise BadRequest(f"{first} and {second} are both set; an answer has one form, so send one", param=second)
    [(field, spec)] = forms.items()
    return await compile_grammar(field, spec, frontend, owner)


async def compile_grammar(field: str, spec: GrammarSpec, frontend: Frontend, owner: Owner) -> str:
    """Compile the grammar in `field` to Lark text. Raises `BadRequest`, `NotReady` and `Overloaded`."""
    jobs = frontend.jobs.of(owner)
    try:
        return await GrammarChecks(frontend.loaded.grammars, jobs.text, jobs.grammar).compile(spec)
    except InvalidGrammar as error:
        raise BadRequest(f"{field} is refused: {error}", param=field) from error
    except CheckUnavailable as error:
        raise NotReady(f"{field} cannot be checked now: {error}", retry_seconds=error.retry_seconds) from error


class TextForm(NamedTuple):
    """The grammar that the input of a custom tool must match."""

    name: str
    """Name of the tool, as the model sees it."""
    grammar: TextGrammar
    field: str
    """Path of the form in the request."""
    definition_field: str
    """Path of the grammar's text in the request."""


def _text_forms(request: ChatCompletionRequest) -> Iterator[TextForm]:
    for index, tool in enumerate(request.tools):
        if isinstance(tool, CustomTool) and tool.grammar is not None:
            field = f"tools[{index}].custom.format"
            yield TextForm(tool.custom.name, tool.grammar, field, f"{field}.grammar.definition")


async def compile_text_forms(forms: Iterable[TextForm], frontend: Frontend, owner: Owner) -> dict[str, str]:
    """Compile the Lark grammars that constrain the calls of custom tools, by the tool's name.

    A grammar that the model's dialect cannot enforce is reported as ignored: the prompt shows it, but nothing more.
    Raises `BadRequest`, also for an invalid regular expression, which every dialect puts into the tool's parameters.
    """
    followed: dict[str, str] = {}
    for form in forms:
        is_lark = form.grammar.syntax == "lark"
        spec = GrammarSpec("grammar" if is_lark else "regex", form.grammar.definition)
        lark = await compile_grammar(form.definition_field, spec, frontend, owner)
        if is_lark:
            answer_format = frontend.loaded.answer_format
            reason = await frontend.jobs.of(owner).text(partial(answer_format.refuses_text, lark))
            if reason is None:
                followed[form.name] = lark
            else:
                ignore(f"{form.field} (lark: {reason})")
    return followed


def _forms(request: SamplingFields) -> Iterator[tuple[str, GrammarSpec]]:
    """Yield the fields of `request` that set the form of its answers, each with its grammar."""
    response_format: ResponseFormat | None = getattr(request, "response_format", None)
    if isinstance(response_format, JsonObjectFormat):
        yield "response_format", GrammarSpec("json_object")
    elif isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        spec = GrammarSpec("json_object") if schema is None else GrammarSpec("json", schema)
        yield "response_format.json_schema.schema", spec
    if request.structured_outputs is not None:
        for name, value in request.structured_outputs.forms.items():
            kind: GrammarKind = name  # type: ignore[assignment]  # the fields are named for the kinds
            yield f"structured_outputs.{name}", GrammarSpec(kind, value)
    for field, kind in _GUIDED.items():
        value = getattr(request, field)
        if value is not None:
            yield field, GrammarSpec(kind, value)


async def _grammar_with_tools(
    use: ToolUse, content: str | None, prompt_tail: str, answer_format: AnswerFormat, grammars: GrammarChecks
) -> str | None:
    """Compile the grammar of the whole answer: tool calls according to `use`, and `content` outside of calls."""
    try:
        return await tool_grammar(answer_format, use, content, prompt_tail=prompt_tail, grammars=grammars)
    except CheckUnavailable as error:
        message = f"the grammar of tools or response_format cannot be checked now: {error}"
        raise NotReady(message, retry_seconds=error.retry_seconds) from error
    except InvalidRequest as error:
        raise BadRequest(str(error), param=error.param) from error
    except ValueError as error:
        raise BadRequest(str(error), param="tools" if use.tools else "response_format") from error


# -- sequences --------------------------------------------------------------------------------------------------


def num_kept_tokens(request: SamplingFields, max_tokens: int, processor: InputOutputProcessor) -> int | None:
    """Return to how many of its last tokens the prompt is truncated for an answer of `max_tokens`; None: not at
    all."""
    if request.truncate_prompt_tokens == -1:
        return processor.longest_prompt(max_tokens)
    return request.truncate_prompt_tokens


def sampling_params(
    request: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    processor: InputOutputProcessor,
    further_stop_token_ids: list[int] | None = None,
) -> SamplingParams:
    """Create the engine's parameters, without a grammar. Raises `BadRequest` and `InvalidRequest`.

    `processor` supplies the defaults of fields that the request does not set, and tokenises `bad_words`.
    """
    defaults = processor.defaults
    top_p = defaults.top_p if request.top_p is None else request.top_p
    top_k = defaults.top_k if request.top_k is None else request.top_k
    if request.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {request.min_tokens}; it must be at most max_tokens, {max_tokens}", param="min_tokens"
        )
    return SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        stop_strings=request.stop or None,
        top_p=top_p or 1.0,
        top_k=top_k if top_p else 1,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty or defaults.repetition_penalty,
        logit_bias={_token_id(key): bias for key, bias in request.logit_bias.items()} or None,
        seed=request.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=request.min_tokens,
        stop_token_ids=[*request.stop_token_ids, *(further_stop_token_ids or ())] or None,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=processor.tokenize_words(request.bad_words) or None,
    )


def new_sequences(
    request: SamplingFields,
    prompt: CheckedPrompt,
    grammar: str | None,
    frontend: Frontend,
    owner: Owner,
    arrival_time: float,
    *,
    num_choices: int = 1,
    visible_token_ids: frozenset[int] = frozenset(),
) -> list[NewSequence]:
    """Create the sequences of one prompt of a request, one per choice."""
    return frontend.loaded.processor.new_sequences(
        prompt,
        frontend.hub.new_ids(num_choices),
        grammar=grammar,
        cache_salt=prefix_salt(request.cache_salt, None if frontend.shares_prefix_cache else owner.prefix_domain),
        owner=owner.party,
        weight=owner.weight,
        priority=request.priority,
        adapter=frontend.adapters.number_of(request.model),
        arrival_time=arrival_time,
        visible_token_ids=visible_token_ids,
    )


def chat_sequences(
    request: SamplingFields, chat: PreparedChat, frontend: Frontend, owner: Owner, arrival_time: float
) -> list[NewSequence]:
    """As `new_sequences`, for the `n` choices of a chat."""
    prompt, grammar, visible, _ = chat
    return new_sequences(
        request, prompt, grammar, frontend, owner, arrival_time, num_choices=request.n, visible_token_ids=visible
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise BadRequest(f"logit_bias has the key {key[:40]!r}; keys must be token ids in decimal", param="logit_bias")
    return int(key)


def prefix_salt(given: str | None, domain: str | None) -> int | None:
    """Return the 64-bit initial value of the chain of prefix hashes, from the request's salt and
    `Owner.prefix_domain`; None if both are None.

    Requests with different salts never share blocks, so that neither usage nor timing reveals others' prompts.
    """
    if given is None and domain is None:
        return None
    # A domain contains no NUL, so different pairs always give different texts.
    text = given if domain is None else f"{domain}\0{'' if given is None else '+' + given}"
    return int.from_bytes(hashlib.blake2b((text or "").encode(), digest_size=8).digest())
