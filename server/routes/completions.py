"""`POST /v1/completions`."""

import time

from fastapi import APIRouter, Request, Response

from server import frontend as frontends
from server.completion_preparation import prepare_completion
from server.generation import Generation
from server.limits import check_limits
from server.middleware.keys import owner_of
from server.openapi import generates
from server.parsing import read_request
from server.protocol.completions import Completion, CompletionRequest
from server.rendering.completions import CompletionRenderer

router = APIRouter()


@router.post("/v1/completions", **generates(CompletionRequest, Completion))
async def create_completion(http: Request) -> Response:
    """Continue one or several prompts."""
    arrival_time = time.monotonic()
    frontend, owner = frontends.of(http), owner_of(http)
    with frontend.admission.arriving():
        request = await read_request(http, CompletionRequest, frontend.config.server_config)
        processor = frontend.processor
        frontend.check_model(request.model)
        check_limits(request, len(request.prompt), frontend)
        frontend.admission.check(owner, len(request.prompt) * request.sequences_per_prompt)
        prepared = await prepare_completion(request, frontend)
        shown = [prompt.shown for prompt in prepared]
        renderer = CompletionRenderer(request, processor.tokenizer, frontend.fingerprint, shown)
        generation = Generation(
            frontend,
            [prompt.request for prompt in prepared],
            request.n,
            arrival_time,
            best_of=request.best_of,
            owner=owner,
            timeout=request.timeout,
        )
    return await generation.respond(http, renderer, stream=request.stream)
