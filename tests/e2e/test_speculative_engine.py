"""Drafts of a model in real processes: answers equal those without drafts, whatever happens while the model drafts."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from models.demo import CHECKPOINT_DIR, DRAFT_HEAD_DIR
from models.ops.cpu.runtime import load_library

pytestmark = pytest.mark.skipif(
    load_library() is None, reason="only the compiled operators give a token the same result in any company"
)

PROMPTS = ["Once upon a time there was a dragon", "The cat", "Tell me a story about the moon and a boat."]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, presence_penalty=0.5, logprobs=1),
]
SIZES = {"num_kvcache_blocks": 256, "max_model_len": 512}


@cache
def expected(num_ranks: int = 1) -> list[list[int]]:
    """Answers without drafts."""
    with LLMEngine(num_speculative_tokens=0, tensor_parallel_size=num_ranks, **SIZES) as engine:
        return [output["token_ids"] for output in engine.generate(PROMPTS, PARAMS, use_tqdm=False)]


def num_accepted(engine: LLMEngine) -> int:
    assert engine.stats is not None
    return engine.stats.accepted_draft_tokens


@pytest.mark.parametrize(
    ("killed", "num_ranks", "drafting"),
    [
        ("0:round", 1, {"speculative_method": "eagle"}),
        pytest.param("1:pass", 2, {"speculative_model": str(CHECKPOINT_DIR)}, marks=pytest.mark.slow),
    ],
    ids=["a later round of the head", "a later pass of rank 1"],
)
def test_a_process_killed_while_it_drafts_changes_no_answer(
    killed: str,
    num_ranks: int,
    drafting: dict[str, Any],
    faulty: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = expected(num_ranks)
    faulty(killed)
    with LLMEngine(**SIZES, **drafting, num_speculative_tokens=3, tensor_parallel_size=num_ranks) as engine:
        monkeypatch.delenv("FAULTY_RANK")
        [pid] = engine._core.pids
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == answers
        assert engine._core.pids != [pid]
        assert num_accepted(engine) > 0, "of the other core"


@pytest.mark.slow  # Without processes: tests/parity/test_model_drafters.py.
def test_a_head_that_returns_nan_from_some_token_on_changes_no_answer(tmp_path: Path) -> None:
    """The head has an embedding of its own, with NaN for a token; all later entries of a sequence read this one."""
    [answer, *_] = expected()
    at = next(at for at in range(50, len(answer)) if answer[at] not in answer[:at])
    shutil.copytree(DRAFT_HEAD_DIR, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    embedding = load_file(CHECKPOINT_DIR / "model.safetensors")["model.embed_tokens.weight"].clone()
    embedding[answer[at]] = torch.nan
    save_file({**load_file(file), "embed_tokens.weight": embedding}, file, {"format": "pt"})
    head = {"speculative_method": "eagle", "speculative_model": str(tmp_path), "num_speculative_tokens": 3}
    with LLMEngine(**SIZES, **head) as engine:
        outputs = engine.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        assert outputs[0]["token_ids"] == answer
        assert num_accepted(engine) > 0, "before the head returned NaN"
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected()
