"""Tensor parallel in real processes: the same answers, and the end of all ranks if one fails or dies."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client.llm_engine import EngineDeadError, LLMEngine
from engine.config.config import Config, ParallelConfig
from engine.sampling_params import SamplingParams
from models.ops.cpu.runtime import load_library
from tests.e2e.engines import until_begun, until_replaced
from tests.e2e.faulty_ranks import RAISING
from tests.e2e.kaon_server import KaonServer
from tests.e2e.processes import command_line, until_idle, wait_gone

pytestmark = pytest.mark.usefixtures("warm_children")

PROMPTS = ["Hello", "What is 3+4?", "The capital of", "A"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, top_p=0.9, max_tokens=16, ignore_eos=True)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, prompt_logprobs=2)
needs_operators = pytest.mark.skipif(load_library() is None, reason="the operators were not built")


def engine_of(size: int, *, collectives: str = "shared_memory", dtype: str = "float32", **fields: Any) -> LLMEngine:
    parallel = ParallelConfig.model_validate(
        {"tensor_parallel_size": size, "cpu_collectives": collectives, **fields.pop("parallel", {})}
    )
    fields = {"num_kvcache_blocks": 128, "max_num_seqs": 32, "cpu_threads": 1, "device": "cpu", **fields}
    return LLMEngine(parallel_config=parallel, dtype=dtype, **fields)


def answers(engine: LLMEngine) -> list[object]:
    """Greedy, seeded and mixed requests, and log probabilities to three digits."""
    reported: list[object] = []
    mixed = [GREEDY, SEEDED, GREEDY, SEEDED]
    for params in (GREEDY, SEEDED, mixed):
        results = engine.generate(PROMPTS, params, use_tqdm=False)
        reported.append([result["token_ids"] for result in results])
    for result in engine.generate(PROMPTS, LOGPROBS, use_tqdm=False):
        for entries in (result["logprobs"], result["prompt_logprobs"]):
            reported.append([(each.token_id, each.top_ids, round(each.logprob, 3)) for each in entries or ()])
    return reported


@pytest.fixture(scope="module")
def alone() -> list[object]:
    """One rank's answers."""
    with engine_of(1) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def pair() -> Iterator[LLMEngine]:
    """Two ranks, which tests may kill; others are started."""
    with engine_of(2, max_core_restarts=100) as engine:
        yield engine


@needs_operators
def test_two_ranks_of_a_host_answer_what_one_alone_does(pair: LLMEngine, alone: list[object]) -> None:
    assert answers(pair) == alone


@pytest.mark.slow  # Two ranks: the test above, and by Gloo test_where_ranks_cannot_leave_a_step below.
@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("collectives", [pytest.param("shared_memory", marks=needs_operators), "gloo"])
def test_ranks_answer_what_one_alone_does(
    size: int, collectives: str, alone: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    with engine_of(size, collectives=collectives) as engine:
        assert answers(engine) == alone
    assert "terminate" not in capfd.readouterr().err


@pytest.mark.slow  # In float32: the tests above.
@needs_operators
def test_in_bfloat16_ranks_agree_with_one_alone_on_what_is_clear() -> None:
    """Sums are rounded differently, so only the embedded model's clear answers are compared."""
    chats = [[{"role": "user", "content": text}] for text in ("What is 3+4?", "What is the capital of France?")]
    texts = []
    for size in (1, 2):
        with engine_of(size, dtype="bfloat16") as engine:
            prompts = [engine.io_processor.render_chat(chat) for chat in chats]
            params = SamplingParams(temperature=0.0, max_tokens=24)
            texts.append([result["text"] for result in engine.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


# -- deaths -----------------------------------------------------------------------------------------------------


def ranks_of(core: psutil.Process) -> list[psutil.Process]:
    return [child for child in core.children() if "rank_process" in " ".join(command_line(child))]


LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
"""Far from its end when the next action reaches a rank."""


def test_requests_go_on_when_a_rank_is_killed(pair: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    [expected] = pair.generate(["Hello"], LONG, use_tqdm=False)
    for _ in range(5):
        core = psutil.Process(pair._core.pid)
        [rank] = ranks_of(core)
        assert rank.cmdline()[-1] == "kaon-worker-0.1"
        ids = pair.add_request(["Hello"], LONG)
        until_begun(pair)
        rank.kill()
        [result] = pair.collect(ids)
        assert result["token_ids"] == expected["token_ids"]
        until_replaced(pair, core.pid)
        wait_gone([core.pid, rank.pid])
        assert len(ranks_of(psutil.Process(pair._core.pid))) == 1
        assert "tensor-parallel rank 1 was killed by SIGKILL; another is started; " in caplog.text
        if "another is started; live requests: 1" in caplog.text:
            return
    pytest.fail("each request ended before the rank was killed")


@pytest.mark.slow  # Killed: the test above; stalls: tests/unit/client/test_supervisor_stalls.py.
def test_requests_go_on_when_a_rank_is_stopped(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(2) as engine:
        [expected] = engine.generate(["Hello"], LONG, use_tqdm=False)
        core = psutil.Process(engine._core.pid)
        [rank] = ranks_of(core)
        rank.suspend()
        ids = engine.add_request(["Hello"], LONG)
        [result] = engine.collect(ids)
        assert result["token_ids"] == expected["token_ids"]
        wait_gone([core.pid, rank.pid])
    assert f"its process {rank.pid} was stopped by a signal" in caplog.text
    stacks = capfd.readouterr().err
    assert "engine/core/engine_core.py" in stacks
    assert "engine/runner/rank_process.py" in stacks


@pytest.mark.slow  # Together with its parent: the next test.
def test_ranks_end_with_a_core_that_is_killed() -> None:
    with engine_of(2, max_core_restarts=0) as engine:
        core = psutil.Process(engine._core.pid)
        pids = [each.pid for each in ranks_of(core)]
        core.kill()
        wait_gone(pids)


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    code = (
        "from tests.e2e.test_tensor_parallel import engine_of\n"
        "engine = engine_of(2)\nprint(engine._core.pid, flush=True)\ninput()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    core = psutil.Process(int(parent.stdout.readline()))
    pids = [core.pid, *(each.pid for each in ranks_of(core))]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    wait_gone(pids)


def test_idle_ranks_use_no_processor(pair: LLMEngine) -> None:
    pair.generate(["Hello"], GREEDY, use_tqdm=False)
    core = psutil.Process(pair._core.pid)
    processes = [core, *ranks_of(core)]
    until_idle(processes)


def test_signals_to_the_whole_group_end_nothing_by_themselves(pair: LLMEngine) -> None:
    pair.generate(["Hello"], GREEDY, use_tqdm=False)
    core = psutil.Process(pair._core.pid)
    for process in (core, *ranks_of(core)):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    [result] = pair.generate(["Hello"], GREEDY, use_tqdm=False)
    assert len(result["token_ids"]) == 16
    assert pair._core.pid == core.pid


# -- faults -----------------------------------------------------------------------------------------------------


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@needs_operators
def test_a_step_that_raises_on_one_rank_fails_its_request_alone(
    faulty: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    faulty("0:step 1:step")
    with engine_of(2) as engine:
        pid = engine._core.pid
        expected = engine.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"]
        for rank, named in ((0, ""), (1, "tensor-parallel rank 1: ")):
            results = engine.generate([[5, 6, 7], [8, RAISING + rank, 9], [5, 6, 7]], GREEDY, use_tqdm=False)
            assert [result["finish_reason"] for result in results] == ["length", "error", "length"]
            assert results[0]["token_ids"] == results[2]["token_ids"] == expected
            assert f"failed: {named}division by cucumber" in str(results[1]["error"])
            assert "in run_model" in capfd.readouterr().err
            assert engine.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"] == expected
        assert engine._core.pid == pid


def test_where_ranks_cannot_leave_a_step_the_core_ends_and_names_the_rank(
    faulty: Callable[[str], None], alone: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    """By Gloo, over which two ranks answer what one alone does."""
    faulty("1:step")
    before = children()
    with engine_of(2, collectives="gloo", max_core_restarts=0) as engine:
        pids = [pid for pid in children() if pid not in before]
        assert answers(engine) == alone
        assert "terminate" not in capfd.readouterr().err
        with pytest.raises(EngineDeadError, match="rank 1 failed alone in a step: division by cucumber"):
            engine.generate([[8, RAISING + 1, 9]], GREEDY, use_tqdm=False)
    wait_gone(pids)
    capfd.readouterr()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        pytest.param(
            "1:bug", "tensor-parallel rank 1: ZeroDivisionError: division by cucumber", marks=pytest.mark.slow
        ),
        ("0:late 1:load", "tensor-parallel rank 1: the shard is damaged"),
    ],
)
def test_a_rank_that_cannot_start_is_reported_in_a_sentence_and_leaves_nothing(
    fault: str, sentence: str, faulty: Callable[[str], None]
) -> None:
    faulty(fault)
    before = children()
    with pytest.raises(EngineDeadError, match=sentence):
        engine_of(2)
    wait_gone([pid for pid in children() if pid not in before])


@pytest.mark.slow  # With one rank: test_cli_serve.py.
def test_threads_that_ranks_do_not_have_are_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    before = children()
    with pytest.raises(EngineDeadError, match="cpu_threads is 1000, but each of 2 ranks may use") as raised:
        engine_of(2, cpu_threads=1000)
    assert raised.value.usage
    wait_gone([pid for pid in children() if pid not in before])
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow  # The message: tests/parity/test_model_sharding.py; a rank's failed start: the test before the last.
def test_a_size_that_cannot_be_served_ends_the_server_with_a_sentence_and_exit_code_1(
    start_server: Callable[..., KaonServer],
) -> None:
    before = children()
    server = start_server(parallel_config={"tensor_parallel_size": 3})
    assert server.wait() == 1
    assert re.search("tensor_parallel_size is 3, which (does not divide|neither divides)", server.stderr)
    assert "Traceback" not in server.stderr
    wait_gone([pid for pid in children() if pid not in before])


def test_ranks_have_a_number_within_reason() -> None:
    for size in (0, 65):
        with pytest.raises(ValueError, match="tensor_parallel_size"):
            Config(parallel_config=ParallelConfig(tensor_parallel_size=size))
