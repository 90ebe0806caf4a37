"""Replicas that divide experts among themselves, as real processes: they step, sleep, die and end together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client.llm_engine import EngineDeadError, LLMEngine
from engine.config.config import Config, ParallelConfig
from engine.distributed import core_process
from engine.sampling_params import SamplingParams
from tests.e2e.engines import until_begun, until_replaced
from tests.e2e.kaon_server import START_SECONDS
from tests.e2e.processes import until_idle, wait_gone
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt
from tests.parity.variants import all_variants

pytestmark = pytest.mark.usefixtures("warm_children")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
_IN_PARTS: dict[str, Any] = {"scheduling_policy": "mixed", "max_num_batched_tokens": 16}
PROMPTS = [prompt(37), prompt(3, seed=7), prompt(21, seed=6), prompt(50, seed=5), prompt(9, seed=4), prompt(2, seed=3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts, of a size that the compiled operators support."""
    variant = next(each for each in all_variants() if each.architecture == "Qwen3MoeForCausalLM")
    sizes = dict.fromkeys(("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size"), 64)
    overrides = {**variant.overrides, **sizes, "max_position_embeddings": 512}
    return make_checkpoint(tmp_path_factory.mktemp("moe"), variant.family, **overrides)


def engine_of(
    checkpoint: Path,
    replicas: int,
    *,
    size: int = 1,
    dtype: str = "float32",
    parallel: dict[str, Any] | None = None,
    **fields: Any,
) -> LLMEngine:
    spread = {"enable_expert_parallel": replicas * size > 1, "data_parallel_placement": "round_robin"}
    fields = {"num_kvcache_blocks": 128, "max_num_seqs": 16, "cpu_threads": 1, "device": "cpu", **fields}
    return LLMEngine(
        str(checkpoint),
        parallel_config=ParallelConfig.model_validate(
            {"data_parallel_size": replicas, "tensor_parallel_size": size, **spread, **(parallel or {})}
        ),
        dtype=dtype,
        generation_config="none",
        **fields,
    )


def tokens(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [result["token_ids"] for result in engine.generate(prompts, params, use_tqdm=False)]


def run_faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Run the replicas of the next engine with a fault."""
    monkeypatch.setattr(core_process, "CORE_MODULE", "faulty_replicas")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAULTY_REPLICA", fault)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[LLMEngine]:
    """One rank that holds all experts."""
    with engine_of(checkpoint, 1) as engine:
        yield engine


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[LLMEngine]:
    """Two replicas, which tests may kill; others are started. Steps have few tokens, so that prompts are computed in
    chunks, and each step is launched before the previous one is read."""
    with engine_of(checkpoint, 2, async_scheduling="on", max_core_restarts=100, **_IN_PARTS) as engine:
        yield engine


def check_tokens(engine: LLMEngine, expected: list[list[int]]) -> None:
    """One replica idle; both busy, prompts next to decodes."""
    for index in range(2):
        assert tokens(engine, PROMPTS[index : index + 1]) == expected[index : index + 1]
    assert tokens(engine, PROMPTS) == expected
    # While some decode, others begin.
    ids = engine.add_request(PROMPTS[:1], LONG)
    assert tokens(engine, PROMPTS) == expected
    assert engine.collect(ids)[0]["token_ids"][: GREEDY.max_tokens] == expected[0]


def test_a_request_gets_the_tokens_of_one_rank_whoever_else_is_served(alone: LLMEngine, two: LLMEngine) -> None:
    check_tokens(two, tokens(alone, PROMPTS))


@pytest.mark.slow  # The exchange by itself: tests/parity/test_expert_parallel.py.
@pytest.mark.parametrize(
    ("size", "collectives"),
    [(1, "gloo"), (2, "shared_memory"), (2, "gloo")],
)
def test_so_it_does_by_gloo_and_over_several_ranks(
    checkpoint: Path, alone: LLMEngine, size: int, collectives: str
) -> None:
    parallel = {"cpu_collectives": collectives}
    with engine_of(checkpoint, 2, size=size, parallel=parallel, **_IN_PARTS) as engine:
        check_tokens(engine, tokens(alone, PROMPTS))


@pytest.mark.slow  # One layer: tests/parity/test_expert_parallel.py.
def test_in_bfloat16_the_tokens_are_those_of_one_rank_too(checkpoint: Path) -> None:
    """Each expert's product is computed by one rank, and a token's results are added in its own order."""
    with engine_of(checkpoint, 1, dtype="bfloat16") as engine:
        expected = tokens(engine, PROMPTS)
    with engine_of(checkpoint, 2, dtype="bfloat16") as engine:
        assert tokens(engine, PROMPTS) == expected


def test_dummies_of_an_idle_replica_leave_its_prefix_cache_alone(alone: LLMEngine, two: LLMEngine) -> None:
    expected = tokens(alone, PROMPTS[:1])
    for _ in range(4):  # In turn: each replica has cached the prompt, and has then computed dummies.
        assert tokens(two, PROMPTS[:1]) == expected


def test_idle_replicas_use_no_processor(two: LLMEngine) -> None:
    tokens(two, PROMPTS)
    processes = [psutil.Process(pid) for pid in two._core.pids]
    until_idle(processes)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_requests_of_all_replicas_go_on_when_one_is_killed(
    two: LLMEngine, alone: LLMEngine, victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(alone, PROMPTS, LONG)
    before = two._core.pids
    ids = two.add_request(PROMPTS, LONG)
    until_begun(two)
    os.kill(before[victim], signal.SIGKILL)
    assert [result["token_ids"] for result in two.collect(ids)] == expected
    wait_gone(before)
    for pid in before:
        until_replaced(two, pid)
    assert tokens(two, PROMPTS, GREEDY) == [each[:24] for each in expected]
    assert f"engine core {victim} was killed by SIGKILL; another is started" in caplog.text
    assert f"replica {victim}, with which this one computes in lockstep, is gone" in caplog.text


@pytest.mark.slow  # While they compute: the test above.
def test_an_idle_replica_that_is_killed_takes_the_others_along_and_all_serve_again(
    two: LLMEngine, alone: LLMEngine
) -> None:
    expected = tokens(alone, PROMPTS[:2])
    assert tokens(two, PROMPTS[:2]) == expected
    before = two._core.pids
    os.kill(before[1], signal.SIGKILL)
    wait_gone(before)
    assert tokens(two, PROMPTS[:2]) == expected


@pytest.mark.slow  # Independent replicas: test_data_parallel.py.
def test_a_replica_that_is_killed_while_all_start_again_is_waited_for(two: LLMEngine, alone: LLMEngine) -> None:
    """Replicas that wait for it learn that it will not answer, and connect to the next one."""
    expected = tokens(alone, PROMPTS[:2])
    first = two._core.pids[0]
    os.kill(first, signal.SIGKILL)
    ids = two.add_request(PROMPTS[:2], GREEDY)
    deadline = time.monotonic() + START_SECONDS
    while two._core.pids[0] == first:
        assert time.monotonic() < deadline, "no other core was started"
        two._core._wait(time.monotonic() + 0.1)
    os.kill(two._core.pids[0], signal.SIGKILL)
    assert [result["token_ids"] for result in two.collect(ids)] == expected


@pytest.mark.slow  # The parts of it: tests/unit/client/test_supervisor_stalls.py.
def test_a_stopped_idle_replica_delays_others_for_a_bounded_time(two: LLMEngine, alone: LLMEngine) -> None:
    expected = tokens(alone, PROMPTS[:1], LONG)
    before = two._core.pids
    ids = two.add_request(PROMPTS[:1], LONG)
    (idle,) = (replica.number for replica in two._core._replicas if not replica.live)
    os.kill(before[idle], signal.SIGSTOP)
    assert [result["token_ids"] for result in two.collect(ids)] == expected
    assert not set(before) & set(two._core.pids)


@pytest.mark.slow  # The parts of it: tests/unit/core/test_dp_engine_core.py.
@pytest.mark.parametrize(
    ("fault", "place"),
    [("raise", 0), ("raise", len(PROMPTS)), ("hang", len(PROMPTS))],
)
def test_a_request_that_no_step_can_compute_ends_alone(
    checkpoint: Path, alone: LLMEngine, monkeypatch: pytest.MonkeyPatch, fault: str, place: int
) -> None:
    """Its replica dies of it twice, together with the other one, whose requests are not suspected, nor are new ones.

    The same holds if it hangs, and the other one with it, which waits in the middle of a pass.
    """
    expected = tokens(alone, PROMPTS)
    guilty_token = (set(range(3, 300)) - {token for tokens in (*PROMPTS, *expected) for token in tokens}).pop()
    run_faulty(monkeypatch, f"{fault}:{guilty_token}")
    with engine_of(checkpoint, 2, stall_timeout=3.0 if fault == "hang" else 60.0) as engine:
        ids = engine.add_request([*PROMPTS[:place], [5, guilty_token, 6], *PROMPTS[place:]], GREEDY)
        results = engine.collect(ids)
        guilty = results.pop(place)
        assert [result["token_ids"] for result in results] == expected
        assert guilty["finish_reason"] == "error"


@pytest.mark.slow  # Ends of replicas: test_data_parallel.py.
def test_busy_replicas_end_together_with_an_output_for_each_request(checkpoint: Path) -> None:
    with engine_of(checkpoint, 2) as engine:
        pids = engine._core.pids
        ids = engine.add_request(PROMPTS, LONG)
        until_begun(engine)
        engine._core.shutdown()
        assert not engine._core.live
        results = engine.collect(ids)
    assert {result["finish_reason"] for result in results} <= {"abort", "error", "length"}
    wait_gone(pids)


@pytest.mark.slow  # Ranks: test_tensor_parallel.py; independent replicas: test_data_parallel_serving.py.
def test_replicas_end_with_a_parent_that_is_killed(checkpoint: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.e2e.test_expert_parallel import engine_of\n"
        "engine = engine_of(Path(sys.argv[1]), 2)\nprint(*engine._core.pids, flush=True)\ninput()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    wait_gone(pids)


# -- what cannot be served --------------------------------------------------------------------------------------


@pytest.mark.slow  # The error message: tests/parity/test_expert_parallel.py.
@pytest.mark.parametrize(
    ("replicas", "size", "sentence"),
    [
        (3, 1, "a layer has 8 experts, which 1 rank in each of 3 replicas do not divide evenly; choose sizes that do"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_in_a_sentence(
    checkpoint: Path, replicas: int, size: int, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineDeadError, match=sentence) as raised:
        engine_of(checkpoint, replicas, size=size)
    assert raised.value.usage
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow  # The error message: tests/parity/test_expert_parallel.py.
def test_a_model_without_experts_is_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDeadError, match=r"Qwen3ForCausalLM of .* has no experts; leave it out") as raised:
        LLMEngine(
            parallel_config=ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
            device="cpu",
            cpu_threads=1,
            num_kvcache_blocks=64,
            dtype="float32",
        )
    assert raised.value.usage
    assert "Traceback" not in capfd.readouterr().err


def test_expert_parallelism_with_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel is set, but there is one rank to hold the experts"):
        Config(parallel_config=ParallelConfig(enable_expert_parallel=True))


@pytest.mark.slow  # A rank: test_tensor_parallel.py.
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("1:absent", "replica 1 did not meet replica 0 within rank_start_timeout 1 s"),
        pytest.param("1:bug", "engine core 1.*: ZeroDivisionError: division by cucumber", marks=pytest.mark.slow),
    ],
)
def test_a_replica_that_cannot_start_is_reported_in_a_sentence_and_leaves_nothing(
    checkpoint: Path, fault: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_faulty(monkeypatch, fault)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineDeadError, match=sentence):
        engine_of(checkpoint, 2, parallel={"rank_start_timeout": 1.0 if "absent" in fault else 60.0})
    wait_gone([child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before])
