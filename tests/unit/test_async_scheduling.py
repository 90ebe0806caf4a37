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
        (RANKS, "cuda", "on"),
        (RANKS, "cpu", "off"),
        (LOCKSTEP, "cuda", "on"),
    ],
    ids=["cpu", "one_rank", "replicas", "ranks", "ranks_on_cpu", "lockstep"],
)
def test_auto_is_on_where_it_pays_and_works(parallel: dict[str, Any], device_type: str, expected: str) -> None:
    config = Config.model_validate({"parallel_config": parallel})
    assert _with_async_scheduling(config, device_type).async_scheduling == expected


@pytest.mark.parametrize("chosen", ["on", "off"])
def test_what_was_chosen_stays(chosen: str) -> None:
    config = Config.model_validate({"async_scheduling": chosen})
    assert _with_async_scheduling(config, "cpu").async_scheduling == chosen


def test_on_is_refused_where_a_model_drafts() -> None:
    drafts = {"speculative_method": "mtp"}
    config = Config.model_validate({"async_scheduling": "on", "speculative_config": drafts})
    with pytest.raises(ValueError, match=r"^async_scheduling is on, but speculative_method names a model, .*at auto$"):
        load_model(config, PhaseClock(0.0))
