"""Configurations that an engine core refuses while it starts, with their error messages."""

import time
from typing import Any

import pytest

from engine.config.config import Config
from engine.core.startup import PhaseClock, start_model


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"eos_token_id": 99999}, "eos_token_id holds token id 99999; this model's token ids are between 0 and 1535"),
        ({"bos_token_id": 1536}, "bos_token_id holds token id 1536"),
        ({"stop_token_ids": (5, 1536)}, "stop_token_ids holds token id 1536"),
        ({"device": "cuda"}, "torch finds no GPU"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as raised:
        start_model(Config.from_fields(num_kvcache_blocks=16, **fields), PhaseClock(time.monotonic()))
    assert "\n" not in str(raised.value)
