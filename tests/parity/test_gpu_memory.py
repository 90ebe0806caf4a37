"""A GPU that runs out of memory: an error message at the start, smaller steps while serving; the engine never ends."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import StepOutOfMemory
from engine.runner.device import oom_at_start, oom_in_step
from engine.runner.model_runner import ModelRunner
from engine.runner.start import run_worst_case
from models.loading import loader
from tests.parity.ahead import answers, by_core, waiting
from tests.parity.test_deferred_output import sequences
from tests.parity.test_worker_model_runner import checkpoint, prompts, runner_for
from tests.sweeps import sweep

__all__ = ["checkpoint", "prompts"]

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def test_what_does_not_fit_at_start_is_a_sentence_with_what_is_missing_and_what_helps() -> None:
    with (
        pytest.raises(ValueError, match=r"^the model does not fit the GPU: 2\.50 GiB more were asked for, and 1\.25 "),
        oom_at_start("the model", "serve a smaller one"),
    ):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def test_words_of_torch_that_are_not_known_are_reported_as_they_are() -> None:
    with pytest.raises(StepOutOfMemory, match="ran out of memory: HIP error"), oom_in_step():
        raise torch.OutOfMemoryError("HIP error:\n  something")


def test_the_largest_step_that_does_not_fit_names_its_flag(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ModelRunner, lengths: list[int]) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    runner = runner_for(checkpoint, max_num_batched_tokens=300)
    monkeypatch.setattr(ModelRunner, "run_dummy_step", fail)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 300, .* lower max_num_batched_tokens$"):
        run_worst_case(runner.loaded, runner.config.max_num_seqs)


def test_a_model_that_does_not_fit_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **fields: Any) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(loader, "load_model", fail)
    with pytest.raises(ValueError, match="the model does not fit the GPU"):
        runner_for(checkpoint)


@sweep(mode=["on", "off"], room=[7, 30])
def test_all_requests_are_answered_when_memory_runs_out_while_serving(
    checkpoint: Path, prompts: list[list[int]], mode: str, room: int
) -> None:
    """Memory for a part of a prompt and, the second time, for half of the decodes."""
    expected = answers(waiting(runner_for(checkpoint), sequences(prompts[:12])))
    runner = runner_for(checkpoint, async_scheduling=mode)
    intact, failures = runner.run_model, 0

    def short(inputs: Any, *rest: Any) -> Any:
        nonlocal failures
        if len(inputs.positions) > room:
            failures += 1
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return intact(inputs, *rest)

    runner.run_model = short  # type: ignore[method-assign]
    assert answers(by_core(runner, sequences(prompts[:12]))) == expected
    assert 0 < failures < 12
