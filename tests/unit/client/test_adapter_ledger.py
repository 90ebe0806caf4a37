"""Adapters that cores must have, and answers that are expected of them, while adapters are loaded and unloaded."""

import asyncio
import logging
from pathlib import Path

import pytest

from engine.client.adapters import AdapterError, AdapterLedger
from engine.config.config import Config
from engine.messages import AdapterChanged, LoadAdapter

CONFIG = Config(lora=("one=/a/1", "two=/a/2"))


def test_a_core_starts_with_the_configurations_adapters_until_one_has_changed() -> None:
    ledger = AdapterLedger(CONFIG.lora_paths)
    assert ledger.config_of_core(CONFIG) is CONFIG
    assert ledger.missing_messages() == []
    ledger.add(LoadAdapter(3, "three", "/a/3"))
    ledger.remove(1)
    assert ledger.config_of_core(CONFIG).lora == ()
    assert ledger.missing_messages() == [
        LoadAdapter(2, "two", "/a/2", at_once=True),
        LoadAdapter(3, "three", "/a/3", at_once=True),
    ]


async def test_a_core_that_dies_answers_what_was_awaited_of_it_alone() -> None:
    ledger = AdapterLedger({})
    first, second = ledger.expect(0, 1), ledger.expect(1, 1)
    ledger.core_died(0, "engine core 0")
    ledger.answered(1, AdapterChanged(1, "it is broken"))
    died, broken = await asyncio.gather(first, second)
    assert isinstance(died, AdapterError)
    assert died.is_temporary
    assert str(died) == "engine core 0 died while it loaded the adapter, so the adapter is not loaded; load it again"
    assert isinstance(broken, AdapterError)
    assert not broken.is_temporary
    assert str(broken) == "it is broken"


def test_an_adapter_that_is_not_there_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ledger = AdapterLedger({"one": Path("/a/1")})
    with caplog.at_level(logging.ERROR):
        ledger.answered(0, AdapterChanged(1, "/a/1 is not a directory"))
    assert "LoRA adapter one could not be loaded again" in caplog.text
