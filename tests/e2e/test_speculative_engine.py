"""Drafts of a model in real cores: over two ranks, and through the death of a core, answers equal those without
drafts."""

import os
import signal
from typing import Any

import pytest

from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from models.demo import CHECKPOINT_DIR
from models.ops.cpu.runtime import load_library
from tests.e2e.engines import until_begun, until_replaced

pytestmark = pytest.mark.skipif(
    load_library() is None, reason="only the compiled operators give a token the same result in any company"
)

PROMPTS = ["Once upon a time there was a dragon", "The cat", "Tell me a story about the moon and a boat."]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, presence_penalty=0.5, logprobs=1),
]
SIZES = {"num_kvcache_blocks": 256, "max_model_len": 512}


FORMS = [
    {"speculative_method": "eagle"},
    pytest.param({"speculative_model": str(CHECKPOINT_DIR), "tensor_parallel_size": 2}, marks=pytest.mark.slow),
]
"""The head, whose steps have several rounds; and the model itself on two ranks, most of whose drafts are accepted."""


@pytest.mark.parametrize("drafting", FORMS, ids=["head", "two ranks"])
def test_drafts_go_on_in_another_core(drafting: dict[str, Any]) -> None:
    with LLMEngine(num_speculative_tokens=0, **SIZES) as engine:
        expected = [output["token_ids"] for output in engine.generate(PROMPTS, PARAMS)]
    with LLMEngine(**SIZES, **drafting, num_speculative_tokens=3) as engine:
        request_ids = engine.add_request(PROMPTS, PARAMS)
        until_begun(engine)
        [pid] = engine._core.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until_replaced(engine, pid)
        assert [output["token_ids"] for output in engine.collect(request_ids)] == expected
