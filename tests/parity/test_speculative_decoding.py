"""Models whose steps verify drafts answer the same as without drafts."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.messages import RequestOutput
from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device_batch import DeviceBatch
from engine.runner.input_batch import InputBatch
from engine.runner.model_runner import ModelRunner
from engine.runner.start import run_worst_case
from engine.sampling.verification import NO_TOKEN, accepted_positions
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.speculative.drafts import Drafts
from models.attention.backend import AttentionBackend
from models.attention.triton import TritonAttentionBackend
from models.ops.cpu.runtime import load_library
from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.foreign_models import SERVED
from tests.parity.paged_model import prompt
from tests.parity.paged_torch import CapturedTorchBackend
from tests.parity.runners import rebuilt
from tests.parity.test_cpu_models import _fields
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, runner_for
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import (
    PARTLY_TORCH,
    Variant,
    all_variants,
    block_sparse,
    compressed,
    deepseek,
    gemma3,
    gpt_oss,
    lfm2,
    mamba2,
    moe,
    qwen3_5,
    qwen3_next,
)
from tests.sweeps import sweep

__all__ = ["checkpoint", "triton_kernels"]

K = 3
SPECULATIVE: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": K}}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 17, "logprobs": 2},
    {"temperature": 0.9, "seed": 4, "top_k": 30, "max_tokens": 12},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "max_tokens": 14},
    {"temperature": 0.0, "min_tokens": 5, "max_tokens": 9, "logit_bias": {3: 2.0}},
    {"temperature": 0.7, "seed": 6, "bad_words": [[5], [6, 7]], "max_tokens": 11, "logprobs": 0},
]


def sequences(vocab_size: int = 160) -> list[Sequence]:
    """One of each kind, with various lengths, which end in turn; some are short."""
    made = []
    for i, kind in enumerate(KINDS):
        params = SamplingParams(**{"ignore_eos": "min_tokens" not in kind, **kind})
        made.append(Sequence(prompt(1 + 7 * i, seed=i, vocab_size=vocab_size), 16, params, id=i))
    return made


Reported = dict[int, tuple[Any, ...]]


class Oracle:
    """Drafts the known answer, with some mistakes; counts the verified positions."""

    def __init__(self, expected: Reported, most: int) -> None:
        self._most = most
        self._expected = {seq_id: reported[0] for seq_id, reported in expected.items()}
        self._random = random.Random(1)
        self.lengths: list[int] = []

    def propose(self, seqs: Rows[Sequence], _budget: int) -> None:
        """As `Drafts` does."""
        for seq in seqs:
            known = seq.num_completion_tokens
            right = self._expected[seq.id][known : known + self._most]
            drafts = [token if self._random.random() < 0.8 else 1 for token in right]
            drafts = drafts[: min(self._random.choice([0, 1, self._most, self._most]), seq.num_useful_drafts)]
            seq.spec_token_ids = drafts
            self.lengths.append(len(drafts))


Install = Callable[..., Oracle]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let a drafter that knows the answers draft for all sequences. Returns it."""

    def install(expected: Reported, most: int = K) -> Oracle:
        made = Oracle(expected, most)
        monkeypatch.setattr(Drafts, "propose", lambda self, seqs, budget: made.propose(seqs, budget))
        return made

    return install


ARCHITECTURES = [
    pytest.param(None, id="qwen3"),
    pytest.param(moe.VARIANTS[0], id="qwen3_moe"),
    pytest.param(gemma3.VARIANTS[0], id="gemma3"),
    pytest.param(gpt_oss.VARIANTS[0], id="gpt_oss"),
    pytest.param(deepseek.VARIANTS[1], id="deepseek_v2"),
    pytest.param(next(each for each in deepseek.VARIANTS if each.overrides.get("index_topk") == 64), id="v32"),
    pytest.param(qwen3_next.VARIANTS[2], id="qwen3_next"),
    pytest.param(qwen3_5.VARIANTS[0], id="qwen3_5"),
    pytest.param(mamba2.VARIANTS[2], id="bamba"),
    pytest.param(lfm2.VARIANTS[0], id="lfm2"),
    pytest.param(block_sparse.VARIANTS[0], id="minimax_m3", marks=pytest.mark.slow),
    pytest.param(compressed.VARIANTS[1], id="deepseek_v4"),
]
OF_EACH = [
    pytest.param(variant, 1 + number % 8, id=f"{variant.architecture}, {1 + number % 8} drafts")
    for number, variant in enumerate({each.architecture: each for each in reversed(all_variants())}.values())
]
"""The first variant of each architecture, and a number of drafts."""
RECURRENT = qwen3_next.VARIANTS[0]
_SIZES_OF_OPERATORS = {"head_dim": 32, "moe_intermediate_size": 48, "vocab_size": 160}
TWO_LAYERS = RECURRENT._replace(
    overrides={"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
)


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_drafts_change_nothing_that_is_answered(
    variant: Variant | None, ahead: bool, tmp_path: Path, oracle: Install
) -> None:
    family, overrides = ("qwen3", {}) if variant is None else (variant.family, variant.overrides)
    path = make_checkpoint(tmp_path, family, **{**overrides, "vocab_size": 160})
    expected = answers(waiting(runner_for(path), sequences()))
    known = oracle(expected)
    runner = runner_for(path, **SPECULATIVE)
    if ahead:
        steps = Ahead(runner)
        assert answers(steps.run(sequences())) == expected
        scheduler = steps.scheduler
        assert scheduler.total_accepted_tokens > 5
        assert scheduler.total_draft_tokens > scheduler.total_accepted_tokens
    else:
        assert answers(waiting(runner, sequences())) == expected
    assert {0, 1, K} <= set(known.lengths)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "num_drafts"), OF_EACH)
def test_no_architecture_answers_otherwise_with_drafts_of_any_number(
    variant: Variant, num_drafts: int, dtype: torch.dtype, tmp_path: Path, oracle: Install
) -> None:
    """In chunks; in bfloat16 by the compiled operators, bit for bit."""
    if dtype is torch.bfloat16 and (variant.architecture in PARTLY_TORCH or load_library() is None):
        pytest.skip("torch rounds several tokens of a row differently from one")
    path = make_checkpoint(tmp_path, variant.family, dtype=dtype, **_fields(variant))
    fields: dict[str, Any] = {"scheduling_policy": "mixed", "max_num_batched_tokens": 40}
    plain = waiting(runner_for(path, dtype, **fields), sequences())
    known = oracle(answers(plain), num_drafts)
    verified = waiting(
        runner_for(path, dtype, speculative_config={"num_speculative_tokens": num_drafts}, **fields), sequences()
    )
    assert answers(verified) == answers(plain)
    assert dtype is torch.float32 or exact_logprobs(verified) == exact_logprobs(plain)
    assert {0, num_drafts} <= set(known.lengths)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent states."""
    path = tmp_path_factory.mktemp("recurrent")
    return make_checkpoint(path, RECURRENT.family, **{**RECURRENT.overrides, "vocab_size": 160})


@sweep(policy=["prefill_first", "mixed"], keeps_states=[False, True])
def test_drafts_beside_chunks_of_prompts_and_in_few_blocks(
    checkpoint: Path, recurrent: Path, policy: str, keeps_states: bool, oracle: Install
) -> None:
    """Rows are preempted, and continue with drafts."""
    checkpoint = recurrent if keeps_states else checkpoint
    expected = answers(waiting(runner_for(checkpoint), sequences()))
    oracle(expected)
    fields: dict[str, Any] = {"scheduling_policy": policy, "max_num_batched_tokens": 20, **SPECULATIVE}
    assert answers(waiting(runner_for(checkpoint, **fields), sequences())) == expected
    runner = runner_for(checkpoint, **fields)
    runner.config = runner.config.model_copy(update={"num_kvcache_blocks": 7})
    assert answers(Ahead(runner).run(sequences())) == expected


@pytest.mark.parametrize("stem", ["Rwkv", "Zaya"])
def test_drafts_change_nothing_where_transformers_computes_the_states(
    stem: str, tmp_path: Path, oracle: Install
) -> None:
    """Decodes of transformers' own code with different numbers of drafts, together and one by one."""
    foreign = next(each for each in SERVED if each.stem == stem)
    path = foreign.checkpoint(tmp_path, vocab_size=160)
    expected = answers(waiting(runner_for(path), sequences()))
    known = oracle(expected)
    fields: dict[str, Any] = {"scheduling_policy": "mixed", "max_num_batched_tokens": 20, **SPECULATIVE}
    assert answers(waiting(runner_for(path, **fields), sequences())) == expected
    assert {0, 1, K} <= set(known.lengths)


@pytest.mark.skipif(load_library() is None, reason="only the compiled operators give a token the same result alone")
def test_the_compiled_operators_choose_the_state_after_the_accepted_drafts(tmp_path: Path, oracle: Install) -> None:
    """For any acceptance, in batches with chunks of prompts, no bit of a log probability changes."""
    path = make_checkpoint(tmp_path, RECURRENT.family, **_SIZES_OF_OPERATORS, dtype=torch.bfloat16)
    fields: dict[str, Any] = {"scheduling_policy": "mixed", "max_num_batched_tokens": 20}
    plain = waiting(runner_for(path, torch.bfloat16, **fields), sequences())
    known = oracle(answers(plain))
    runner = runner_for(path, torch.bfloat16, **fields, **SPECULATIVE)
    assert runner.program is not None
    verified = waiting(runner, sequences())
    assert answers(verified) == answers(plain)
    assert exact_logprobs(verified) == exact_logprobs(plain)
    assert {0, 1, K} <= set(known.lengths)


def exact_logprobs(outputs: list[RequestOutput]) -> dict[int, list[float]]:
    """Log probabilities of each sequence's tokens, to be compared bit by bit."""
    found: dict[int, list[float]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(each.logprob for each in output.logprobs or ())
    return found


@pytest.mark.parametrize(
    ("backend", "keeps_states", "ahead"),
    [
        (CapturingBackend, False, False),
        (CapturedTorchBackend, False, True),
        (CapturingBackend, True, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)  # Each of their values is in a case above.
            for each in (
                (CapturingBackend, False, True),
                (CapturedTorchBackend, False, False),
                (CapturingBackend, True, False),
            )
        ),
    ],
)
def test_rows_that_verify_drafts_are_replayed(
    checkpoint: Path,
    recurrent: Path,
    backend: type[AttentionBackend],
    keeps_states: bool,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
    oracle: Install,
) -> None:
    """Rows with fewer drafts are padded with tokens that were computed before, which leave states unchanged."""
    checkpoint = recurrent if keeps_states else checkpoint
    expected = answers(waiting(runner_for(checkpoint), sequences()))
    oracle(expected)
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: backend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    runner = runner_for(checkpoint, compilation_config={"cudagraph_capture_sizes": (2, 8)}, **SPECULATIVE)
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    steps = Ahead(runner) if ahead else None
    runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
    graphs = runner.graphs
    assert graphs is not None
    assert graphs.uniform_rows is not None
    assert graphs.uniform_rows.max_len == 1 + K
    while graphs.capture_next():
        pass
    device.num_replayed, eager = 0, 0
    forward = runner.model.forward

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal eager
        eager += 1
        return forward(*arguments)

    monkeypatch.setattr(runner.model, "forward", counted)
    reported = waiting(runner, sequences()) if steps is None else steps.run(sequences())
    assert answers(reported) == expected
    # Graphs of this device are the pass itself: passes that are no replay are prompts, and drafts of the shortest one.
    assert device.num_replayed > eager - device.num_replayed
    assert told_lengths(runner) == [(length, [2, 8]) for length in (1, 4, 3, 2)]


def test_prompts_are_read_beside_rows_that_verify_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, oracle: Install
) -> None:
    """If rows are padded, the indices of all later tokens differ from the schedule."""

    def asked() -> list[Sequence]:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
        return [Sequence(prompt(9 + 20 * i, seed=i, vocab_size=160), 16, params, id=i) for i in range(4)]

    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    fields: dict[str, Any] = {"scheduling_policy": "mixed", "max_num_batched_tokens": 24}
    expected = answers(waiting(runner_for(checkpoint, **fields), asked()))
    oracle(expected)
    runner = runner_for(checkpoint, **fields, **SPECULATIVE)
    runner = rebuilt(runner, GraphDevice(), NUM_BLOCKS)
    assert runner.graphs is not None
    assert answers(waiting(runner, asked())) == expected


def test_a_device_of_wrong_graphs_is_asked_for_none_of_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner.GraphRunner, "_is_right", lambda *_: False)
    runner = runner_for(checkpoint, compilation_config={"cudagraph_capture_sizes": (2, 8)}, **SPECULATIVE)
    runner = rebuilt(runner, GraphDevice(), NUM_BLOCKS)
    assert runner.graphs is not None
    assert not runner.graphs.capture_next()
    assert told_lengths(runner) == [(length, []) for length in (1, 4, 3, 2)]


def told_lengths(runner: ModelRunner) -> list[tuple[int, list[int]]]:
    """Tokens of a row of each of a runner's graphs, and the batch sizes for which they were captured."""
    assert runner.graphs is not None
    return [(length, graphs.captured_sizes) for length, graphs in runner.graphs._runners.items()]


@requires_interpreter
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(None, id="qwen3", marks=pytest.mark.slow),  # Its attention is one of Qwen3-Next's two layers.
        pytest.param(deepseek.VARIANTS[1], id="deepseek_v2", marks=pytest.mark.slow),
        pytest.param(TWO_LAYERS, id="qwen3_next"),
    ],
)
def test_tritons_kernels_verify_drafts(
    variant: Variant | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    triton_kernels: torch.device,
    oracle: Install,
) -> None:
    """Rows with equal numbers of drafts by the kernel of decodes, others as spans."""
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    family, overrides = ("qwen3", {}) if variant is None else (variant.family, variant.overrides)
    path = make_checkpoint(tmp_path, family, **{**overrides, "vocab_size": 160})

    def few() -> list[Sequence]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1) for count in (5, 6)]
        return [Sequence(prompt(3 + 9 * i, seed=i, vocab_size=160), 16, each, id=i) for i, each in enumerate(params)]

    expected = answers(waiting(runner_for(path), few()))
    oracle(expected)
    assert answers(waiting(runner_for(path, **SPECULATIVE), few())) == expected


def test_a_warm_up_verifies_drafts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of rows up to the most in a step; and memory is measured with them."""
    runner = runner_for(checkpoint, max_num_seqs=6, **SPECULATIVE)
    seen: list[tuple[int, int]] = []
    step_inputs = InputBatch.step_inputs

    def noted(*arguments: Any) -> Any:
        inputs = step_inputs(*arguments)
        if inputs.has_drafts:
            seen.append((inputs.num_decodes, len(inputs.sampled_rows)))
        return inputs

    monkeypatch.setattr(InputBatch, "step_inputs", noted)
    monkeypatch.setattr("models.ops.triton.active", lambda: True)
    runner.warm_up()
    assert seen == [(rows, rows * (1 + K)) for rows in (1, 2, 4, 6)]
    seen.clear()
    run_worst_case(runner.loaded, 6)
    assert seen == [(6, 6 * (1 + K))]


@pytest.mark.skipif(load_library() is None, reason="only the compiled operators give a token the same result alone")
def test_drafts_change_the_fingerprint_only_where_they_may_change_answers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(acceptance: str | None) -> str:
        drafts = {"num_speculative_tokens": K, "speculative_acceptance": acceptance}
        fields = {} if acceptance is None else {"speculative_config": drafts}
        return runner_for(checkpoint, torch.bfloat16, **fields).loaded.kernels

    assert fingerprint("coupled") == fingerprint(None) != fingerprint("rejection")
    # Where a token's result depends on the other tokens of its step, drafts change answers too.
    monkeypatch.setattr(loaded_model.LoadedModel, "why_varying", "for a test")
    assert len({fingerprint(acceptance) for acceptance in (None, "coupled", "rejection")}) == 3


def test_the_positions_up_to_a_rows_first_rejected_draft_are_accepted() -> None:
    """Compared with a loop, over rows with and without drafts, of which some sample nothing or no token."""
    draw = random.Random(0)
    for _ in range(300):
        rows, last_tokens, input_ids = [], [], []
        for row in range(draw.randint(1, 5)):
            first, count = len(input_ids) + draw.randint(0, 2), draw.choice([0, 1, 1, 3])
            last_tokens += range(first, first + count)
            input_ids += [draw.randint(0, 2) for _ in range(first + max(1, count) - len(input_ids))]
            rows += [row] * count
        token_ids = [draw.choice([NO_TOKEN, 0, 1, 2]) for _ in rows]
        expected: list[int] = []
        for at, row in enumerate(rows):
            is_first = not at or rows[at - 1] != row
            follows = at - 1 in expected and token_ids[at - 1] == input_ids[last_tokens[at]]
            if token_ids[at] != NO_TOKEN and (is_first or follows):
                expected.append(at)
        if rows:
            arrays = (np.array(each) for each in (rows, last_tokens, input_ids, token_ids))
            assert accepted_positions(*arrays).tolist() == expected
