"""`POST /v1/completions`: the route, the preparation of its prompts, the renderer of its answers and their chunks."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from fastapi import Request, Response

from engine.messages import TokenLogprobs
from engine.text.io_processor import CheckedPrompt, InputOutputProcessor, InvalidRequest, NewSequence
from engine.text.request_state import RequestDelta, RequestState
from engine.text.tokenizer import Tokenizer
from server.endpoints import ENDPOINTS, EndpointFamily
from server.limits.jobs import OwnerJobs
from server.request_builder import (
    accept,
    check_repeated,
    check_request_limits,
    compile_response_grammar,
    holder_of_stream,
    new_sequences,
    num_kept_tokens,
    resumed,
    sampling_params,
)
from server.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Prompt
from server.schemas.generation import PromptLogprobs, Usage
from server.streaming.generation import MANY_SEQUENCES, Generation
from server.streaming.logprobs import CompletionLogprobsWriter, prompt_logprobs
from server.streaming.sse import ChunkWriter, Renderer, answer_head, encode, ending, in_slices


class CompletionChunkWriter(ChunkWriter):
    """Encodes the chunks of `/v1/completions`."""

    object = "text_completion"
    plain = b',"logprobs":null,"finish_reason":null}'

    def delta(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Struct | msgspec.Raw | None,
        finish_reason: str | None,
        members: bytes = b"",
    ) -> bytes:
        """Return the event for more output of choice `index`. `members` are further members, each preceded by a
        comma."""
        opening = self._open.get(index)
        if opening is None:
            opening = self._open[index] = self._head + b'{"index":%d,"text":' % index
        if logprobs is None and finish_reason is None and not members:
            return b"".join((opening, encode(text), self._plain_end))
        return b"".join((opening, encode(text), members, ending(logprobs, finish_reason), self._close))


class PromptEcho(NamedTuple):
    """The parts of a prompt that its choices may show."""

    token_ids: list[int]
    echo: str
    """Text at the beginning of each choice."""


class CompletionRenderer(Renderer):
    """Renders `request.n` choices of each of `prompts`."""

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, fingerprint: str, prompts: Sequence[PromptEcho]
    ) -> None:
        self.head = answer_head("cmpl", request.model, fingerprint)
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._logprobs = [
            CompletionLogprobsWriter(tokenizer, request.skip_special_tokens, request.return_tokens_as_token_ids)
            for _ in range(0 if request.logprobs is None else len(prompts) * request.n)
        ]
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._chunks = CompletionChunkWriter(self.head, request.stream_options, num_prompt_tokens)
        needs_members = request.logprobs is not None or request.return_token_ids
        self._text_only = not needs_members and not self._chunks.reports_usage
        self._held: dict[int, list[tuple[int, RequestDelta]]] = {}
        """Deltas by prompt that wait until the prompt's log probabilities, which must precede them, are known."""
        if request.prompt_alternatives is not None:
            self._text_only = False
            self._held = {number: [] for number in range(len(prompts))}

    def opening(self) -> bytes:
        shown = [number for number in range(len(self._prompts)) if number not in self._held]
        return b"".join(self._open_choices(number, []) for number in shown)

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        if self._text_only and delta.stop_reason is None:
            return self._chunks.delta(index, delta.text, None, delta.finish_reason)
        number = index // self._request.n
        held = self._held.get(number)
        if held is None:
            return self._full_chunk(index, delta)
        held.append((index, delta))
        if delta.prompt_logprobs is None:
            return b""
        del self._held[number]
        opening = self._open_choices(number, delta.prompt_logprobs)
        return opening + b"".join(self._full_chunk(*each) for each in held)

    def closing(self, usage: Usage) -> bytes:
        return self._chunks.closing(usage)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> Completion:
        choices = []
        for index, state in enumerate(states):
            number, choice = divmod(index, self._request.n)
            if not choice:
                echoed = self._echoed(number, state.prompt_logprobs or [])
                of_prompt = self._of_prompt(state.prompt_logprobs or [])
            choices.append(self._choice(index, state, echoed, of_prompt))
        return Completion(**self.head._asdict(), choices=choices, usage=usage)

    def _open_choices(self, number: int, positions: list[TokenLogprobs]) -> bytes:
        """Return the events that describe a prompt, one per choice; none if the request asks for no echo."""
        request, prompt = self._request, self._prompts[number]
        members = b""
        if request.prompt_logprobs is not None:
            members += b',"prompt_logprobs":' + encode(in_slices(self._of_prompt(positions)))
        if request.return_token_ids:
            members += b',"prompt_token_ids":%b,"token_ids":[]' % encode(prompt.token_ids)
        if not prompt.echo and not members and (not request.echo or request.logprobs is None):
            return b""
        first, logprobs = number * request.n, encode(in_slices(self._echoed(number, positions)))
        return b"".join(
            self._chunks.delta(index, prompt.echo, msgspec.Raw(logprobs), None, members)
            for index in range(first, first + request.n)
        )

    def _full_chunk(self, index: int, delta: RequestDelta) -> bytes:
        request = self._request
        self._chunks.count(len(delta.token_ids))
        logprobs = None
        if request.logprobs is not None and delta.logprobs:
            logprobs = self._logprobs[index].write(delta.logprobs)
        members = b',"token_ids":' + encode(delta.token_ids) if request.return_token_ids else b""
        if delta.stop_reason is not None:
            members += b',"stop_reason":' + encode(delta.stop_reason)
        return self._chunks.delta(index, delta.text, logprobs, delta.finish_reason, members)

    def _choice(
        self,
        index: int,
        state: RequestState,
        echoed: CompletionLogprobs | None,
        of_prompt: PromptLogprobs | msgspec.UnsetType,
    ) -> CompletionChoice:
        request, prompt = self._request, self._prompts[index // self._request.n]
        logprobs = None
        if request.logprobs is not None:
            logprobs = _joined(echoed, self._logprobs[index].write(state.logprobs or ()))
        choice = CompletionChoice(
            index, prompt.echo + state.text, logprobs, state.finish_reason, prompt_logprobs=of_prompt
        )
        if state.stop_reason is not None:
            choice.stop_reason = state.stop_reason
        if request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = prompt.token_ids, state.token_ids
        return choice

    def _echoed(self, number: int, positions: list[TokenLogprobs]) -> CompletionLogprobs | None:
        """Return the log probabilities of a prompt, which all its choices begin with, if the request asks for echo and
        log probabilities."""
        request, prompt = self._request, self._prompts[number]
        if not request.echo or request.logprobs is None:
            return None
        first, *others = self._logprobs[number * request.n : (number + 1) * request.n]
        for other in others:
            other.begin_after(prompt.echo)
        return first.write_prompt(prompt.echo, prompt.token_ids[0], positions, request.logprobs)

    def _of_prompt(self, positions: list[TokenLogprobs]) -> PromptLogprobs | msgspec.UnsetType:
        count = self._request.prompt_logprobs
        return msgspec.UNSET if count is None else prompt_logprobs(self._tokenizer, positions, count)


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    return CompletionLogprobs(
        *(a + b for a, b in zip(msgspec.structs.astuple(first), msgspec.structs.astuple(second), strict=True))
    )


_LONG_CHARACTERS = 4096
"""Longer texts are tokenised in a thread, so that other streams continue meanwhile."""

_MANY_ENTRIES = 64
"""More biases and bad words are converted in a thread. Each bad word costs as much as a short text, twice."""


async def prepare_prompts(
    request: CompletionRequest,
    processor: InputOutputProcessor,
    jobs: OwnerJobs,
    new: Callable[[CheckedPrompt], list[NewSequence]],
) -> tuple[list[NewSequence], list[PromptEcho]]:
    """Tokenise and check the prompts, and create their sequences by `new`; in a thread if they are long or many, or
    have large tables.

    Raises `InvalidRequest`, `BadRequest` and `Overloaded`.
    """

    def prepare() -> tuple[list[NewSequence], list[PromptEcho]]:
        prompts = _check_prompts(request, processor)
        return [each for prompt, _ in prompts for each in new(prompt)], [echo for _, echo in prompts]

    num_characters = sum(map(len, (*request.prompt, *request.bad_words)))
    num_characters += len(request.suffix or "") * len(request.prompt)
    num_sequences, num_entries = len(request.prompt) * request.num_choices, len(request.logit_bias)
    is_large = num_sequences > MANY_SEQUENCES or num_entries + len(request.bad_words) > _MANY_ENTRIES
    if is_large or num_characters > _LONG_CHARACTERS:
        return await jobs.text(prepare, is_large=is_large)
    return prepare()


def _check_prompts(
    request: CompletionRequest, processor: InputOutputProcessor
) -> list[tuple[CheckedPrompt, PromptEcho]]:
    sets_length = "max_tokens" in request.model_fields_set
    max_tokens = request.max_tokens
    if not sets_length and processor.defaults.max_new_tokens is not None:
        max_tokens = min(max_tokens, processor.defaults.max_new_tokens)
    fill_in_ends = None
    if request.suffix and processor.fill_in is not None and not request.ignore_eos:
        fill_in_ends = processor.fill_in.end_token_ids
    params = sampling_params(
        request, max_tokens, request.alternatives, request.prompt_alternatives, processor, fill_in_ends
    )
    keep_last = num_kept_tokens(request, max_tokens, processor)
    prompts = []
    for prompt in request.prompt:
        token_ids = _token_ids(prompt, request, processor, keep_last)
        checked = processor.check(token_ids, params, clip_max_tokens=not sets_length)
        cut = keep_last is not None and len(token_ids) >= keep_last
        prompts.append((checked, PromptEcho(token_ids, _echo(prompt, token_ids, request, processor, cut))))
    return prompts


def _token_ids(
    prompt: Prompt, request: CompletionRequest, processor: InputOutputProcessor, keep_last: int | None
) -> list[int]:
    """Return the token ids of the prompt as the model computes it."""
    if request.suffix:
        return _fill_in(prompt, request.suffix, request.add_special_tokens, processor)
    if not isinstance(prompt, str):
        return prompt if keep_last is None else prompt[-keep_last:]
    token_ids = processor.tokenize(prompt, request.add_special_tokens, keep_last)
    if token_ids or prompt:
        return token_ids
    bos = processor.bos_token_id
    if bos is None:
        raise InvalidRequest(
            "prompt is empty, and this model has no beginning-of-sequence token to start from; send at least 1 token",
            "prompt",
        )
    return [bos]


def _fill_in(prompt: Prompt, suffix: str, add_special_tokens: bool, processor: InputOutputProcessor) -> list[int]:
    if processor.fill_in is None:
        raise InvalidRequest(
            "suffix is set, but this model's tokenizer has no marks for filling in between prompt and suffix; "
            "leave suffix out",
            "suffix",
        )
    prefix = processor.tokenize(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    suffix_ids = processor.tokenize(suffix, add_special_tokens=False)
    return processor.fill_in.prompt(prefix, suffix_ids, add_special_tokens)


def _echo(
    prompt: Prompt, token_ids: list[int], request: CompletionRequest, processor: InputOutputProcessor, cut: bool
) -> str:
    """Return the text that the choices of `prompt` begin with."""
    if not request.echo:
        return ""
    if isinstance(prompt, str) and not cut:
        return prompt
    shown = prompt if request.suffix and not isinstance(prompt, str) else token_ids
    return processor.tokenizer.decode(shown, request.skip_special_tokens)


endpoints = ENDPOINTS.register("completions")(EndpointFamily())

_EXAMPLE = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}


@endpoints.post("/v1/completions", Completion, request=CompletionRequest, example=_EXAMPLE, streams=True)
async def create_completion(http: Request) -> Response:
    """Continue one or several prompts."""
    arrival_time = time.monotonic()
    if (rest := resumed(http)) is not None:
        return rest
    async with accept(http, CompletionRequest) as (request, frontend, owner):
        check_request_limits(request, frontend, num_prompts=len(request.prompt), num_choices=request.num_choices)
        check_repeated("suffix", len(request.suffix or ""), len(request.prompt), frontend)
        frontend.admission.precheck(owner, len(request.prompt) * request.num_choices)
        model = frontend.loaded
        grammar = await compile_response_grammar(request, frontend, owner)

        def new(prompt: CheckedPrompt) -> list[NewSequence]:
            return new_sequences(
                request, prompt, grammar, frontend, owner, arrival_time, num_choices=request.num_choices
            )

        sequences, echoes = await prepare_prompts(request, model.processor, frontend.jobs.of(owner), new)
        renderer = CompletionRenderer(request, model.processor.tokenizer, frontend.fingerprint, echoes)
        generation = Generation(
            frontend.hub,
            frontend.config,
            sequences,
            request.n,
            best_of=request.best_of,
            prompt_copies=request.n,
            owner=owner,
            timeout=request.timeout,
        )
    return await generation.respond(http, renderer, stream=request.stream, held_by=holder_of_stream(http, request))
