"""`POST /v1/completions`."""

import asyncio
import time

from fastapi import APIRouter, Request, Response

from engine.io_processor import InputOutputProcessor
from engine.messages import AddRequest
from server import frontend as frontends
from server.errors import BadRequest
from server.generation import Generation, check_limits
from server.openapi import generates
from server.parsing import read_request
from server.protocol.completions import Completion, CompletionRequest, Prompt
from server.rendering.completions import CompletionRenderer

router = APIRouter()

_LONG_CHARACTERS = 4096
"""Text above this is tokenised in a thread, so that the streams of others go on meanwhile."""


@router.post("/v1/completions", **generates(CompletionRequest, Completion))
async def create_completion(http: Request) -> Response:
    """Continue one or several prompts."""
    arrival_time = time.monotonic()
    frontend = frontends.of(http)
    request = await read_request(http, CompletionRequest, frontend.config.server_config)
    processor = frontend.processor
    frontend.check_model(request.model)
    check_limits(request, len(request.prompt), frontend)
    if request.best_of not in (None, request.n):
        raise BadRequest(f"best_of is {request.best_of}; it must equal n, {request.n}", param="best_of")
    if request.echo and request.logprobs is not None:
        raise BadRequest("logprobs is set with echo, but prompts have none here; leave one out", param="logprobs")
    if sum(len(prompt) for prompt in request.prompt) > _LONG_CHARACTERS:
        prompts = await asyncio.to_thread(_preprocess, request, processor)
    else:
        prompts = _preprocess(request, processor)
    echoes = [_echo(prompt, request, processor) for prompt in request.prompt for _ in range(request.n)]
    renderer = CompletionRenderer(request, processor.tokenizer, frontend.fingerprint, echoes)
    generation = Generation(frontend, prompts, request.n, arrival_time)
    return await generation.respond(http, renderer, stream=request.stream)


def _preprocess(request: CompletionRequest, processor: InputOutputProcessor) -> list[AddRequest]:
    """One engine request a prompt, checked against the model's limits."""
    params = request.sampling_params(request.max_tokens, request.logprobs)
    return [
        processor.preprocess(
            processor.tokenize(prompt, request.add_special_tokens) if isinstance(prompt, str) else prompt,
            params,
            request_id=0,
            cache_salt=request.salt_key,
            clip_max_tokens="max_tokens" not in request.model_fields_set,
        )
        for prompt in request.prompt
    ]


def _echo(prompt: Prompt, request: CompletionRequest, processor: InputOutputProcessor) -> str:
    """What the text of a completion of `prompt` begins with."""
    if not request.echo:
        return ""
    return prompt if isinstance(prompt, str) else processor.tokenizer.decode(prompt, request.skip_special_tokens)
