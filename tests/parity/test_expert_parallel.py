"""Experts distributed over ranks and replicas compute the same as one rank."""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from engine.config.config import Config
from engine.runner.input_batch import StepInputs
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import WarmUpRow, WarmUpStep
from engine.sampling.sampler import LaunchedTokens
from models.architectures.config import ModelConfig
from models.attention.context import DPMetadata, ForwardContext
from models.errors import CheckpointError
from models.layers import moe
from models.layers.moe import FusedMoE
from models.layers.parameter import fill_rows, pack_products, packed_of
from models.layers.routing import softmax_top_k
from models.loading.loader import load_model
from models.ops.cpu.collectives import SharedMemoryExchange, _Shape
from models.ops.cpu.program import Program
from models.ops.cpu.runtime import load_library
from models.parallel.tensor_parallel import Exchange, ExpertParallel, TensorParallel, TokenExchange
from tests.parity.checkpoints import make_checkpoint
from tests.parity.exchange_fuzz import exchange_in_processes
from tests.parity.paged_model import CPU
from tests.parity.recorded_graph import RecordedGraph
from tests.parity.runners import load as load_for_runner
from tests.parity.test_cpu_models import _fields
from tests.parity.test_cpu_operators import bf16, operators
from tests.parity.test_cpu_operators import pytestmark as needs_operators
from tests.parity.test_model_sharding import PartialResults, random
from tests.parity.test_moe import EXPERTS, HIDDEN, INNER, Whole, routed
from tests.parity.thread_ranks import Meeting, ThreadExchange, at_once, thread_ranks
from tests.parity.tolerance import assert_within
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import all_variants

__all__ = ["operators", "triton_kernels"]


WAIT_SECONDS = 300
MOST_TOKENS = 12
AtOnce: TypeAlias = Callable[[list[Callable[[], torch.Tensor]]], list[torch.Tensor]]


@contextmanager
def open_memory() -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield descriptor
    os.close(descriptor)


@contextmanager
def memory_of(num_ranks: int, num_replicas: int) -> Iterator[list[list[SharedMemoryExchange]]]:
    """Exchanges through shared memory, by rank and replica."""
    library = load_library()
    assert library is not None
    with ExitStack() as stack:
        files = [stack.enter_context(open_memory()) for _ in range(num_ranks)]
        yield [
            [
                SharedMemoryExchange(library, replica, num_replicas, file, MOST_TOKENS)
                for replica in range(num_replicas)
            ]
            for file in files
        ]


def spread(
    num_ranks: int,
    num_replicas: int,
    make: Callable[[TensorParallel], Any],
    exchanges: Sequence[Sequence[Exchange]] | None = None,
) -> list[list[Any]]:
    """The results of `make` for each rank of each replica; values that ranks would sum stay separate.

    `exchanges`: by rank and replica; None: those of threads that take turns.
    """
    places = thread_ranks(num_ranks, num_replicas, spread_experts=True)
    parts = PartialResults() if num_ranks > 1 else None

    def made(rank: int, replica: int) -> Any:
        place = replace(places[replica][rank], collectives=parts)
        if exchanges is not None:
            place = replace(place, experts=ExpertParallel(replica, num_replicas, exchanges[rank][replica]))
        return make(place)

    return [[made(rank, replica) for rank in range(num_ranks)] for replica in range(num_replicas)]


def side_by_side(calls: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result(WAIT_SECONDS) for each in [threads.submit(call) for call in calls]]


@pytest.fixture(autouse=True)
def step(monkeypatch: pytest.MonkeyPatch) -> ForwardContext:
    """The forward context of the step."""
    context = ForwardContext(None, None)  # type: ignore[arg-type] # for attention
    monkeypatch.setattr(moe, "get_forward_context", lambda: context)
    return context


def layer(whole: Whole, parallel: TensorParallel, *, stacked: bool) -> FusedMoE:
    made = FusedMoE(HIDDEN, INNER, EXPERTS, bias=True, parallel=parallel)
    whole.fill(made, stacked=stacked)
    return made


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_whole_experts_add_up_to_the_whole_layer(size: int, stacked: bool) -> None:
    whole, inputs = Whole(bias=True), routed(7)
    [ranks] = spread(size, 1, lambda parallel: layer(whole, parallel, stacked=stacked))
    assert [len(rank.w13) for rank in ranks] == [EXPERTS // size] * size
    assert all(rank.w13.isfinite().all() for rank in ranks)
    total = torch.stack([rank(*inputs) for rank in ranks]).sum(0)
    assert_within(total, *whole.with_bound(*inputs))


def check_layers(
    whole: Whole, replicas: list[list[FusedMoE]], step: ForwardContext, counts: tuple[int, ...], call: AtOnce
) -> None:
    """Each replica's tokens get the whole layer's results. 0 in `counts`: a dummy, whose result must be finite."""
    step.dp_metadata = DPMetadata(counts)
    inputs = [routed(max(1, count)) for count in counts]
    outputs = iter(
        call(
            [
                partial(rank, *mine)  # all ranks of a replica have its tokens
                for ranks, mine in zip(replicas, inputs, strict=True)
                for rank in ranks
            ]
        )
    )
    for ranks, count, mine in zip(replicas, counts, inputs, strict=True):
        found = torch.stack([next(outputs) for _ in ranks]).sum(0)
        assert found.isfinite().all()
        if count:
            assert_within(found, *whole.with_bound(*mine))


@pytest.mark.parametrize(("size", "num_replicas"), [(1, 2), (1, 3), (2, 3), (3, 2)])
def test_tokens_reach_the_experts_of_other_replicas_and_come_back(
    size: int, num_replicas: int, step: ForwardContext
) -> None:
    """Each replica has any number of tokens, or only dummies."""
    whole = Whole(bias=True)
    replicas = spread(size, num_replicas, lambda parallel: layer(whole, parallel, stacked=False))
    for counts in ((7, 1, 12), (1, 0, 3), (0, 5, 0)):
        check_layers(whole, replicas, step, counts[:num_replicas], at_once)


@needs_operators
@pytest.mark.parametrize(("size", "num_replicas"), [(1, 2), (1, 3), (2, 3)])
def test_tokens_reach_them_through_memory_that_replicas_share(
    size: int, num_replicas: int, step: ForwardContext
) -> None:
    """In float32, with torch's products. `tests.parity.exchange_fuzz` tests the operators."""
    whole, replicas = Whole(bias=True), []
    with memory_of(size, num_replicas) as exchanges:
        replicas = spread(size, num_replicas, lambda parallel: layer(whole, parallel, stacked=False), exchanges)
        for counts in ((7, 1, 12), (1, 0, 3), (0, 5, 0), (0, 0, 0), (12, 12, 12)):
            check_layers(whole, replicas, step, counts[:num_replicas], side_by_side)


def test_what_is_beside_the_experts_is_added_once(step: ForwardContext) -> None:
    step.dp_metadata = DPMetadata((5, 5))
    whole, (hidden, weights, ids) = Whole(bias=True), routed(5)
    shared, gate = random(5, HIDDEN) + 1, random(5, 1)
    replicas = spread(1, 2, lambda parallel: layer(whole, parallel, stacked=True))
    found = at_once([lambda rank=rank: rank(hidden, weights, ids, shared, gate) for [rank] in replicas])
    of_experts, bound = whole.with_bound(hidden, weights, ids)
    for output in found:
        assert_within(output, of_experts + shared * gate.sigmoid(), bound)


class OneReplica(TokenExchange):
    """An exchange of operations alone: all replicas have the tokens of this one, and give back what it computes."""

    def _all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.repeat(self._num_replicas, *[1] * (rows.dim() - 1))

    def _all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()


@requires_interpreter
@pytest.mark.parametrize("num_dummies", [0, 1])
def test_a_layer_by_kernels_reads_nothing_from_the_device(
    num_dummies: int, step: ForwardContext, triton_kernels: torch.device
) -> None:
    """So that a graph captures it, whose replay computes new tokens by other experts."""
    step.dp_metadata = None if num_dummies == 0 else DPMetadata((0, 5))
    parallel = TensorParallel(experts=ExpertParallel(0, 2, OneReplica(0, 2)))
    made = layer(Whole(bias=True), parallel, stacked=False).bfloat16()

    def inputs(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        hidden, weights, ids = routed(5)
        return [hidden.bfloat16(), weights, ids.flip(0) if seed else ids]

    with torch.inference_mode():
        given, out = inputs(0), torch.empty(5, HIDDEN, dtype=torch.bfloat16)
        graph = RecordedGraph(lambda: out.copy_(made(*given)))
        for part, other in zip(given, inputs(1), strict=True):
            part.copy_(other)
        graph.replay()
        assert torch.equal(out, made(*given))
        assert out.isfinite().all()


def test_experts_do_not_work_for_dummies(step: ForwardContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dummy's output is unused, but finite."""
    computed: list[int] = []
    products = moe.grouped_linear

    def noted(rows: torch.Tensor, weight: Any, bias: Any, counts: torch.Tensor, **how: Any) -> torch.Tensor:
        computed.append(int(counts.sum()))
        return products(rows, weight, bias, counts, **how)

    monkeypatch.setattr(moe, "grouped_linear", noted)
    whole = Whole(bias=True)
    replicas = spread(1, 2, lambda parallel: layer(whole, parallel, stacked=False))
    step.dp_metadata = DPMetadata((0, 0))
    outputs = at_once([lambda rank=rank: rank(*routed(1)) for [rank] in replicas])
    assert all(output.isfinite().all() for output in outputs)
    assert computed == [0] * 4


@needs_operators
@pytest.mark.usefixtures("operators")
class TestByOperators:
    def parts(self, size: int, num_replicas: int) -> tuple[FusedMoE, list[list[FusedMoE]]]:
        """A layer in bfloat16, and the same layer distributed."""
        gate_up, down = bf16(8, 128, 64), bf16(8, 64, 64, seed=1)

        def make(parallel: TensorParallel) -> FusedMoE:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            made = FusedMoE(64, 64, 8, parallel=parallel)
            torch.set_default_dtype(before)
            pack_products(made)
            for place, expert in enumerate(made.local_experts):
                fill_rows(made.w13, 0, gate_up[expert], place)
                fill_rows(made.w2, 0, down[expert], place)
            assert packed_of(made.w13) is not None
            return made

        return make(TensorParallel()), spread(size, num_replicas, make)

    def inputs(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return bf16(count, 64, seed=seed), *softmax_top_k(bf16(count, 8, seed=seed + 1).float(), 3, renormalize=True)

    def test_a_token_gets_the_same_bits_from_experts_of_other_replicas(self, step: ForwardContext) -> None:
        """Independent of the tokens of other replicas."""
        whole, replicas = self.parts(1, 2)
        mine, shared = self.inputs(9, 5), bf16(9, 64, seed=8)
        near, outputs = whole(*mine, shared).float(), []
        for others in (1, 30):
            theirs = self.inputs(others, 11)
            step.dp_metadata = DPMetadata((9, others))
            found, _ = at_once([partial(replicas[0][0], *mine, shared), partial(replicas[1][0], *theirs)])
            assert (found.float() - near).abs().max() <= 0.01 * near.abs().max()
            outputs.append(found)
        assert torch.equal(*outputs)

    def test_ranks_of_one_replica_add_up(self) -> None:
        whole, [ranks] = self.parts(4, 1)
        mine = self.inputs(9, 5)
        found = torch.stack([rank(*mine).float() for rank in ranks]).sum(0)
        expected = whole(*mine).float()
        assert (found - expected).abs().max() <= 0.01 * expected.abs().max()


@needs_operators
def test_processes_exchange_any_number_of_tokens_until_one_leaves() -> None:
    """With the operators, compared with a replica that has all experts: the same bits. Waiting replicas are notified
    of one that leaves."""
    assert exchange_in_processes(25)


@needs_operators
def test_what_replicas_share_is_committed_before_a_step_writes_to_it() -> None:
    with memory_of(1, 3) as [replicas]:
        for replica in replicas:
            replica._room(_Shape(4096, torch.bfloat16, 2, range(EXPERTS), range(EXPERTS)))
        found = os.fstat(replicas[0]._descriptor)
        assert found.st_size > 3 * MOST_TOKENS * 4096 * 2
        assert found.st_blocks * 512 >= found.st_size


@needs_operators
def test_memory_that_the_system_refuses_is_reported_in_a_sentence() -> None:
    """Not by SIGBUS in the first step that writes to it."""
    with memory_of(1, 3) as [[replica, *_]]:
        fcntl.fcntl(replica._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        sentence = "share 1 MiB of memory for steps of max_num_batched_tokens 12, which the system refuses"
        with pytest.raises(MemoryError, match=sentence):
            replica._room(_Shape(8192, torch.bfloat16, 2, range(EXPERTS), range(EXPERTS)))


@needs_operators
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "DeepseekV2ForCausalLM"])
def test_the_exchange_is_part_of_the_recorded_step(tmp_path: Path, architecture: str, step: ForwardContext) -> None:
    """This gives the bits of a rank without an exchange. Here the exchange is with itself alone."""
    variant = next(each for each in all_variants() if each.architecture == architecture)
    path = make_checkpoint(tmp_path, variant.family, dtype=torch.bfloat16, **_fields(variant))
    config = Config(num_kvcache_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
    library = load_library()
    assert library is not None
    found = []
    step.dp_metadata = DPMetadata((1,))  # The context of operators that run one by one.
    with open_memory() as memory:
        exchange = SharedMemoryExchange(library, 0, 1, memory, config.max_num_batched_tokens)
        for experts in (None, ExpertParallel(0, 1, exchange)):
            parallel = TensorParallel(experts=experts)
            runner = ModelRunner(load_for_runner(path, config, torch.bfloat16, parallel=parallel), 8)
            assert runner.program is not None
            found += [states_of(runner, using) for using in (runner.program, None)]
        runner.tokens_across_dp = (0,)
        runner.dummy_prefill()
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_operators
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "DeepseekV2ForCausalLM"])
def test_whole_experts_of_one_replica_are_part_of_the_recorded_step(tmp_path: Path, architecture: str) -> None:
    """This gives the same bits as operators that run one by one."""
    variant = next(each for each in all_variants() if each.architecture == architecture)
    path = make_checkpoint(tmp_path, variant.family, dtype=torch.bfloat16, **_fields(variant))
    config = Config(num_kvcache_blocks=8, max_num_seqs=4)
    for rank in range(2):
        parallel = TensorParallel(rank, 2, PartialResults(), ExpertParallel())
        runner = ModelRunner(load_for_runner(path, config, torch.bfloat16, parallel=parallel), 8)
        program = runner.program
        assert program is not None
        recorded, alone = (states_of(runner, using) for using in (program, None))
        assert torch.equal(recorded, alone)


def states_of(runner: ModelRunner, program: Program | None) -> torch.Tensor:
    """The hidden state of a prompt's last token, by a recorded step or by single operators."""
    seen: list[torch.Tensor] = []
    choose = runner.head.logits_or_tokens

    def note(hidden: torch.Tensor, inputs: StepInputs, *, by_shard: bool) -> torch.Tensor | LaunchedTokens:
        seen.append(hidden.clone())
        return choose(hidden, inputs, by_shard=by_shard)

    runner.program = program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.head, "logits_or_tokens", note)
        runner.run_dummy_step(WarmUpStep([WarmUpRow(23, 23)]))
    [hidden] = seen
    return hidden


@pytest.mark.parametrize(
    ("size", "num_replicas", "sentence"),
    [
        (4, 1, "a layer has 6 experts, which 4 ranks do not divide evenly; choose sizes that do, or leave enable_exp"),
        (2, 2, "a layer has 6 experts, which 2 ranks in each of 2 replicas do not divide evenly"),
        (1, 4, "a layer has 6 experts, which 1 rank in each of 4 replicas do not divide evenly"),
    ],
)
def test_experts_that_the_ranks_do_not_divide_are_refused(size: int, num_replicas: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        spread(size, num_replicas, lambda parallel: FusedMoE(HIDDEN, INNER, EXPERTS, parallel=parallel))


def test_replicas_without_an_exchange_or_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas is 2, but there is no exchange between them"):
        ExpertParallel(0, 2)
    with pytest.raises(ValueError, match="replica is 2; it must be between 0 and 1"):
        ExpertParallel(2, 2, ThreadExchange(Meeting(2), 0))


# -- loading ----------------------------------------------------------------------------------------------------


def load(path: Path, parallel: TensorParallel) -> Any:
    config = ModelConfig.from_checkpoint(path)
    return load_model(path, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Glm4MoeForCausalLM"])
def test_a_rank_reads_its_own_experts_alone(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = next(each for each in all_variants() if each.architecture == architecture)
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    seen: list[str] = []
    inner = FusedMoE._load_down

    def note(self: FusedMoE, parameter: Any, loaded: torch.Tensor, shard: Any) -> None:
        seen.append(shard)
        inner(self, parameter, loaded, shard)

    monkeypatch.setattr(FusedMoE, "_load_down", note)
    for rank in range(2):
        seen.clear()
        model = load(path, TensorParallel(rank, 2, PartialResults(), ExpertParallel()))
        layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
        mine = [expert for each in layers for expert in each.local_experts]
        assert sorted(expert for expert, _ in seen) == sorted(mine)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(CheckpointError, match=r"enable_expert_parallel is set, but Qwen3ForCausalLM of .* has no exp"):
        load(path, TensorParallel(0, 2, PartialResults(), ExpertParallel()))
