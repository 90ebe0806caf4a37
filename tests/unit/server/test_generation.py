"""One HTTP request's sequences: the messages to the core."""

import asyncio
import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import pytest
from starlette.requests import Request

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.messages import AddRequest, ModelInfo, RequestOutput, StepOutputs, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.io_processor import InputOutputProcessor, NewSequence
from engine.text.request_state import RequestState
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.errors import BadRequest
from server.limits.admission import Admission, Limits
from server.limits.jobs import Jobs
from server.metrics import Metrics
from server.routes.completions import CompletionRenderer, PromptEcho
from server.schemas.completions import CompletionRequest
from server.schemas.generation import StreamOptions
from server.streaming.generation import Generation
from server.streaming.hub import Hub

TOKENIZER = Tokenizer.from_checkpoint(CHECKPOINT_DIR)


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

    def pause(self, request_ids: Sequence[int]) -> None:
        pass

    def resume(self, request_ids: Sequence[int]) -> None:
        pass

    def answer(self) -> None:
        outputs = [RequestOutput(each.request_id, self._token_ids, True, "max_tokens") for each in self.added]
        self.hub.receive(StepOutputs(outputs))


def generation_of(
    core: Core, params: SamplingParams, n: int, best_of: int | None = None, prompts: int = 1
) -> Generation:
    """A request of `n` choices of each of some prompts of two tokens."""
    metrics = Metrics("1")
    admission = Admission(Limits(), metrics)
    hub = core.hub = Hub(cast(CoreManager, core), metrics, admission, Jobs(admission.accounts).answers)
    info = ModelInfo("", "", "", "", 0, TOKENIZER.vocab_size, 2000, [], 16, 1000)
    processor = InputOutputProcessor(TOKENIZER, None, info)
    sequences = [
        sequence
        for _ in range(prompts)
        for sequence in processor.new_sequences(processor.check([5, 6], params), hub.new_ids(best_of or n))
    ]
    return Generation(hub, Config(), sequences, n, best_of=best_of)


@pytest.mark.parametrize("seed", [None, 7])
async def test_stop_strings_cut_every_choice_and_stay_in_the_front_end(seed: int | None) -> None:
    core = Core(TOKENIZER.encode("Hello there", add_special_tokens=False))
    generation = generation_of(core, SamplingParams(stop_strings=[" there"], seed=seed), 3)

    async def receive() -> Any:
        core.answer()
        await asyncio.Event().wait()

    renderer = CompletionRenderer(
        CompletionRequest(model="m", prompt="x", n=3), TOKENIZER, "f", [PromptEcho([5, 6], "")]
    )
    response = await generation.respond(Request({"type": "http"}, receive), renderer, stream=False)
    assert bytes(response.body).count(b'"text":"Hello"') == 3
    assert [each.sampling_params.stop_strings for each in core.added] == [None] * 3
    assert [each.sampling_params.seed for each in core.added] == [None if seed is None else seed + i for i in range(3)]


class UnequalCore(Core):
    """Answers its requests with one token each, of decreasing probability except for the last, which is the most
    probable."""

    def answer(self) -> None:
        last = len(self.added) - 1
        for place, each in enumerate(self.added):
            logprob = -0.1 if place == last else -1.0 - place
            logprobs = [TokenLogprobs(token_id, logprob) for token_id in self._token_ids]
            read = [] if each.sampling_params.prompt_logprobs is not None else None
            output = RequestOutput(each.request_id, self._token_ids, True, "max_tokens", logprobs=logprobs)
            output.prompt_logprobs = read
            self.hub.receive(StepOutputs([output]))


async def test_the_best_choices_are_answered_and_all_are_counted() -> None:
    core = UnequalCore(TOKENIZER.encode("Hello", add_special_tokens=False))
    generation = generation_of(core, SamplingParams(logprobs=0, prompt_logprobs=1), 2, best_of=4)

    async def receive() -> Any:
        core.answer()
        await asyncio.Event().wait()

    request = CompletionRequest(model="m", prompt="x", n=2, best_of=4, logprobs=0, prompt_logprobs=1)
    renderer = CompletionRenderer(request, TOKENIZER, "f", [PromptEcho([5, 6], "")])
    response = await generation.respond(Request({"type": "http"}, receive), renderer, stream=False)
    answer = json.loads(bytes(response.body))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [-0.1, -1.0]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [[None], [None]]
    assert answer["usage"]["completion_tokens"] == 4 * len(core._token_ids)
    assert [each.sampling_params.prompt_logprobs for each in core.added] == [1, None, None, None]


class CoreWithLogprobs(Core):
    """Reports log probabilities with 20 alternatives: a number of them of its tokens, and of prompts."""

    def __init__(self, num_generated: int, num_prompt: int) -> None:
        super().__init__([5] * max(1, num_generated))
        position = TokenLogprobs(5, -1.0, tuple(range(20)), (-1.0,) * 20)
        self._generated, self._prompt = [position] * num_generated, [position] * num_prompt

    def answer(self, *, finished: bool = True) -> None:
        for each in self.added:
            reason = "max_tokens" if finished else None
            output = RequestOutput(each.request_id, self._token_ids, finished, reason, logprobs=self._generated)
            output.prompt_logprobs = self._prompt
            self.hub.receive(StepOutputs([output]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_generated", "num_prompt"), [(300, 0), (0, 300), (20, 20)])
async def test_many_log_probabilities_are_rendered_in_the_thread_for_large_answers(
    num_generated: int, num_prompt: int, stream: bool
) -> None:
    core = CoreWithLogprobs(num_generated, num_prompt)
    generation = generation_of(core, SamplingParams(logprobs=20, prompt_logprobs=20), 1)
    request = CompletionRequest(model="m", prompt="x", logprobs=20, prompt_logprobs=20, stream=stream)
    threads = set()

    class Watched(CompletionRenderer):
        def whole(self, *given: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super().whole(*given)

        def chunk(self, *given: Any) -> bytes:
            threads.add(threading.current_thread().name)
            return super().chunk(*given)

    renderer = Watched(request, TOKENIZER, "f", [PromptEcho([5, 6], "")])

    async def receive() -> Any:
        core.answer()
        await asyncio.Event().wait()

    if stream:
        events = generation.events(renderer)
        core.answer()
        assert b"".join([event async for event in events])
    else:
        response = await generation.respond(Request({"type": "http"}, receive), renderer, stream=False)
        assert int(response.headers["content-length"]) > 1000
    is_large = num_generated + num_prompt > 100
    assert threads == {"answers_0" if is_large else threading.current_thread().name}


@pytest.mark.parametrize(("num_generated", "is_large"), [(100, False), (300, True)])
async def test_last_events_that_repeat_many_log_probabilities_are_rendered_in_that_thread(
    num_generated: int, is_large: bool
) -> None:
    """For 16,000 tokens of 20 alternatives, they took the event loop 0.22 s."""
    core = CoreWithLogprobs(num_generated, 0)
    generation = generation_of(core, SamplingParams(logprobs=20), 1)
    threads: list[str] = []

    class Watched(CompletionRenderer):
        repeats_logprobs = True

        def chunk(self, *given: Any) -> bytes:
            threads.append(threading.current_thread().name)
            return super().chunk(*given)

    request = CompletionRequest(model="m", prompt="x", logprobs=20, stream=True)
    events = generation.events(Watched(request, TOKENIZER, "f", [PromptEcho([5, 6], "")]))
    core.answer(finished=False)
    assert await anext(events)
    core.hub.receive(StepOutputs([RequestOutput(core.added[0].request_id, [5], True, "max_tokens")]))
    assert b"".join([event async for event in events])
    assert threads[1] == ("answers_0" if is_large else threading.current_thread().name)


@pytest.mark.parametrize(
    ("num_tokens", "prompts", "copies", "most"),
    [
        (199_000, 1, 1, None),
        (200_000, 1, 1, r"4194304;"),
        (1000, 49, 1, None),
        (1000, 50, 1, r"1048576 \(4194304 for one"),
        (1000, 1, 49, None),
        (1000, 1, 50, r"1048576 \(4194304 for one"),
        (1000, 7, 7, None),
        (1000, 5, 10, r"1048576 \(4194304 for one"),
    ],
)
@pytest.mark.parametrize("others", [0, 3])
def test_very_many_log_probabilities_of_prompts_are_refused(
    num_tokens: int, prompts: int, copies: int, others: int, most: str | None
) -> None:
    """An answer that has those of one prompt once may have more, because its client cannot ask for less at a time.
    Choices without a copy count nothing: those of chats, and those that `best_of` generates in addition."""
    prompt = AddRequest(0, [5] * num_tokens, SamplingParams(prompt_logprobs=20))
    choice = NewSequence(prompt, RequestState(0, [5], SamplingParams(), TOKENIZER))
    refused = f"{num_tokens * 21 * prompts * copies} log probabilities to report.* at most {most}"
    sequences = [choice] * (prompts * (copies + others))
    with nullcontext() if most is None else pytest.raises(BadRequest, match=refused):
        Generation(cast(Hub, None), Config(), sequences, copies, best_of=copies + others or None, prompt_copies=copies)


def several(core: Core, prompts: int, **fields: Any) -> tuple[Generation, CompletionRenderer]:
    """A stream of two choices of each prompt."""
    generation = generation_of(core, SamplingParams(), 2, prompts=prompts)
    request = CompletionRequest(model="m", prompt=["x"] * prompts, n=2, stream=True, **fields)
    return generation, CompletionRenderer(request, TOKENIZER, "f", [PromptEcho([5, 6], "")] * prompts)


async def test_a_stream_of_several_prompts_ends_with_the_usage_of_all() -> None:
    core = Core(TOKENIZER.encode("Hello", add_special_tokens=False))
    generation, renderer = several(core, 3, stream_options=StreamOptions(include_usage=True))
    events = generation.events(renderer)
    taken = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    core.answer()
    stream = (await taken + b"".join([event async for event in events])).decode()
    *chunks, last, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert sorted(json.loads(chunk[6:])["choices"][0]["index"] for chunk in chunks) == list(range(6))
    reported = json.loads(last[6:])
    assert reported["choices"] == []
    count = len(core._token_ids)
    assert (reported["usage"]["prompt_tokens"], reported["usage"]["completion_tokens"]) == (3 * 2, 6 * count)


async def test_a_choice_that_fails_ends_the_stream_with_an_error_and_aborts_the_others() -> None:
    core = Core(TOKENIZER.encode("Hello", add_special_tokens=False))
    aborted: list[int] = []
    core.abort = aborted.extend
    generation, renderer = several(core, 2)
    events = generation.events(renderer)
    taken = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    ids = [each.request_id for each in core.added]
    core.hub.receive(StepOutputs([RequestOutput(each, core._token_ids) for each in ids]))
    first = await taken
    core.hub.receive(StepOutputs([RequestOutput(ids[2], [], True, "error", error="the step failed")]))
    rest = b"".join([event async for event in events])
    assert first.count(b'"text":"Hello"') == 4
    assert json.loads(rest.removeprefix(b"data: "))["error"]["message"] == "the step failed"
    assert b"[DONE]" not in rest
    assert sorted(aborted) == [each for each in ids if each != ids[2]]
