"""When `auto` lets the engine schedule a step before the previous one is read."""

from typing import Any

import pytest

from engine.config.config import Config
from engine.core.startup import _with_async_scheduling

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


def test_auto_is_on_where_a_model_drafts() -> None:
    config = Config.model_validate({"speculative_config": {"speculative_method": "mtp"}})
    assert _with_async_scheduling(config, "cuda").async_scheduling == "on"


@pytest.mark.parametrize("chosen", ["on", "off"])
def test_what_was_chosen_stays(chosen: str) -> None:
    config = Config.model_validate({"async_scheduling": chosen})
    assert _with_async_scheduling(config, "cpu").async_scheduling == chosen
