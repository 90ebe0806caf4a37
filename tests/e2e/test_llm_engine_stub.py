"""`LLMEngine` over a model that always samples the same token: its checks, its isolation of requests, its recovery."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.client.llm_engine import EngineDeadError, LLMEngine
from engine.config.config import Config, ParallelConfig
from engine.messages import StepOutputs
from engine.sampling_params import SamplingParams
from engine.text.io_processor import InvalidRequest
from engine.text.request_state import RequestDelta
from tests.e2e.conftest import run_stub_cores

pytestmark = pytest.mark.usefixtures("stub_core")


@pytest.fixture(scope="module")
def shared() -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        run_stub_cores(patch)
        engine = LLMEngine()
    with engine:
        yield engine


@pytest.fixture
def engine(shared: LLMEngine) -> LLMEngine:
    """For tests that leave it unchanged; the others use `own_engine`."""
    assert not shared._core.live
    return shared


@pytest.fixture
def own_engine() -> Iterator[LLMEngine]:
    with LLMEngine() as engine:
        yield engine


def test_results_keep_the_order_of_the_prompts(engine: LLMEngine) -> None:
    lengths = [9, 1, 5]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    results = engine.generate(["one", "two", "three"], params, use_tqdm=False)
    assert [result["num_tokens_output"] for result in results] == lengths
    assert [result["token_ids"] for result in results] == [[5] * length for length in lengths]


def test_result_has_all_fields_that_the_specification_names(engine: LLMEngine) -> None:
    (result,) = engine.generate([[7, 8, 9]], SamplingParams(max_tokens=4), use_tqdm=False)
    text = engine.io_processor.tokenizer.decode([5] * 4)
    assert (result["text"], result["finish_reason"]) == (text, "length")
    assert (result["num_tokens_input"], result["num_tokens_output"]) == (3, 4)
    assert 0 < result["ttft"] < result["latency"]
    assert 0 < result["tpot"] < result["latency"]


def test_times_are_the_cores_and_not_those_at_which_the_caller_reads(engine: LLMEngine) -> None:
    for _ in range(10):
        begun = time.monotonic()
        ids = engine.add_request([[7, 8, 9]], SamplingParams(max_tokens=4))
        time.sleep(0.5)
        read = time.monotonic()
        (result,) = engine.collect(ids)
        assert 0 < result["ttft"] < result["latency"]
        if result["latency"] < read - begun - 0.1:
            return  # Otherwise the core may have had no processor until it was read.
    pytest.fail("latencies contain the time until they are read")


def test_a_sequence_of_tokens_ends_the_generation_and_stays_in_it(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=9, stop_token_sequences=[[6], [5, 5, 5]])
    (result,) = engine.generate("go", params, use_tqdm=False)
    assert (result["token_ids"], result["finish_reason"], result["stop_reason"]) == ([5, 5, 5], "stop", None)
    with pytest.raises(InvalidRequest, match="stop_token_sequences holds token id 50000"):
        engine.generate("go", SamplingParams(stop_token_sequences=[[50_000]]), use_tqdm=False)


def test_single_text_is_one_prompt(engine: LLMEngine) -> None:
    assert len(engine.generate("hello", use_tqdm=False)) == 1
    assert engine.generate([], use_tqdm=False) == []


@pytest.mark.parametrize("placement", ["prefix", "round_robin"])
def test_a_list_of_token_ids_given_many_times_is_as_many_prompts_for_the_replicas(placement: str) -> None:
    fields = {"data_parallel_size": 2, "data_parallel_placement": placement}
    with LLMEngine(parallel_config=ParallelConfig.model_validate(fields)) as engine:
        ids = engine.add_request([[7] * 100] * 8, SamplingParams(max_tokens=300, ignore_eos=True))
        shares = [len(replica.live) for replica in engine._core._replicas]
        assert len(engine.collect(ids)) == sum(shares) == 8
        assert min(shares) >= 2, shares


def test_a_list_that_the_caller_changes_afterwards_is_what_it_was(own_engine: LLMEngine) -> None:
    prompt = [7, 8, 9]
    (request_id,) = own_engine.add_request([prompt], SamplingParams(max_tokens=1000, ignore_eos=True))
    prompt.clear()
    os.kill(own_engine._core.pid, signal.SIGKILL)
    (result,) = own_engine.collect([request_id])
    assert (result["finish_reason"], result["num_tokens_input"], result["num_tokens_output"]) == ("length", 3, 1000)


def test_stop_string_ends_the_text_and_the_request(engine: LLMEngine) -> None:
    token = engine.io_processor.tokenizer.decode([5])
    params = SamplingParams(max_tokens=8000, stop_strings=[token * 3])
    (result,) = engine.generate("go", params, use_tqdm=False)
    assert (result["text"], result["finish_reason"], result["stop_reason"]) == ("", "stop", token * 3)
    (after,) = engine.generate("go", SamplingParams(max_tokens=2), use_tqdm=False)
    assert after["num_tokens_output"] == 2
    assert engine._core.live == set()


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        (["good", ""], None, "prompt is empty"),
        ([[1], [50_000]], None, "token id 50000"),
        ([1, 2], None, "type int"),
        (["good"], SamplingParams(max_tokens=10**6), "max_tokens is 1000000"),
        (["one", "two"], [SamplingParams()], "1 entries for 2 prompts"),
        (["good"], SamplingParams(stop_strings="ab"), r"array.*str.*stop_strings"),  # type: ignore[arg-type]
        (["good"], SamplingParams(max_tokens=2.5), r"int.*float.*max_tokens"),  # type: ignore[arg-type]
    ],
)
def test_bad_prompt_is_refused_before_any_is_sent(engine: LLMEngine, prompts: Any, params: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine.generate(prompts, params, use_tqdm=False)
    assert engine._core.live == set()
    assert engine._states == {}


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        (None, None, "prompts is of type NoneType"),
        (["one"], {"max_tokens": 3}, "sampling_params holds a dict"),
        (["one"], [None], "sampling_params holds a NoneType"),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_named(
    engine: LLMEngine, prompts: Any, params: Any, sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        engine.generate(prompts, params, use_tqdm=False)


def test_any_iterable_of_prompts_will_do(engine: LLMEngine) -> None:
    params = (SamplingParams(max_tokens=1), SamplingParams(max_tokens=2))
    results = engine.generate((text for text in ("one", "two")), params, use_tqdm=False)
    assert [result["num_tokens_output"] for result in results] == [1, 2]


def test_request_is_collected_once(engine: LLMEngine) -> None:
    (request_id,) = engine.add_request("one", SamplingParams(max_tokens=1))
    assert len(engine.collect([request_id, request_id])) == 2
    with pytest.raises(ValueError, match=f"request {request_id} cannot be collected"):
        engine.collect([request_id])


def test_closed_engine_says_so(own_engine: LLMEngine) -> None:
    own_engine.close()
    own_engine.close()
    with pytest.raises(EngineDeadError, match="has stopped"):
        own_engine.generate("one", use_tqdm=False)


def test_invalid_request_names_its_field(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine.generate([[]], use_tqdm=False)
    assert raised.value.param == "prompt"


def test_interrupted_generation_is_aborted_and_the_engine_stays_usable(
    own_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = own_engine._core.get_outputs
    calls = 0

    def interrupt_at_third() -> StepOutputs | None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return receive()

    monkeypatch.setattr(own_engine._core, "get_outputs", interrupt_at_third)
    with pytest.raises(KeyboardInterrupt):
        own_engine.generate(["one", "two"], SamplingParams(max_tokens=8000), use_tqdm=False)
    assert own_engine._states == {}
    (result,) = own_engine.generate("three", SamplingParams(max_tokens=3), use_tqdm=False)
    assert result["token_ids"] == [5] * 3
    assert own_engine._core.live == set()


def test_requests_can_be_added_first_and_collected_later_in_any_order(engine: LLMEngine) -> None:
    early = engine.add_request(["a", "b"], SamplingParams(max_tokens=2))
    late = engine.add_request("c", SamplingParams(max_tokens=3))
    assert [result["num_tokens_output"] for result in engine.collect(late)] == [3]
    assert [result["num_tokens_output"] for result in engine.collect(early)] == [2, 2]


def test_a_stream_brings_each_prompts_text_as_it_is_generated(engine: LLMEngine) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=1)]
    streamed: dict[int, list[RequestDelta]] = {0: [], 1: []}
    for index, delta in engine.stream(["one", "two"], params):
        streamed[index].append(delta)
    assert [delta.token_ids for delta in streamed[0]] == [[5], [5], [5]]
    assert [delta.finish_reason for delta in streamed[0]] == [None, None, "length"]
    assert [delta.finished for delta in streamed[1]] == [True]
    assert "".join(delta.text for delta in streamed[0]) == engine.io_processor.tokenizer.decode([5] * 3)
    assert engine._core.live == set()
    assert engine._states == engine._callbacks == {}


def test_streams_and_other_requests_do_not_take_each_others_outputs(engine: LLMEngine) -> None:
    stream = engine.stream("one", SamplingParams(max_tokens=40))
    next(stream)
    (result,) = engine.generate("two", SamplingParams(max_tokens=60), use_tqdm=False)
    assert result["num_tokens_output"] == 60
    assert sum(len(delta.token_ids) for _, delta in stream) == 39


def test_a_stream_that_is_closed_aborts_its_prompts(engine: LLMEngine) -> None:
    stream = engine.stream(["one", "two"], SamplingParams(max_tokens=8000))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine._states == engine._callbacks == {}
    assert len(engine.generate("three", SamplingParams(max_tokens=3), use_tqdm=False)) == 1
    assert engine._core.live == set()


def test_a_callback_gets_each_delta_while_generate_waits(engine: LLMEngine) -> None:
    seen: list[tuple[int, str]] = []
    (result,) = engine.generate(
        "one",
        SamplingParams(max_tokens=3),
        use_tqdm=False,
        stream_callback=lambda request_id, delta: seen.append((request_id, delta.text)),
    )
    assert "".join(text for _, text in seen) == result["text"]
    assert len({request_id for request_id, _ in seen}) == 1


def test_a_stream_ends_with_the_error_of_a_core_that_is_not_started_again() -> None:
    with LLMEngine(max_core_restarts=0) as engine:
        stream = engine.stream("a", SamplingParams(max_tokens=8000))
        next(stream)
        os.kill(engine._core.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            list(stream)


def test_results_are_whole_when_the_core_dies_meanwhile(own_engine: LLMEngine) -> None:
    ids = own_engine.add_request(["a", "b"], SamplingParams(max_tokens=200))
    os.kill(own_engine._core.pid, signal.SIGKILL)
    assert [result["token_ids"] for result in own_engine.collect(ids)] == [[5] * 200] * 2


def test_death_of_a_core_that_may_not_be_started_again_is_an_error_and_not_a_hang() -> None:
    with LLMEngine(max_core_restarts=0) as engine:
        ids = engine.add_request(["a", "b"], SamplingParams(max_tokens=8000))
        os.kill(engine._core.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.collect(ids)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.generate("c", use_tqdm=False)


def test_config_and_single_fields_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="either a config or single fields"):
        LLMEngine(config=Config(), max_num_seqs=4)


def test_a_callback_that_raises_takes_no_outputs_from_other_requests(engine: LLMEngine) -> None:
    def fail(request_id: int, delta: RequestDelta) -> None:
        raise RuntimeError("the caller's own error")

    failing = engine.add_request("one", SamplingParams(max_tokens=40), stream_callback=fail)
    others = engine.add_request(["two", "three"], SamplingParams(max_tokens=40))
    with pytest.raises(RuntimeError, match="the caller's own error"):
        engine.collect(failing)
    assert [result["num_tokens_output"] for result in engine.collect(others)] == [40, 40]
