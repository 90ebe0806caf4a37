"""Replicas of the embedded model on two hosts: the answers of one engine, and the server's reports of them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client.llm_engine import LLMEngine
from engine.config.config import ParallelConfig
from engine.sampling_params import SamplingParams
from tests.e2e.core_host import replica_fields
from tests.e2e.engines import until_begun, until_lost, until_replaced
from tests.e2e.kaon_host import FIELDS, KaonHost
from tests.e2e.kaon_server import SETTINGS, START_SECONDS, KaonServer, eventually
from tests.e2e.processes import wait_gone
from tests.e2e.test_data_parallel_serving import PARAMS, PROMPTS, answers, engine_of
from tests.e2e.test_tensor_parallel import ranks_of
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt
from tests.parity.variants import all_variants


@pytest.fixture
def host_kind() -> Callable[..., KaonHost]:
    """A host that runs replicas."""

    def make(log: Path, port: int, *, parallel: dict[str, Any] | None = None, **settings: Any) -> KaonHost:
        fields = {**replica_fields(port, node_rank=1), "tensor_parallel_size": 1, **(parallel or {})}
        return KaonHost(log, port, parallel=fields, **settings)

    return make


@pytest.mark.slow  # With stubs: test_replicas_on_hosts.py; ranks: test_several_hosts.py.
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_answer_what_one_engine_does_also_when_a_core_is_killed(
    ranks: int, port: int, start_host: Callable[..., KaonHost]
) -> None:
    with engine_of(1) as engine:
        alone = answers(engine)
    host = start_host(port, parallel={"tensor_parallel_size": ranks})
    parallel = ParallelConfig.model_validate(replica_fields(port, tensor_parallel_size=ranks))
    with LLMEngine(parallel_config=parallel, **FIELDS) as engine:
        cores = engine._core.pids
        [core] = host.process.children()
        assert core.pid == cores[1]
        assert len(ranks_of(core)) == ranks - 1
        assert answers(engine) == alone
        ids = engine.add_request(PROMPTS, PARAMS)
        assert all(replica.live for replica in engine._core._replicas), "each computes some"
        until_begun(engine)
        core.kill()
        assert [result["token_ids"] for result in engine.collect(ids)] == alone
        until_replaced(engine, core.pid)
        assert engine._core.pids[0] == cores[0]
        left = [*engine._core.pids, *(rank.pid for rank in ranks_of(psutil.Process(engine._core.pids[1])))]
    assert host.wait() == 0
    wait_gone(left)
    assert "Traceback" not in host.stderr


@pytest.mark.slow
def test_a_stream_goes_on_elsewhere_when_its_host_is_lost_for_good(
    port: int, start_host: Callable[..., KaonHost], start_server: Callable[..., KaonServer]
) -> None:
    settings = {**SETTINGS, **FIELDS}
    server = start_server(**settings, parallel_config=replica_fields(port))
    host = start_host(port, **settings)
    server.ready()
    request = {"model": "kaon-demo", "prompt": "Number", "max_tokens": 400, "temperature": 0.0}

    def text() -> str:
        with server.client() as client:
            parts = []
            for chunk in client.completions.create(**request, stream=True, extra_body={"ignore_eos": True}):
                parts.append(chunk.choices[0].text)
                begun.release()
            return "".join(parts)

    begun = threading.Semaphore(0)
    whole = text()
    begun = threading.Semaphore(0)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(text())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        assert begun.acquire(timeout=START_SECONDS)
    host.process.kill()
    eventually(lambda: server.metric('kaon_core_serving{replica="1"}') == 0)
    with server.http() as http:
        assert http.get("/readyz").status_code == 200
    for thread in threads:
        thread.join()
    assert texts == [whole, whole]
    assert server.metric('kaon_requests_resumed_total{replica="0"}') == 1
    assert server.metric('kaon_core_restarts_total{replica="1"}') == 0
    host = start_host(port, **settings)
    eventually(lambda: server.metric('kaon_core_serving{replica="1"}') == 1)
    assert server.metric('kaon_requests_resumed_total{replica="1"}') == 0
    assert server.stop() == 0
    assert host.wait() == 0


# -- experts that are distributed over the replicas of both hosts --------------------------------------------------

_PROMPTS = [prompt(37), prompt(3, seed=7), prompt(21, seed=6), prompt(9, seed=4)]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
_SPREAD: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_placement": "round_robin"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[int]]]:
    """Settings of a mixture of experts, and one engine's tokens for the prompts."""
    folder = tmp_path_factory.mktemp("mixture")
    variant = next(each for each in all_variants() if each.architecture == "Qwen3MoeForCausalLM")
    model = str(make_checkpoint(folder, variant.family, **variant.overrides))
    settings = {**FIELDS, "model": model, "max_model_len": 128}
    with LLMEngine(**settings) as engine:
        return settings, [each["token_ids"] for each in engine.generate(_PROMPTS, _GREEDY, use_tqdm=False)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_on_two_hosts_exchange_tokens_for_their_experts_also_after_a_core_is_killed(
    ranks: int,
    port: int,
    start_host: Callable[..., KaonHost],
    mixture: tuple[dict[str, Any], list[list[int]]],
) -> None:
    settings, alone = mixture
    spread = {**_SPREAD, "tensor_parallel_size": ranks}
    host = start_host(port, parallel=spread, **settings)
    with LLMEngine(
        parallel_config=ParallelConfig.model_validate(replica_fields(port, **spread)), **settings
    ) as engine:
        [core] = host.process.children()
        assert core.pid == engine._core.pids[1]
        # One replica idle, and both busy.
        for some in (_PROMPTS[:1], _PROMPTS):
            found = engine.generate(some, _GREEDY, use_tqdm=False)
            assert [result["token_ids"] for result in found] == alone[: len(some)]
        ids = engine.add_request(_PROMPTS, _GREEDY)
        assert all(replica.live for replica in engine._core._replicas), "each computes some"
        until_begun(engine)
        pids = engine._core.pids
        core.kill()
        assert [result["token_ids"] for result in engine.collect(ids)] == alone
        assert not set(pids) & set(engine._core.pids), "both begin a new round"
    assert host.wait() == 0
    wait_gone(pids)
    assert "Traceback" not in host.stderr


@pytest.mark.slow  # A killed core: the test above; hosts: test_replicas_on_hosts.py.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_over_both_hosts_go_on_when_a_host_that_vanished_has_joined_again(
    is_killed: bool,
    port: int,
    start_host: Callable[..., KaonHost],
    mixture: tuple[dict[str, Any], list[list[int]]],
) -> None:
    """A host that is stopped keeps its connections open, but answers nothing, as one without power or network does."""
    settings, alone = mixture
    host = start_host(port, parallel=_SPREAD, **settings)
    parallel = ParallelConfig.model_validate(replica_fields(port, **_SPREAD))
    with LLMEngine(parallel_config=parallel, **settings) as engine:
        ids = engine.add_request(_PROMPTS, _GREEDY)
        until_begun(engine)
        [core] = host.process.children()
        pids = engine._core.pids
        if is_killed:
            host.process.kill()
        else:
            for process in (host.process, core):
                process.suspend()
        try:
            until_lost(engine)
            wait_gone(pids[:1])
            again = start_host(port, parallel=_SPREAD, **settings)
            assert [result["token_ids"] for result in engine.collect(ids)] == alone
        finally:
            if not is_killed:
                # The host would end a core that is stopped.
                for process in (core, host.process):
                    process.resume()
        if not is_killed:
            assert host.wait() == 1
            assert "another host has already joined with this number" in host.stderr
        wait_gone(pids)
    assert again.wait() == 0
