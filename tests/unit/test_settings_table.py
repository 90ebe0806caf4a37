"""The names of `Config`'s fields outside Python."""

from typing import Literal

import pytest

from engine.config.config import Config, Section
from engine.config.settings import SETTINGS, derive_settings


def test_every_leaf_of_config_and_its_sections_is_a_setting_once() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    assert {"model", "max_num_seqs", "tensor_parallel_size", "port", "num_speculative_tokens"} <= set(names)
    assert not {"server_config", "speculative_config"} & set(names)


def test_flag_variable_and_yaml_key_follow_from_the_leafs_name() -> None:
    setting = next(setting for setting in SETTINGS if setting.name == "max_num_seqs")
    assert (setting.flag, setting.env, setting.path) == ("--max-num-seqs", "KAON_MAX_NUM_SEQS", ())


def test_every_setting_reports_its_meaning() -> None:
    assert [setting.name for setting in SETTINGS if not setting.meaning] == []


def test_defaults_are_those_of_config_as_yaml_spells_them() -> None:
    defaults = {setting.name: setting.default for setting in SETTINGS}
    assert defaults["max_num_batched_tokens"] == str(Config().max_num_batched_tokens)
    assert defaults["enable_prefix_caching"] == "true"
    assert defaults["max_model_len"] is None
    assert defaults["served_model_name"] is None
    assert defaults["num_speculative_tokens"] == "off"
    assert (defaults["speculative_method"], defaults["prompt_lookup_min"]) == ("ngram", "3")


def test_types_are_reported_in_words() -> None:
    types = {setting.name: setting.type_name for setting in SETTINGS}
    assert types["model"] == "text"
    assert types["max_model_len"] == "int"
    assert types["dtype"] == "auto | float32 | bfloat16 | float16"
    assert types["served_model_name"] == "text,..."
    assert types["stop_token_ids"] == "int,..."


def test_two_leaves_of_one_name_are_an_error_that_names_both_sections() -> None:
    class Inner(Section):
        """Inner."""

        size: int = 1

    class Outer(Section):
        """Outer."""

        size: Literal[1, 2] = 2
        inner: Inner = Inner()

    with pytest.raises(TypeError, match="size is a field of both Outer and Inner"):
        derive_settings(Outer)
