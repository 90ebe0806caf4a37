"""Where the engine may be a step ahead of what it reads: what `auto` comes to, and where `on` is refused."""

from typing import Any

import pytest

from engine.config.config import Config
from engine.core.startup import PhaseClock, _with_async_scheduling, load_model

RANKS = {"tensor_parallel_size": 2}
LOCKSTEP = {"data_parallel_size": 3, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("parallel", "device_type", "expected"),
    [
        ({}, "cpu", "off"),
        ({}, "cuda", "on"),
        ({"data_parallel_size": 2}, "cuda", "on"),
        (RANKS, "cuda", "off"),
        (LOCKSTEP, "cuda", "off"),
    ],
    ids=["cpu", "one_rank", "replicas", "ranks", "lockstep"],
)
def test_auto_is_on_where_it_pays_and_works(parallel: dict[str, Any], device_type: str, expected: str) -> None:
    config = Config.model_validate({"parallel_config": parallel})
    assert _with_async_scheduling(config, device_type).async_scheduling == expected


@pytest.mark.parametrize("chosen", ["on", "off"])
def test_what_was_chosen_stays(chosen: str) -> None:
    config = Config.model_validate({"async_scheduling": chosen})
    assert _with_async_scheduling(config, "cpu").async_scheduling == chosen


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (RANKS, "async_scheduling is on, but tensor_parallel_size is 2, "),
        (LOCKSTEP, "async_scheduling is on, but with enable_expert_parallel the 3 replicas "),
    ],
    ids=["ranks", "lockstep"],
)
def test_on_is_refused_where_a_step_is_not_one_process_s(parallel: dict[str, Any], sentence: str) -> None:
    config = Config.model_validate({"async_scheduling": "on", "parallel_config": parallel})
    with pytest.raises(ValueError, match=f"^{sentence}.*; leave it at auto$"):
        load_model(config, PhaseClock(0.0))
