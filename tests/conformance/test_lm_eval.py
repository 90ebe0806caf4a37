"""`lm-eval`: a multiple-choice task scored through `local-completions`, and the same one by transformers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TASK = "kaon_facts"
FOLDER = Path(__file__).parent / "lm_eval"
CHECKPOINT = os.environ.get("KAON_CHECKPOINT", "")

LARGEST_DIFFERENCE = 1e-3
"""Tolerance of two log-likelihoods of the same continuation, both computed in float32."""


class Scores(NamedTuple):
    metrics: dict[str, float]
    loglikelihoods: dict[int, list[float]]
    """Log-likelihoods of each item's choices."""
    greedy: dict[int, list[bool]]
    """Whether each choice is the greedy continuation."""


def score(folder: Path, model: str, model_args: str, *flags: str) -> Scores:
    """Run the harness. Returns its results."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", model_args, *flags]
    command += ["--tasks", TASK, "--include_path", ".", "--log_samples", "--output_path", str(folder)]
    environment = {**os.environ, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = folder.rglob("results_*.json")
    metrics = json.loads(found.read_text())["results"][TASK]
    (found,) = folder.rglob(f"samples_{TASK}_*.jsonl")
    samples = [json.loads(line) for line in found.read_text().splitlines()]
    answers = {sample["doc_id"]: [each[0] for each in sample["resps"]] for sample in samples}
    return Scores(
        {name: metrics[f"{name},none"] for name in ("acc", "acc_norm")},
        {item: [float(likelihood) for likelihood, _ in each] for item, each in answers.items()},
        {item: [str(greedy) == "True" for _, greedy in each] for item, each in answers.items()},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Scores:
    """The task scored by transformers on the same checkpoint, in float32."""
    return score(tmp_path_factory.mktemp("hf"), "hf", f"pretrained={CHECKPOINT},dtype=float32", "--device", "cpu")


def difference(scores: Scores, reference: Scores) -> float:
    assert scores.loglikelihoods.keys() == reference.loglikelihoods.keys()
    return max(
        abs(one - other)
        for item in reference.loglikelihoods
        for one, other in zip(scores.loglikelihoods[item], reference.loglikelihoods[item], strict=True)
    )


def test_the_reference_knows_the_world(reference: Scores) -> None:
    assert reference.metrics["acc"] > 0.7
    assert all(math.isfinite(each) for likelihoods in reference.loglikelihoods.values() for each in likelihoods)


@pytest.mark.parametrize(
    "args",
    [
        "tokenizer_backend=huggingface,tokenized_requests=True",
        "tokenizer_backend=huggingface,tokenized_requests=False",
        "tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent=8",
    ],
    ids=["token ids", "text", "token ids, eight at once"],
)
def test_scores_agree_with_transformers(
    reference: Scores, args: str, model: str, base_url: str, tmp_path: Path, record_property: Any
) -> None:
    model_args = f"model={model},base_url={base_url}/completions,tokenizer={CHECKPOINT},max_retries=1,{args}"
    scores = score(tmp_path, "local-completions", model_args, "--seed", "1234")
    found = difference(scores, reference)
    record_property("note", f"`{args}`: largest difference of a log-likelihood {found:.1e}.")
    assert scores.metrics == reference.metrics
    assert found < LARGEST_DIFFERENCE
    assert scores.greedy == reference.greedy
