"""Tensor parallel over several hosts: processes that share only TCP, at two loopback addresses.

The answers are the same, and both sides end correctly if one cannot join, dies or ends.
"""

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from engine.client.core_manager import CoreManager
from engine.client.llm_engine import EngineDeadError, LLMEngine
from engine.config.config import CLUSTER_KEY_ENV, Config, ParallelConfig
from engine.sampling_params import SamplingParams
from tests.e2e.engines import until_begun, until_replaced
from tests.e2e.kaon_host import FIELDS, KEY, KaonHost, free_ports, parallel_fields
from tests.e2e.kaon_server import SETTINGS, KaonServer, eventually
from tests.e2e.processes import wait_gone
from tests.e2e.test_tensor_parallel import LONG, answers, engine_of, ranks_of
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt
from tests.parity.variants import all_variants

pytestmark = pytest.mark.usefixtures("warm_children")


@pytest.fixture(autouse=True)
def _cluster_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_KEY_ENV, KEY)


def first_host(port: int, *, parallel: dict[str, Any] | None = None, **fields: Any) -> LLMEngine:
    """The engine of host 0."""
    config = ParallelConfig.model_validate(parallel_fields(port, **(parallel or {})))
    return LLMEngine(parallel_config=config, **{**FIELDS, **fields})


@pytest.fixture(scope="module")
def alone() -> list[object]:
    """One rank's answers."""
    with engine_of(1) as engine:
        return answers(engine)


class Joined(NamedTuple):
    """Two hosts with a rank each."""

    engine: LLMEngine
    host: KaonHost
    port: int


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    """Tests may kill the engine and the rank; others are started."""
    port = free_ports()
    host = KaonHost(tmp_path_factory.mktemp("host") / "log", port)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CLUSTER_KEY_ENV, KEY)
            engine = first_host(port, max_core_restarts=100)
        with engine:
            yield Joined(engine, host, port)
        assert host.wait() == 0
    finally:
        host.stop()


# -- the same answers -------------------------------------------------------------------------------------------


def test_two_hosts_answer_what_one_does(joined: Joined, alone: list[object]) -> None:
    assert answers(joined.engine) == alone


@pytest.mark.slow
def test_two_hosts_with_two_ranks_each_answer_what_one_does(
    alone: list[object], port: int, start_host: Callable[..., KaonHost]
) -> None:
    size = 4
    host = start_host(port, parallel={"tensor_parallel_size": size})
    with first_host(port, parallel={"tensor_parallel_size": size}) as engine:
        assert answers(engine) == alone
        ranks = host.ranks()
        assert len(ranks) == size // 2
        assert len(ranks_of(psutil.Process(engine._core.pid))) == size // 2 - 1
    assert host.wait() == 0
    wait_gone([rank.pid for rank in ranks])
    assert "Traceback" not in host.stderr


@pytest.mark.slow  # Experts: test_expert_parallel.py; hosts: the tests here.
def test_experts_are_spread_over_two_hosts(port: int, start_host: Callable[..., KaonHost], tmp_path: Path) -> None:
    """Whole experts on each rank: sums over ranks use TCP, like any layer's sums."""
    variant = next(each for each in all_variants() if each.architecture == "Qwen3MoeForCausalLM")
    settings = {"model": str(make_checkpoint(tmp_path, variant.family, **variant.overrides)), "max_model_len": 64}
    spread = {"enable_expert_parallel": True}
    prompts = [prompt(37), prompt(3, seed=7)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLMEngine(**settings, **FIELDS) as engine:
        expected = [result["token_ids"] for result in engine.generate(prompts, params, use_tqdm=False)]
    host = start_host(port, parallel=spread, **settings)
    with first_host(port, parallel=spread, **settings) as engine:
        results = engine.generate(prompts, params, use_tqdm=False)
        assert [result["token_ids"] for result in results] == expected
        ranks = host.ranks()
        assert len(ranks) == 1
    assert host.wait() == 0
    wait_gone([rank.pid for rank in ranks])
    assert "Traceback" not in host.stderr


@pytest.mark.slow  # By the engine: the tests above.
def test_a_host_may_come_first_or_last_and_serves_a_server_s_requests(
    port: int, start_host: Callable[..., KaonHost], start_server: Callable[..., KaonServer]
) -> None:
    server = start_server(**FIELDS, parallel_config=parallel_fields(port))
    host = start_host(port, **{**SETTINGS, **FIELDS})
    server.ready()
    with server.client() as client:
        answer = client.completions.create(model="kaon-demo", prompt="Hello", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert server.stop() == 0
    assert host.wait() == 0
    line = host.process.stdout.read()
    assert f"node 1 of 2 joins tcp://127.0.0.2:{port}" in line


# -- what cannot join -------------------------------------------------------------------------------------------


def test_a_host_with_another_key_is_turned_away_and_the_engine_says_who_never_came(
    port: int, start_host: Callable[..., KaonHost]
) -> None:
    host = start_host(port, key="another-horse-battery-staple")
    assert "joins" in host.process.stdout.readline()
    with pytest.raises(EngineDeadError) as raised:
        first_host(port, parallel={"rank_start_timeout": 5.0})
    assert f"rank 1 on node 1 did not join at tcp://127.0.0.2:{port} within rank_start_timeout 5 s" in str(
        raised.value
    )
    assert raised.value.usage
    assert host.wait() == 1
    assert host.stderr.count("kaon: ") == 1
    assert "refuses this host; the cluster key must be the same on all hosts" in host.stderr
    assert "Traceback" not in host.stderr


@pytest.mark.slow  # The differences: tests/unit/distributed/test_cluster.py.
@pytest.mark.parametrize(
    ("differing", "sentence"),
    [
        pytest.param({"version": "0.0.9"}, "runs Kaon 0.0.9, and the first host", marks=pytest.mark.slow),
        ({"dtype": "bfloat16"}, "has dtype bfloat16, and the first host float32"),
        pytest.param(
            {"parallel": {"tensor_parallel_size": 4}},
            "has tensor_parallel_size 4, and the first host 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_host_that_differs_gets_the_difference_and_so_does_the_server(
    differing: dict[str, Any], sentence: str, port: int, start_host: Callable[..., KaonHost]
) -> None:
    host = start_host(port, **differing)
    with pytest.raises(EngineDeadError, match=rf"rank 1 on node 1 \(.+\): its host {sentence}"):
        first_host(port)
    assert host.wait() == 1
    assert f"kaon: this host {sentence}" in host.stderr
    assert "Traceback" not in host.stderr


def test_a_second_host_of_the_same_number_is_refused_and_disturbs_no_other(
    joined: Joined, start_host: Callable[..., KaonHost]
) -> None:
    # Both have joined before the second one starts.
    joined.engine.generate(["Hello"], SamplingParams(max_tokens=4), use_tqdm=False)
    core, ranks = joined.engine._core.pid, joined.host.ranks()
    second = start_host(joined.port)
    assert second.wait() == 1
    assert "node_rank is 1, but another host has already joined with this number" in second.stderr
    assert joined.engine.generate(["Hello"], SamplingParams(max_tokens=4), use_tqdm=False)[0]["finish_reason"]
    assert (joined.engine._core.pid, joined.host.ranks()) == (core, ranks)


@pytest.mark.parametrize("offset", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
def test_a_port_in_use_is_named_and_nothing_stays(offset: int, port: int) -> None:
    with (
        socket.create_server(("127.0.0.2", port + offset)),
        pytest.raises(EngineDeadError, match=f"port {port + offset} on 127.0.0.2 is taken") as raised,
    ):
        first_host(port)
    assert raised.value.usage


@pytest.mark.slow  # The error message: tests/unit/distributed/test_cluster.py.
def test_an_address_of_no_interface_here_is_refused(port: int) -> None:
    with pytest.raises(
        EngineDeadError, match=r"master_addr is 203\.0\.113\.9, which is not an address of this machine"
    ):
        first_host(port, parallel={"master_addr": "203.0.113.9"})


@pytest.mark.slow  # The error message: tests/unit/distributed/test_cluster.py.
def test_without_a_key_no_socket_listens_for_other_machines(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_KEY_ENV)
    with pytest.raises(
        EngineDeadError, match=r"master_addr is 203\.0\.113\.9, which other machines can reach, but no key"
    ):
        first_host(port, parallel={"master_addr": "203.0.113.9"})


@pytest.mark.slow  # Replicas: test_replicas_on_hosts.py.
def test_what_the_engine_cannot_load_ends_the_other_host_too(port: int, start_host: Callable[..., KaonHost]) -> None:
    host = start_host(port, max_model_len=99999999)
    with pytest.raises(EngineDeadError, match="max_model_len is 99999999"):
        first_host(port, max_model_len=99999999)
    assert host.wait() == 1
    assert "kaon: " in host.stderr
    assert "max_model_len is 99999999" in host.stderr


def test_a_host_that_no_engine_comes_to_ends_in_time(port: int, start_host: Callable[..., KaonHost]) -> None:
    host = start_host(port, parallel={"rank_start_timeout": 1.0})
    assert host.wait() == 1
    assert f"no engine core came to tcp://127.0.0.2:{port} within rank_start_timeout 1 s" in host.stderr


# -- deaths -----------------------------------------------------------------------------------------------------


def test_requests_go_on_when_a_remote_rank_is_killed(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    engine = joined.engine
    [expected] = engine.generate(["Hello"], LONG, use_tqdm=False)
    core, [rank] = engine._core.pid, joined.host.ranks()
    ids = engine.add_request(["Hello", "A"], LONG)
    until_begun(engine)
    rank.kill()
    results = engine.collect(ids)
    assert results[0]["token_ids"] == expected["token_ids"]
    assert len(results[1]["token_ids"]) == LONG.max_tokens
    until_replaced(engine, core)
    wait_gone([core, rank.pid])
    assert re.search(r"tensor-parallel rank 1 on node 1 \(.+\) was killed by SIGKILL", caplog.text)


def test_the_host_joins_again_when_the_engine_is_killed(joined: Joined) -> None:
    [expected] = joined.engine.generate(["Hello"], LONG, use_tqdm=False)
    ranks = [rank.pid for rank in joined.host.ranks()]
    ids = joined.engine.add_request(["Hello"], LONG)
    until_begun(joined.engine)
    psutil.Process(joined.engine._core.pid).kill()
    [result] = joined.engine.collect(ids)
    assert result["token_ids"] == expected["token_ids"]
    wait_gone(ranks)


@pytest.mark.slow  # Replicas: test_replicas_on_hosts.py.
def test_requests_go_on_when_a_host_is_killed_and_started_again(
    port: int, start_host: Callable[..., KaonHost], caplog: pytest.LogCaptureFixture
) -> None:
    host = start_host(port)
    with first_host(port) as engine:
        [expected] = engine.generate(["Hello"], LONG, use_tqdm=False)
        core, ranks = engine._core.pid, [rank.pid for rank in host.ranks()]
        ids = engine.add_request(["Hello"], LONG)
        until_begun(engine)
        host.process.kill()
        host = start_host(port)
        [result] = engine.collect(ids)
        assert result["token_ids"] == expected["token_ids"]
        until_replaced(engine, core)
        wait_gone([core, *ranks])
    assert host.wait() == 0
    assert re.search(r"rank 1 on node 1 \(.+\) is gone: the connection to its host has ended", caplog.text)


@pytest.mark.slow  # A harder end: the last test here.
def test_a_host_that_is_asked_to_end_leaves_no_rank(port: int, start_host: Callable[..., KaonHost]) -> None:
    host = start_host(port)
    with first_host(port, max_core_restarts=0) as engine:
        ranks = [rank.pid for rank in host.ranks()]
        assert ranks
        assert host.stop() == 0
        wait_gone(ranks)
        with pytest.raises(EngineDeadError, match=r"rank 1 on node 1 \(.+\) is gone"):
            engine.generate(["Hello"], LONG, use_tqdm=False)


@pytest.mark.slow  # Replicas: test_replicas_on_hosts.py.
def test_a_host_ends_with_a_server_that_is_asked_to_end_while_it_loads(
    port: int, start_host: Callable[..., KaonHost], start_server: Callable[..., KaonServer]
) -> None:
    host = start_host(port, **{**SETTINGS, **FIELDS})
    server = start_server(**FIELDS, parallel_config=parallel_fields(port))
    # They are started when the host joins; the first rank waits until they have loaded.
    eventually(lambda: bool(host.ranks()))
    ranks = host.ranks()
    assert server.stop() == 0
    assert "serving" not in server.process.stdout.read()
    assert host.wait() == 0
    wait_gone([rank.pid for rank in ranks])
    assert "Traceback" not in host.stderr + server.stderr


@pytest.mark.slow  # The parts of it: tests/unit/client/test_front_end_failure.py.
def test_a_host_says_why_the_server_failed_beside_an_engine_that_loads(
    port: int, start_host: Callable[..., KaonHost]
) -> None:
    host = start_host(port)
    core = CoreManager(Config.from_fields(**FIELDS, **parallel_fields(port)))
    eventually(lambda: bool(host.ranks()))
    ranks = host.ranks()
    core.fail("the tokenizer cannot be read")
    assert host.wait() == 1
    assert "kaon: the tokenizer cannot be read\n" in host.stderr
    wait_gone([rank.pid for rank in ranks])
    assert "Traceback" not in host.stderr


@pytest.mark.slow  # With their parent: test_tensor_parallel.py.
def test_ranks_end_with_a_host_that_is_stopped_and_killed(port: int, start_host: Callable[..., KaonHost]) -> None:
    host = start_host(port)
    with first_host(port, max_core_restarts=0):
        ranks = [rank.pid for rank in host.ranks()]
        host.process.send_signal(signal.SIGSTOP)
        os.kill(host.process.pid, signal.SIGKILL)
        wait_gone(ranks)
