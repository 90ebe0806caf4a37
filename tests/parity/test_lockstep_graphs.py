"""Replicas that divide experts replay graphs together: all of them, or none."""

from functools import partial
from pathlib import Path

import pytest

from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput
from engine.runner import loaded_model
from engine.runner.model_runner import ModelRunner
from engine.runner.start import start_runner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.attention import context as forward_context
from models.attention.context import set_kv_cache_data
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.ahead import answers
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt
from tests.parity.runners import load
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.thread_ranks import Meeting, at_once, thread_ranks
from tests.parity.variants import all_variants

NUM_BLOCKS = 32
SIZES = (2, 4)
PROMPTS = {0: [prompt(9), prompt(4, seed=2), prompt(21, seed=3)], 1: [prompt(5, seed=4)]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = next(each for each in all_variants() if each.architecture == "MixtralForCausalLM")
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), variant.family, **variant.overrides)


@pytest.fixture(autouse=True)
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())


class Replica:
    """One replica's runner, and the kinds of its passes."""

    def __init__(self, checkpoint: Path, parallel: TensorParallel, capture: str, *, fails: bool = False) -> None:
        how = {"cudagraph_capture_sizes": SIZES, "capture": capture}
        fields = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 64, "max_num_seqs": 8}
        config = Config.model_validate({**fields, "compilation_config": how})
        self.device = GraphDevice()
        loaded = load(checkpoint, config, parallel=parallel, device_api=self.device)
        if fails:
            self.device.capture = partial(_refuse)  # type: ignore[method-assign]
        self.runner: ModelRunner = start_runner(loaded, rendezvous=lambda: None, agree=lambda size: (NUM_BLOCKS, 8))
        self._caches = forward_context._kv_cache_data
        self.replayed: list[int] = []

    def run(self, number: int, meeting: Meeting, max_tokens: int) -> list[RequestOutput]:
        """Run all steps of this replica and the dummies between them; the graph replays of each pass are counted."""
        # The caches of a pass are a global of the process, which another thread has set.
        set_kv_cache_data(self._caches)
        runner, scheduler, reported = self.runner, Scheduler(self.runner.config), list[RequestOutput]()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens + 2 * number, ignore_eos=True)
        scheduler.extend(Sequence(tokens, 16, params, id=index) for index, tokens in enumerate(PROMPTS[number]))
        while True:
            scheduled = scheduler.schedule()
            own = (0, True) if scheduled is None else (scheduled[0].total_tokens_num, runner.can_replay(scheduled[0]))
            agreed = meeting.bring(number, own)
            if not any(tokens for tokens, _ in agreed):
                return reported
            runner.tokens_across_dp = tuple(tokens for tokens, _ in agreed)
            runner.may_replay = all(can for _, can in agreed)
            before = self.device.num_replayed
            if scheduled is None:
                runner.dummy_prefill()
            else:
                batch, _ = scheduled
                scheduler.begin_step(batch)
                reported += scheduler.read_step(runner.forward(batch))
            self.replayed.append(self.device.num_replayed - before)


def _refuse(run: object) -> None:
    raise RuntimeError("division by cucumber")


def started(checkpoint: Path, capture: str = "start", *, failing: int | None = None) -> list[Replica]:
    places = [ranks[0] for ranks in thread_ranks(1, 2, spread_experts=True)]
    return at_once(
        [partial(Replica, checkpoint, place, capture, fails=number == failing) for number, place in enumerate(places)]
    )


def run(replicas: list[Replica]) -> list[dict[int, tuple[object, ...]]]:
    meeting = Meeting(2)
    found = at_once([partial(each.run, number, meeting, 5) for number, each in enumerate(replicas)])
    return [answers(each) for each in found]


def test_decodes_of_all_replicas_replay_together_and_give_the_tokens_of_eager_ones(checkpoint: Path) -> None:
    eager = started(checkpoint, "behind")
    assert all(each.runner.graphs is None for each in eager)
    expected = run(eager)
    replicas = started(checkpoint)
    assert [each.device.num_captured for each in replicas] == [len(SIZES)] * 2
    assert run(replicas) == expected
    # The first pass has prompts. Then one replica has 3 decodes, the other 1, until dummies replace the first one's
    # rows.
    assert replicas[0].replayed == replicas[1].replayed == [0] + [1] * 6


def test_where_one_replica_captures_no_graph_none_replays(checkpoint: Path) -> None:
    replicas = started(checkpoint, failing=1)
    assert all(each.runner.graphs is not None and each.runner.graphs.captured_sizes == [] for each in replicas)
    run(replicas)
    assert not any(replicas[0].replayed + replicas[1].replayed)
