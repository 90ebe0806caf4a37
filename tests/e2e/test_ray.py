"""Ranks as actors of a Ray cluster: two nodes in one machine. Needs the extra `ray`."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client.llm_engine import EngineDeadError, LLMEngine
from engine.config.config import ParallelConfig
from engine.sampling_params import SamplingParams
from tests.e2e.engines import until_replaced
from tests.e2e.kaon_host import FIELDS, free_ports
from tests.e2e.processes import wait_gone
from tests.e2e.test_tensor_parallel import answers, engine_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (kaon[ray])")

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
_ACTOR = "ray::_HostActor"

_TWO_NODES = (
    "from ray.cluster_utils import Cluster\n"
    "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1})\n"
    "cluster.add_node(num_cpus=1)\n"
    "cluster.wait_for_nodes()\n"
    "print(cluster.address, flush=True)\n"
    "input()\n"
    "cluster.shutdown()"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster of two nodes with capacity for one rank each."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", _TWO_NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address, "the cluster did not start"
    yield address
    process.communicate("\n", timeout=60)


def on_ray(**parallel: Any) -> LLMEngine:
    fields = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "ray_placement": "STRICT_SPREAD",
        "master_port": free_ports("0.0.0.0"),
        "rank_start_timeout": 60.0,
        **parallel,
    }
    return LLMEngine(parallel_config=ParallelConfig.model_validate(fields), **FIELDS)


def actors() -> list[int]:
    """Ray's processes that are ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(_ACTOR.encode()):
                found.append(int(entry.name))
    return found


@needs_ray
def test_two_nodes_answer_what_one_rank_does_and_an_actor_s_death_is_a_rank_s(
    cluster: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with engine_of(1) as engine:
        expected = answers(engine)
        [whole] = engine.generate(["Hello"], LONG, use_tqdm=False)
    with on_ray() as engine:
        assert answers(engine) == expected
        [actor] = actors()
        ids = engine.add_request(["Hello"], LONG)
        os.kill(actor, 9)
        [result] = engine.collect(ids)
        assert result["token_ids"] == whole["token_ids"]
        [another] = actors()
        assert another != actor
    wait_gone([another])
    assert "tensor-parallel rank 1 on node 1 (" in capfd.readouterr().err


@needs_ray
def test_two_nodes_have_a_replica_each_and_an_actor_s_death_is_its_replica_s(
    cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with engine_of(1) as engine:
        expected = answers(engine)
        [whole] = engine.generate(["Hello"], LONG, use_tqdm=False)
    with on_ray(tensor_parallel_size=1, data_parallel_size=2) as engine:
        assert answers(engine) == expected
        [actor] = actors()
        cores = engine._core.pids
        assert psutil.Process(cores[1]).ppid() == actor
        ids = engine.add_request(["Hello"] * 4, LONG)
        assert all(replica.live for replica in engine._core._replicas), "each computes some"
        os.kill(actor, 9)
        wait_gone([cores[1]])
        assert [result["token_ids"] for result in engine.collect(ids)] == [whole["token_ids"]] * 4
        # They may have moved to the other replica, and ended there before this one is ready again.
        until_replaced(engine, cores[1])
        [another] = actors()
        assert another != actor
        assert engine._core.pids[0] == cores[0]
        assert psutil.Process(engine._core.pids[1]).ppid() == another
    wait_gone([another])
    assert "engine core 1 on node 1 (" in caplog.text


@needs_ray
def test_a_cluster_without_room_is_reported_in_a_sentence(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    with pytest.raises(EngineDeadError, match="the Ray cluster had no room for 4 ranks of 1 CPU each") as raised:
        on_ray(tensor_parallel_size=4, rank_start_timeout=1.0)
    assert raised.value.usage


def test_without_a_cluster_the_engine_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulated by a module that finds no cluster: a real one would find that of another test."""
    (tmp_path / "ray" / "util" / "scheduling_strategies").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text("def init(**_): raise ConnectionError('none')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(EngineDeadError, match="no Ray cluster runs on this machine"):
        on_ray()


def test_without_ray_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(EngineDeadError, match=r"Ray is not installed; install kaon\[ray\], or choose mp"):
        on_ray()
