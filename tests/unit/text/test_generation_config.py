"""Sampling defaults from generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from engine.text.checkpoint_settings import GenerationDefaults
from models.errors import CheckpointError


def write(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_auto_takes_the_checkpoints_recommendations(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0, repetition_penalty=1.05, max_new_tokens=2048)
    defaults = GenerationDefaults.load("auto", tmp_path)
    assert defaults == GenerationDefaults(0.6, 0.95, 20, 0, 1.05, 2048)
    assert defaults.sampling_params() == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_tokens=2048
    )


def test_what_the_file_does_not_say_is_openais(tmp_path: Path) -> None:
    assert GenerationDefaults.load("auto", tmp_path) == GenerationDefaults()
    write(tmp_path, temperature=None, eos_token_id=[1], transformers_version="5.0")
    assert GenerationDefaults.load("auto", tmp_path) == GenerationDefaults()
    assert GenerationDefaults().sampling_params() == SamplingParams()


def test_do_sample_plays_no_part(tmp_path: Path) -> None:
    assert GenerationDefaults.load("auto", write(tmp_path, do_sample=False)) == GenerationDefaults()


def test_none_reads_nothing_and_a_directory_is_read_in_place_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint, other = tmp_path / "checkpoint", tmp_path / "other"
    for directory, temperature in ((checkpoint, 0.1), (other, 0.2)):
        directory.mkdir()
        write(directory, temperature=temperature)
    assert GenerationDefaults.load("none", checkpoint) == GenerationDefaults()
    assert GenerationDefaults.load(str(other), checkpoint).temperature == 0.2


def test_a_directory_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config is .*, which is not a directory with a"):
        GenerationDefaults.load(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": 3}, "temperature is 3; it must be between 0 and 2"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"top_p": 0}, "top_p is 0; it must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": 2**40}, "max_new_tokens is 1099511627776; it must be at most 2147483647"),
    ],
)
def test_a_value_that_requests_could_not_send_is_refused(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        GenerationDefaults.load("auto", write(tmp_path, **values))
    assert sentence in str(caught.value)
    assert str(caught.value).endswith("correct it, or set generation_config to none")
