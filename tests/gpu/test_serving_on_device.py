"""The server on a GPU, through the official client; two ranks where there are two GPUs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from tests.e2e.kaon_server import MODEL, KaonServer, free_port
from tests.gpu.places import HAS_GPU
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU that torch can use")]
QUESTION: Any = [{"role": "user", "content": "What is 12 plus 30?"}]


# A CPU's server runs the same test, in the long form, so that it does not rot.
@pytest.fixture(
    scope="module",
    params=[pytest.param("cuda", marks=NEEDS_GPU), pytest.param("cpu", marks=pytest.mark.slow)],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = KaonServer(log, free_port(), device=request.param, gpu_memory_utilization=0.2).ready()
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr


def test_a_question_is_answered_the_same_whole_and_streamed(server: KaonServer) -> None:
    with server.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0.0, max_tokens=40)
        assert "42" in (whole.choices[0].message.content or "")
        assert whole.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0.0, max_tokens=40, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content


def test_many_at_once_have_each_its_answer(server: KaonServer) -> None:
    with server.client() as client:
        found = client.completions.create(
            model=MODEL, prompt=["Once", "The sky", "Two and"] * 8, max_tokens=20, temperature=0.0, logprobs=1
        )
    texts = [choice.text for choice in found.choices]
    assert len(texts) == 24
    assert texts[:3] * 8 == texts
    assert all(choice.logprobs for choice in found.choices)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [prompt(length, seed=length) for length in (5, 40, 90)]
    answers = []
    for ranks in (1, 2):
        with LLMEngine(
            str(path), device="cuda", dtype="float32", tensor_parallel_size=ranks, gpu_memory_utilization=0.2
        ) as engine:
            answers.append([result["token_ids"] for result in engine.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]
