"""`prepare_completion`: from a validated completion request to the engine's, one a prompt. Called by its route."""

import asyncio
from typing import NamedTuple

import msgspec

from engine.io_processor import InputOutputProcessor, InvalidRequest
from engine.messages import AddRequest
from engine.sampling_params import SamplingParams
from server.frontend import Frontend
from server.protocol.completions import CompletionRequest, Prompt
from server.rendering.completions import ShownPrompt
from server.structured import grammar_of

_LONG_CHARACTERS = 4096
"""Text above this is tokenised in a thread, so that the streams of others go on meanwhile."""


class PreparedPrompt(NamedTuple):
    """A prompt that can run."""

    request: AddRequest
    shown: ShownPrompt


async def prepare_completion(request: CompletionRequest, frontend: Frontend) -> list[PreparedPrompt]:
    """Tokenise and check the prompts. Raises `InvalidRequest` and `BadRequest`."""
    processor = frontend.processor
    grammar = await grammar_of(request, frontend)
    characters = sum(map(len, (*request.prompt, request.suffix or "", *request.bad_words)))
    adapter = frontend.adapter_of(request.model)
    if characters > _LONG_CHARACTERS:
        return await asyncio.to_thread(_prepare, request, grammar, processor, adapter)
    return _prepare(request, grammar, processor, adapter)


def _prepare(
    request: CompletionRequest, grammar: str | None, processor: InputOutputProcessor, adapter: int
) -> list[PreparedPrompt]:
    says_length = "max_tokens" in request.model_fields_set
    max_tokens = request.max_tokens
    if not says_length and processor.defaults.max_new_tokens is not None:
        max_tokens = min(max_tokens, processor.defaults.max_new_tokens)
    params = request.sampling_params(max_tokens, request.alternatives, processor)
    if grammar is not None:
        params = msgspec.structs.replace(params, grammar=grammar)
    if request.suffix:
        params = _with_ends_of_fill_in(params, processor)
    keep_last = request.keep_last(processor, max_tokens)
    prepared = []
    for prompt in request.prompt:
        token_ids = _token_ids(prompt, request, processor, keep_last)
        add_request = processor.preprocess(
            token_ids,
            params,
            request_id=0,
            cache_salt=request.salt_key,
            clip_max_tokens=not says_length,
            priority=request.priority,
            adapter=adapter,
        )
        cut = keep_last is not None and len(token_ids) >= keep_last
        prepared.append(
            PreparedPrompt(add_request, ShownPrompt(token_ids, _echo(prompt, token_ids, request, processor, cut)))
        )
    return prepared


def _token_ids(
    prompt: Prompt, request: CompletionRequest, processor: InputOutputProcessor, keep_last: int | None
) -> list[int]:
    """What the model reads."""
    if request.suffix:
        return _fill_in(prompt, request.suffix, request.add_special_tokens, processor)
    if not isinstance(prompt, str):
        return prompt if keep_last is None else prompt[-keep_last:]
    token_ids = processor.tokenize(prompt, request.add_special_tokens, keep_last)
    if token_ids or prompt:
        return token_ids
    bos = processor.tokenizer.bos_token_id
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
    behind = processor.tokenize(suffix, add_special_tokens=False)
    return processor.fill_in.prompt(prefix, behind, add_special_tokens)


def _with_ends_of_fill_in(params: SamplingParams, processor: InputOutputProcessor) -> SamplingParams:
    """`params` that also stop where the model says that the gap is filled."""
    if processor.fill_in is None or not processor.fill_in.end_token_ids or params.ignore_eos:
        return params
    ends = [*(params.stop_token_ids or ()), *processor.fill_in.end_token_ids]
    return msgspec.structs.replace(params, stop_token_ids=ends)


def _echo(
    prompt: Prompt, token_ids: list[int], request: CompletionRequest, processor: InputOutputProcessor, cut: bool
) -> str:
    """What the text of a completion of `prompt` begins with."""
    if not request.echo:
        return ""
    if isinstance(prompt, str) and not cut:
        return prompt
    shown = prompt if request.suffix and not isinstance(prompt, str) else token_ids
    return processor.tokenizer.decode(shown, request.skip_special_tokens)
