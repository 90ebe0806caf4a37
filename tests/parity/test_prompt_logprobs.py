"""Prompt log probabilities of the model runner against transformers, for any division of the prompt."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput, TokenLogprobs
from engine.runner.model_runner import ModelRunner
from engine.sampling import logprobs as room
from engine.sampling.logprobs import token_logprobs
from engine.sampling.top_k import stable_topk
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.parity.checkpoints import make_checkpoint
from tests.parity.test_worker_model_runner import runner_for

VOCAB_SIZE = 307
PROMPTS = [[(i * i + 3 * i + seed) % VOCAB_SIZE for i in range(length)] for seed, length in ((1, 40), (2, 1), (3, 23))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[torch.Tensor]:
    """transformers' log probabilities after each position. # [len(prompt), V] each"""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


class Collected(list[RequestOutput]):
    def put_nowait(self, outputs: list[RequestOutput]) -> None:
        self.extend(outputs)


def read(runner: ModelRunner, *, preempt_after: int | None = None, **fields: object) -> list[list[TokenLogprobs]]:
    """The reported log probabilities of each of `PROMPTS`, with decodes of other sequences in the same steps."""
    scheduler = Scheduler(runner.config.model_copy(update={"eos_token_id": None, **fields}))
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=4, logprobs=4)
    plain = SamplingParams(temperature=0.0, max_tokens=30)
    size = runner.config.kv_cache_block_size
    scheduler.add(Sequence([7] * 9, size, plain, id=99))
    scheduler.extend([Sequence(prompt, size, params, id=number) for number, prompt in enumerate(PROMPTS)])
    outputs, steps = Collected(), 0
    while (scheduled := scheduler.schedule()) is not None:
        batch, seqs = scheduled
        scheduler.postprocess(list(seqs.values()), runner.forward(batch), outputs)
        steps += 1
        if steps == preempt_after:
            for seq in list(scheduler.running):
                scheduler.preempt(seq)
    reported = [output for output in outputs if output.prompt_logprobs is not None]
    assert sorted(output.request_id for output in reported) == [0, 1, 2]
    return [output.prompt_logprobs or [] for output in sorted(reported, key=lambda output: output.request_id)]


def assert_equal(reported: list[list[TokenLogprobs]], expected: list[torch.Tensor]) -> None:
    for prompt, entries, reference in zip(PROMPTS, reported, expected, strict=True):
        assert [entry.token_id for entry in entries] == prompt[1:]
        for entry, row in zip(entries, reference, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            assert entry.top_logprobs == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
            assert abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= 1
            if entry.token_id in entry.top_ids:
                assert entry.rank == 1 + entry.top_ids.index(entry.token_id)
            else:
                assert entry.rank > 4


@pytest.mark.parametrize("preempt_after", [None, 3])
@pytest.mark.parametrize(("policy", "budget"), [("prefill_first", 512), ("prefill_first", 11), ("mixed", 7)])
def test_chunks_and_preemption_change_nothing(
    checkpoint: Path, expected: list[torch.Tensor], policy: str, budget: int, preempt_after: int | None
) -> None:
    fields = {"scheduling_policy": policy, "max_num_batched_tokens": budget}
    runner = runner_for(checkpoint, **fields)
    assert_equal(read(runner, preempt_after=preempt_after), expected)


def test_logits_are_computed_in_slices_of_bounded_size(
    checkpoint: Path, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_LOGITS_AT_A_TIME", 5 * VOCAB_SIZE + 1)
    runner = runner_for(checkpoint)
    computed, compute_logits = [], runner.model.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(runner.model, "compute_logits", counted)
    assert_equal(read(runner), expected)
    assert sorted(computed)[-2:] == [5, 5]
    assert sum(count == 5 for count in computed) == 39 // 5 + 22 // 5


def test_ranks_order_equal_logits_as_the_argmax_does() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -1.0]]).repeat(6, 1)
    entries = token_logprobs(logits, torch.arange(6), [6] * 6)
    assert all(type(entry.rank) is int for entry in entries)
    order = stable_topk(logits[:1], 6)[1][0].tolist()
    assert [entry.rank for entry in entries] == [1 + order.index(token) for token in range(6)]
    assert [entry.rank for entry in entries] == [5, 1, 2, 4, 3, 6]
