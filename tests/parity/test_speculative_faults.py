"""Drafts must not keep a step from being replayed, lose tokens before a refusal, or make prompts wait."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import ScheduledBatchOutput
from engine.client.llm_engine import LLMEngine
from engine.config.config import Config, SpeculativeConfig
from engine.core.scheduler import Scheduler
from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.speculative.drafts import Drafts
from tests.parity.ahead import answers, waiting
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.runners import rebuilt
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import checkpoint, runner_for

__all__ = ["checkpoint"]


def test_rows_that_a_graph_takes_without_drafts_are_replayed_with_them_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 rows: 64 sampled tokens have no room for 3 drafts of each, and graphs of drafts end at 64 // 4 = 16 rows."""
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    fields: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}}
    runner = runner_for(checkpoint, max_num_seqs=24, max_num_batched_tokens=1024, **fields)
    device = GraphDevice()
    runner = rebuilt(runner, device, 128)
    graphs = runner.graphs
    assert graphs is not None
    while graphs.capture_next():
        pass
    seen: list[tuple[int, int, int]] = []
    size_for = graphs.size_for

    def noted(inputs: Any) -> int:
        size = size_for(inputs)
        if inputs.num_decodes:
            seen.append((len(inputs.slots), len(inputs.input_ids), size))
        return size

    monkeypatch.setattr(graphs, "size_for", noted)
    runner.config = runner.config.model_copy(update={"num_kvcache_blocks": 127})
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={7: 100.0})
    waiting(runner, [Sequence([7] * 8, 16, params, id=i) for i in range(20)])
    assert [step for step in seen if not step[2]] == [], "(rows, tokens computed, rows of the graph): 0 is eager"
    assert all(tokens <= 64 for _, tokens, _ in seen), "no more are computed than may be chosen"


@pytest.mark.parametrize(
    "drafts", [pytest.param({}, marks=pytest.mark.slow), {"num_speculative_tokens": 4, "prompt_lookup_min": 1}]
)
def test_the_prefix_before_a_refused_position_is_reported(drafts: dict[str, Any]) -> None:
    with LLMEngine(num_kvcache_blocks=64, **drafts) as engine:
        (one,) = engine.io_processor.tokenize("1")[-1:]
        params = {"temperature": 0.0, "max_tokens": 9, "allowed_token_ids": [one], "bad_words": [[one] * 3]}
        (stopped,) = engine.generate([[one] * 8], SamplingParams(**params, stop_strings=["11"]), use_tqdm=False)
        (refused,) = engine.generate([[one] * 8], SamplingParams(**params), use_tqdm=False)
    assert (stopped["finish_reason"], stopped["token_ids"]) == ("stop", [one, one])
    assert (refused["finish_reason"], refused["token_ids"]) == ("error", [one, one])


def test_a_step_of_drafts_without_memory_costs_drafts_and_no_prompts() -> None:
    speculative = SpeculativeConfig(prompt_lookup_min=1)
    config = Config(num_kvcache_blocks=200, max_num_batched_tokens=2048, speculative_config=speculative)
    scheduler = Scheduler(config)
    seqs = [Sequence([1, 2] * 8, 16, SamplingParams(max_tokens=50), id=i) for i in range(12)]
    scheduler.extend(seqs)
    assert scheduler.schedule() is not None
    scheduler.postprocess(seqs, ScheduledBatchOutput(dict.fromkeys(range(12), (1,))))
    batch, rows = scheduler.schedule()  # type: ignore[misc]
    assert batch.total_tokens_num == 60
    scheduler.retract(rows.values())
    assert scheduler.shrink_steps(batch.total_tokens_num, len(rows))
    assert scheduler.limits.num_tokens == 2048


@pytest.mark.parametrize(("dtype", "operators"), [("bfloat16", "auto"), ("bfloat16", False), ("float32", False)])
def test_a_rejected_draft_with_non_finite_values_affects_no_other_row(
    dtype: str, operators: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position is after those that count: masked values are multiplied by 0, and 0 times NaN is NaN."""
    path, broken = make_checkpoint(tmp_path, "qwen3", vocab_size=300, tie_word_embeddings=False), 299
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][broken] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    fields: dict[str, Any] = {} if operators == "auto" else {"cpu_operators": operators}

    def answered(**more: Any) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={broken: -100.0})
        runner = runner_for(path, getattr(torch, dtype), **fields, **more)
        return answers(waiting(runner, [Sequence([5, 6, 7, 8], 16, params, id=0)]))

    def propose(_: Drafts, seqs: Any, __: int) -> None:
        for seq in seqs:
            seq.spec_token_ids = [broken] * min(2, seq.num_useful_drafts)

    expected = answered()
    monkeypatch.setattr(Drafts, "propose", propose)
    assert answered(speculative_config={"num_speculative_tokens": 2}) == expected
