"""One HTTP request's sequences: what of them goes to the core."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from engine.io_processor import InputOutputProcessor
from engine.messages import AddRequest, ModelInfo, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.frontend import Frontend
from server.generation import Generation
from server.metrics import Metrics
from server.protocol.completions import CompletionRequest
from server.rendering.completions import CompletionRenderer
from server.streams import Hub


class Core:
    """Answers every request with one text."""

    def __init__(self, token_ids: list[int]) -> None:
        self.added: list[AddRequest] = []
        self.hub: Hub
        self._token_ids = token_ids

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        self.added += requests

    def abort(self, request_ids: Sequence[int]) -> None:
        pass

    def answer(self) -> None:
        outputs = [RequestOutput(each.request_id, self._token_ids, True, "max_tokens") for each in self.added]
        self.hub.receive(StepOutputs(outputs))


@pytest.mark.parametrize("seed", [None, 7])
async def test_stop_strings_cut_every_choice_and_stay_in_the_front_end(seed: int | None) -> None:
    tokenizer = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
    core = Core(tokenizer.encode("Hello there", add_special_tokens=False))
    hub = core.hub = Hub(core, Metrics("1"))
    info = ModelInfo("", "", "", "", 0, tokenizer.vocab_size, 100, [], 16, 10)
    frontend = cast(Frontend, SimpleNamespace(hub=hub, processor=InputOutputProcessor(tokenizer, None, info)))
    params = SamplingParams(stop_strings=[" there"], seed=seed)
    generation = Generation(frontend, [AddRequest(0, [5], params)], 3, 0.0)

    async def receive() -> Any:
        core.answer()
        await asyncio.Event().wait()

    renderer = CompletionRenderer(CompletionRequest(model="m", prompt="x"), tokenizer, "f", [""] * 3)
    response = await generation.respond(Request({"type": "http"}, receive), renderer, stream=False)
    assert bytes(response.body).count(b'"text":"Hello"') == 3
    assert [each.sampling_params.stop_strings for each in core.added] == [None] * 3
    assert [each.sampling_params.seed for each in core.added] == [None if seed is None else seed + i for i in range(3)]
