"""Requests that continue in another core, over the embedded model: the same tokens and probabilities as
uninterrupted."""

from collections.abc import Iterator

import msgspec
import pytest

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.messages import AddRequest, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.structured.spec import GrammarSpec, lark_of
from models.ops.cpu.runtime import load_library

pytestmark = pytest.mark.skipif(
    load_library() is None, reason="only the compiled operators give a token the same result in any company"
)

WAIT_SECONDS = 60
LENGTH = 24
PROMPT = list(range(300, 340))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=7),
    "unseeded": SamplingParams(),
    "filtered": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=1),
    "penalties": SamplingParams(seed=2, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.2),
    "logprobs": SamplingParams(seed=3, logprobs=5, prompt_logprobs=2),
    "biased": SamplingParams(temperature=0.0, logit_bias={400: 5.0, 401: -100.0}),
    "bad words": SamplingParams(temperature=0.0, repetition_penalty=1.1, bad_words=[[311, 312], [350]]),
    "late end": SamplingParams(seed=4, min_tokens=20, ignore_eos=False),
    "grammar": SamplingParams(seed=5, grammar=lark_of(GrammarSpec("regex", "([0-9]{3},){8}[a-z]{5,20}"))),
}


AHEAD = ("unseeded", "penalties", "logprobs", "grammar")
"""Kinds that need the results of the previous step."""


def make_core(async_scheduling: str) -> Iterator[CoreManager]:
    with CoreManager(Config.from_fields(num_kvcache_blocks=512, async_scheduling=async_scheduling)) as manager:
        manager.wait_ready(WAIT_SECONDS)
        yield manager


@pytest.fixture(scope="module")
def core() -> Iterator[CoreManager]:
    """A core with synchronous steps."""
    yield from make_core("off")


@pytest.fixture(scope="module")
def core_ahead() -> Iterator[CoreManager]:
    """A core with asynchronous steps."""
    yield from make_core("on")


def run(core: CoreManager, requests: list[AddRequest]) -> dict[int, tuple[list[int], list[TokenLogprobs], str | None]]:
    """Tokens, log probabilities and end of each request."""
    core.add_requests(requests)
    outputs: list[RequestOutput] = []
    while sum(output.finished for output in outputs) < len(requests):
        step = core.get_outputs(WAIT_SECONDS)
        assert step is not None
        outputs += step.outputs
    results: dict[int, tuple[list[int], list[TokenLogprobs], str | None]] = {}
    for request in requests:
        mine = [output for output in outputs if output.request_id == request.request_id]
        tokens = [token for output in mine for token in output.output_tokens]
        logprobs = [row for output in mine for row in output.logprobs or ()]
        assert mine[-1].error is None
        results[request.request_id] = tokens, logprobs, mine[-1].finish_reason
    return results


@pytest.mark.parametrize("name", PARAMS)
def test_a_resumed_request_goes_on_as_if_it_had_not_stopped(core: CoreManager, name: str) -> None:
    assert_goes_on(core, name)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in AHEAD else pytest.mark.slow) for each in PARAMS]
)
def test_so_does_one_of_a_core_that_is_one_step_ahead(core_ahead: CoreManager, name: str) -> None:
    assert_goes_on(core_ahead, name)


def assert_goes_on(core: CoreManager, name: str) -> None:
    """A request that is cut at any point gets the same remaining tokens as one that is not."""
    params = msgspec.structs.replace(PARAMS[name], max_tokens=LENGTH, ignore_eos=name not in ("late end", "grammar"))
    whole = AddRequest(0, PROMPT, params)
    tokens, logprobs, end = run(core, [whole])[0]
    assert len(tokens) > 8
    for cut in (1, 5, len(tokens) // 2, len(tokens) - 1):
        # The request's id keys the noise of requests without a seed; batch and prefix cache must make no difference.
        resumed = msgspec.structs.replace(
            whole,
            resumed_token_ids=tuple(tokens[:cut]),
            sampling_params=msgspec.structs.replace(params, prompt_logprobs=None),
            suspect=cut == 5,
        )
        company = [AddRequest(100 + cut, PROMPT[:7], SamplingParams(max_tokens=9, ignore_eos=True))]
        assert run(core, [resumed, *company])[0] == (tokens[cut:], logprobs[cut:], end)
