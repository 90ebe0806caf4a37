"""Replicas of the embedded model, by `LLMEngine` and over HTTP: the answers of one engine, and the reports of each."""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.client.llm_engine import LLMEngine
from engine.config.config import ParallelConfig
from engine.distributed.core_process import CORE_MODULE
from engine.sampling_params import SamplingParams
from models.ops.cpu.runtime import load_library
from tests.e2e.engines import until_begun, until_replaced
from tests.e2e.kaon_server import KaonServer, eventually, free_port
from tests.e2e.processes import command_line, wait_gone

pytestmark = pytest.mark.usefixtures("warm_children")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=11, top_p=0.9, max_tokens=24, ignore_eos=True)
PROMPTS = [f"{opening} {number}" for number in range(6) for opening in ("Hello", "What is 3+4?", "The capital of")]
PARAMS = [GREEDY if number % 2 else SEEDED for number in range(len(PROMPTS))]


def engine_of(replicas: int, ranks: int = 1) -> LLMEngine:
    parallel = ParallelConfig(data_parallel_size=replicas, tensor_parallel_size=ranks)
    return LLMEngine(
        parallel_config=parallel, dtype="float32", device="cpu", num_kvcache_blocks=256, max_num_seqs=32, cpu_threads=1
    )


def answers(engine: LLMEngine) -> list[list[int]]:
    results = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert {result["finish_reason"] for result in results} == {"length"}
    return [result["token_ids"] for result in results]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """One replica's answers to prompts of both kinds."""
    with engine_of(1) as engine:
        return answers(engine)


@pytest.mark.slow  # Over HTTP: the next test but one.
def test_replicas_answer_what_one_alone_does_also_when_one_is_killed(alone: list[list[int]]) -> None:
    with engine_of(2) as engine:
        assert answers(engine) == alone
        pids = engine._core.pids
        ids = engine.add_request(PROMPTS, PARAMS)
        assert all(replica.live for replica in engine._core._replicas), "each computes some"
        until_begun(engine)
        psutil.Process(pids[1]).kill()
        assert [result["token_ids"] for result in engine.collect(ids)] == alone
        until_replaced(engine, pids[1])
        assert engine._core.pids[0] == pids[0]


@pytest.mark.skipif(load_library() is None, reason="the operators were not built")
@pytest.mark.slow
def test_each_replica_may_have_ranks(alone: list[list[int]]) -> None:
    with engine_of(2, 2) as engine:
        names = [
            child.cmdline()[-1]
            for pid in engine._core.pids
            for child in psutil.Process(pid).children()
            if "rank_process" in " ".join(command_line(child))
        ]
        assert names == ["kaon-worker-0.1", "kaon-worker-1.1"]
        assert answers(engine) == alone


# -- behind HTTP ------------------------------------------------------------------------------------------------


def body(number: int, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
    return {
        "model": "kaon-demo",
        "prompt": f"Number {number}:",
        "max_tokens": 200,
        "ignore_eos": True,
        **sampling,
        **fields,
    }


def text_of(server: KaonServer, number: int, **fields: Any) -> str:
    """One answer: streamed for every third, otherwise whole."""
    stream = number % 3 == 0
    with server.http() as http:
        response = http.post("/v1/completions", json=body(number, stream=stream, **fields))
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["text"])
    texts = re.findall(r'"text":("(?:[^"\\]|\\.)*")', response.text)
    assert response.text.rstrip().endswith("data: [DONE]")
    return "".join(httpx.Response(200, content=text).json() for text in texts)


def replicas_of(server: KaonServer) -> list[psutil.Process]:
    """The engine cores by replica."""
    lines = {child: command_line(child) for child in server.process.children()}
    return sorted((core for core, line in lines.items() if CORE_MODULE in line), key=lambda core: lines[core][-1])


def serve_pair(log: Path) -> KaonServer:
    return KaonServer(log, free_port(), parallel_config={"data_parallel_size": 2}, max_core_restarts=100).ready()


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    running = serve_pair(tmp_path_factory.mktemp("pair") / "log")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


@pytest.fixture
def pair(shared_pair: KaonServer) -> KaonServer:
    """Two ready replicas; tests may kill them, and others are started."""
    for replica in (0, 1):
        eventually(lambda replica=replica: shared_pair.metric(serving(replica)) == 1)  # type: ignore[misc]
    return shared_pair


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[KaonServer]:
    """Two replicas, whose server the test ends."""
    running = serve_pair(tmp_path / "log")
    yield running
    running.stop()


def serving(replica: int) -> str:
    return f'kaon_core_serving{{replica="{replica}"}}'


def counts(server: KaonServer, *names: str) -> list[float]:
    return [server.metric(name) for name in names]


def test_mixed_load_is_answered_once_each_while_a_replica_is_killed(pair: KaonServer, server: KaonServer) -> None:
    """The shared server has one replica, and gives the same answers in float32."""
    counters = (
        "kaon_requests_received_total",
        'kaon_requests_finished_total{reason="length"}',
        'kaon_core_restarts_total{replica="0"}',
        'kaon_core_restarts_total{replica="1"}',
    )
    before = counts(pair, *counters)
    generated = 'kaon_generation_tokens_total{replica="1"}'
    generated_before = pair.metric(generated)
    with ThreadPoolExecutor(12) as pool:
        expected = list(pool.map(lambda number: text_of(server, number), range(12)))
        first, second = replicas_of(pair)
        answered = [pool.submit(text_of, pair, number) for number in range(12)]
        eventually(lambda: pair.metric(generated) > generated_before)
        second.kill()
        assert [each.result() for each in answered] == expected
    eventually(lambda: pair.metric(counters[3]) == before[3] + 1)
    eventually(lambda: pair.metric(serving(1)) == 1)
    assert replicas_of(pair)[0].pid == first.pid
    grown = [now - then for now, then in zip(counts(pair, *counters), before, strict=True)]
    assert grown == [12, 12, 0, 1]
    assert "engine core 1 was killed by SIGKILL" in pair.stderr
    eventually(lambda: "engine core 1 serves again" in pair.stderr)


def test_each_replica_reports_itself_and_the_server_is_ready_while_one_is_started_again(pair: KaonServer) -> None:
    for number in range(6):
        text_of(pair, number, max_tokens=4)
    for replica in (0, 1):
        assert pair.metric(f'kaon_generation_tokens_total{{replica="{replica}"}}') > 0
        assert pair.metric(f'kaon_step_duration_seconds_count{{kind="decode",replica="{replica}"}}') > 0
    restarts = pair.metric('kaon_core_restarts_total{replica="0"}')
    with pair.http() as http:
        assert http.get("/readyz").status_code == 200
        replicas_of(pair)[0].kill()
        eventually(
            lambda: not pair.metric(serving(0)) or pair.metric('kaon_core_restarts_total{replica="0"}') > restarts
        )
        assert http.get("/readyz").status_code == 200
        assert http.get("/livez").status_code == 200
    assert text_of(pair, 1, max_tokens=4)
    assert {word for line in pair.stderr.splitlines() for word in line.split()[2:3]} >= {
        "kaon-engine-0",
        "kaon-engine-1",
    }


def test_choices_of_a_prompt_are_computed_once(pair: KaonServer) -> None:
    counters = [f'kaon_generation_tokens_total{{replica="{replica}"}}' for replica in (0, 1)]
    before = counts(pair, *counters)
    with pair.http() as http:
        fields = {"n": 4, "prompt": "one two three four " * 20, "max_tokens": 8}
        response = http.post("/v1/completions", json=body(0, **fields))
    assert len(response.json()["choices"]) == 4
    assert sorted(now - then for now, then in zip(counts(pair, *counters), before, strict=True)) == [0, 32]


@pytest.mark.slow  # With one core: tests/chaos/test_shutdown.py.
def test_streams_end_first_when_the_server_is_asked_to_end(own_pair: KaonServer) -> None:
    cores = replicas_of(own_pair)
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda number=number: texts.append(text_of(own_pair, number))) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: own_pair.metric("kaon_requests_received_total") == 8)
    own_pair.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert own_pair.wait() == 0
    wait_gone(core.pid for core in cores)


@pytest.mark.slow  # With one core, and at more difficult times: tests/chaos/test_shutdown.py.
def test_no_replica_outlives_a_server_that_is_killed(own_pair: KaonServer) -> None:
    cores = replicas_of(own_pair)
    assert len(cores) == 2
    own_pair.process.kill()
    wait_gone(core.pid for core in cores)


@pytest.mark.slow  # By the manager: test_data_parallel.py.
def test_a_replica_that_is_started_no_more_ends_the_server_which_says_so(
    start_server: Callable[..., KaonServer],
) -> None:
    server = start_server(parallel_config={"data_parallel_size": 2}, max_core_restarts=0).ready()
    cores = replicas_of(server)
    cores[1].kill()
    assert server.wait() == 1
    assert "kaon: engine core 1 was killed by SIGKILL" in server.stderr
    wait_gone(core.pid for core in cores)
