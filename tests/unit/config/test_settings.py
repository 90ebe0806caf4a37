"""The settings: which value each gets, the error messages for invalid values, and their names outside Python."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from engine.config.config import Config, ParallelConfig, SpeculativeConfig
from engine.config.section import Section
from engine.config.settings import (
    _INSTEAD,
    _OTHER_NAMES,
    SETTINGS,
    Setting,
    SettingsError,
    derive_settings,
    instead_of,
    load_config,
)


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KAON_"):
            monkeypatch.delenv(name)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "kaon.yaml"


def sentence(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_config(argv)
    return str(caught.value)


def test_nothing_given_is_the_default_configuration() -> None:
    assert load_config([]) == Config()


def test_the_model_is_the_one_positional_argument() -> None:
    assert load_config(["--port", "1", "some/model", "--seed", "2"]).model == "some/model"


def test_command_line_wins_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch, yaml_file: Path
) -> None:
    yaml_file.write_text("port: 1\nseed: 1\nmax_num_seqs: 1\n")
    monkeypatch.setenv("KAON_PORT", "2")
    monkeypatch.setenv("KAON_SEED", "2")
    config = load_config(["--config", str(yaml_file), "--port", "3"])
    assert (config.server_config.port, config.seed, config.max_num_seqs) == (3, 2, 1)
    assert config.kv_cache_block_size == 16


OTHERS = {
    "model": "some/model",
    "num_speculative_tokens": "2",
    "max_model_len": "2",
    "root_path": "/llm",
    "lora": "a=/a",
    "default_chat_template_kwargs": '{"a": 1}',
    "task": "generate,embed",
    "max_request_bytes": "2048",
    "max_connections": "4",
    "allowed_origins": "*",
    "kv_events_endpoint": "tcp://127.0.0.1:5557",
    "kv_events_replay_endpoint": "tcp://127.0.0.1:5558",
}
"""Values that are not "1" of settings without a default, or whose default cannot be written."""


def by_flag(setting: Setting, value: str) -> list[str]:
    if value in ("true", "false"):
        return [setting.flag if value == "true" else f"--no-{setting.flag[2:]}"]
    return [value] if setting.flag == "MODEL" else [setting.flag, value]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([setting for setting in SETTINGS if setting.default], id="all that have one"),
        *(
            pytest.param([setting], id=setting.name, marks=pytest.mark.slow if setting.default else ())
            for setting in SETTINGS
        ),
    ],
)
def test_every_default_can_be_given_in_all_three_places(
    settings: Sequence[Setting], monkeypatch: pytest.MonkeyPatch, yaml_file: Path
) -> None:
    values = {setting: OTHERS.get(setting.name) or setting.default or "1" for setting in settings}
    if [setting.name for setting in settings] == ["kv_events_replay_endpoint"]:
        # It is refused if no events are published.
        monkeypatch.setenv("KAON_KV_EVENTS_ENDPOINT", OTHERS["kv_events_endpoint"])
    from_flag = load_config([word for setting, value in values.items() for word in by_flag(setting, value)])
    yaml_file.write_text("".join(f"{setting.name}: '{value}'\n" for setting, value in values.items()))
    from_file = load_config(["--config", str(yaml_file)])
    for setting, value in values.items():
        monkeypatch.setenv(setting.env, value)
    assert load_config([]) == from_flag == from_file


def test_lists_are_comma_separated_as_text_and_lists_in_yaml(monkeypatch: pytest.MonkeyPatch, yaml_file: Path) -> None:
    yaml_file.write_text("served_model_name: [a, b]\nstop_token_ids: [1, 2]\n")
    monkeypatch.setenv("KAON_CONFIG", str(yaml_file))
    from_file = load_config([])
    assert from_file.server_config.served_model_name == ("a", "b")
    assert from_file == load_config(["--served-model-name", "a, b", "--stop-token-ids", "1,2"])


def test_an_object_is_json_as_text_and_a_mapping_in_yaml(yaml_file: Path) -> None:
    yaml_file.write_text("default_chat_template_kwargs:\n  enable_thinking: false\n")
    from_file = load_config(["--config", str(yaml_file)])
    from_flag = load_config(["--default-chat-template-kwargs", '{"enable_thinking": false}'])
    assert from_flag == from_file
    assert from_file.server_config.default_chat_template_kwargs == {"enable_thinking": False}


def test_the_flag_of_a_list_may_be_given_several_times() -> None:
    config = load_config(["--served-model-name", "a", "--served-model-name", "b,c"])
    assert config.server_config.served_model_name == ("a", "b", "c")


def test_a_secret_is_in_no_dump_of_the_configuration_and_in_no_complaint(yaml_file: Path) -> None:
    config = load_config(["--api-key", "sk-hidden"])
    assert config.server_config.api_key[0].get_secret_value() == "sk-hidden"
    assert "sk-hidden" not in config.model_dump_json() + repr(config)
    yaml_file.write_text("api_key: [12345]\n")
    with pytest.raises(SettingsError) as reported:
        load_config(["--config", str(yaml_file)])
    assert str(reported.value).startswith("api_key in ")
    assert "12345" not in str(reported.value)


def test_booleans_have_a_flag_for_either_value() -> None:
    assert load_config(["--enable-prefix-caching"]).enable_prefix_caching is True
    assert load_config(["--no-enable-prefix-caching"]).enable_prefix_caching is False


def test_an_optional_section_is_there_only_when_one_of_its_settings_is_given() -> None:
    assert load_config([]).speculative_config is None
    given = load_config(["--num-speculative-tokens", "3"])
    assert given.speculative_config == SpeculativeConfig(num_speculative_tokens=3)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_MODEL", "")
    monkeypatch.setenv("KAON_PORT", "")
    monkeypatch.setenv("KAON_CONFIG", "")
    assert load_config([]) == Config()


def test_a_file_that_is_nested_too_deeply_is_refused_in_words(yaml_file: Path) -> None:
    yaml_file.write_text("[" * 100_000)
    with pytest.raises(SettingsError, match="is nested too deeply"):
        load_config(["--config", str(yaml_file)])


def test_an_empty_file_sets_nothing(yaml_file: Path) -> None:
    yaml_file.write_text("# nothing yet\n")
    assert load_config(["--config", str(yaml_file)]) == Config()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "x"], "--port is x; it must be a valid integer"),
        (["--port", "70000"], "--port is 70000; it must be less than or equal to 65535"),
        (["--port", "-1"], "--port is -1; it must be greater than or equal to 0"),
        (["--dtype", "int8"], "--dtype is int8; it must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (["--scheduler-delay-factor", "nan"], "--scheduler-delay-factor is nan; it must be a finite number"),
        (["--host", ""], "--host is ''; it must have at least 1 character"),
        (["--stop-token-ids", "1,x"], "--stop-token-ids is 1,x; each item must be a valid integer"),
        (["--kv-cache-block-size", "17"], "--kv-cache-block-size is 17; it must be 1 or a multiple of 16"),
        (["--data-parallel-size", "65"], "--data-parallel-size is 65; it must be less than or equal to 64"),
        (["--prot", "1"], "--prot is not a flag; did you mean --port?"),
        (["--qqqqqq=1"], "--qqqqqq is not a flag; kaon serve --help lists them"),
        (["--max-num-seq", "1"], "--max-num-seq is not a flag; did you mean --max-num-seqs?"),
        (["--port"], "--port needs a value"),
        (["--max-num-seqs", "--port"], "--max-num-seqs needs a value"),
        (["--enable-prefix-caching=3"], "--enable-prefix-caching takes no value"),
        (["a", "b"], "one MODEL can be served, and b is a second one"),
        (
            ["m", "--served-model-name", "a", "b", "c"],
            "b follows the value of --served-model-name; write --served-model-name a,b,c, or --served-model-name for "
            "each value",
        ),
        (
            ["--enable-prefix-caching", "false"],
            "--enable-prefix-caching takes no value; write --enable-prefix-caching, or --no-enable-prefix-caching "
            "to switch it off",
        ),
        (["--model", "a"], "--model is not a flag; MODEL needs no flag: kaon serve MODEL"),
        (["-tp", "2"], "-tp is not a flag; it is --tensor-parallel-size here"),
        (["--block-size=32"], "--block-size is not a flag; it is --kv-cache-block-size here"),
        (["--pt", "2"], "--pt is not a flag; did you mean --port?"),
        (["--config", "/nowhere.yaml"], "--config is /nowhere.yaml, but there is no such file"),
        (["--config", "/"], "--config is /, but this is not a file"),
        (
            ["--default-chat-template-kwargs", "x"],
            "--default-chat-template-kwargs is 'x', which is not JSON: Expecting value: line 1 column 1 (char 0); "
            'write an object like {"enable_thinking": false}',
        ),
        (
            ["--default-chat-template-kwargs", "[1]"],
            '--default-chat-template-kwargs is [1]; it must be an object like {"enable_thinking": false}',
        ),
        (
            ["--default-chat-template-kwargs", '{"tools": []}'],
            "--default-chat-template-kwargs sets tools, which requests set; leave it out",
        ),
    ],
)
def test_a_bad_command_line_is_one_sentence_that_names_flag_and_value(argv: list[str], said: str) -> None:
    assert sentence(*argv) == said


def test_a_bad_variable_is_named_as_the_environment_spells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_PORT", "70000")
    assert sentence() == "KAON_PORT is 70000; it must be less than or equal to 65535"


def test_a_variable_that_is_no_setting_is_named_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_MAX_NUM_SEQ", "1")
    assert sentence() == "KAON_MAX_NUM_SEQ in the environment is not a setting; did you mean KAON_MAX_NUM_SEQS?"


def test_what_all_variables_begin_with_is_no_likeness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_FOO", "1")
    assert sentence() == "KAON_FOO in the environment is not a setting; `kaon serve --help` lists them"


def test_a_file_that_is_not_there_is_blamed_on_who_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_CONFIG", "/nowhere.yaml")
    assert sentence() == "KAON_CONFIG is /nowhere.yaml, but there is no such file"


def test_a_model_may_be_called_like_a_truth_value() -> None:
    assert load_config(["true", "--enable-prefix-caching"]).model == "true"


@pytest.mark.parametrize("flag", [*_OTHER_NAMES, *_INSTEAD])
def test_what_to_write_instead_of_other_servers_flags_is_there(flag: str) -> None:
    flags = {setting.flag for setting in SETTINGS}
    assert flag not in flags
    assert flags >= set(re.findall(r"--[a-z-]+", instead_of(flag)))
    assert instead_of(flag)


def test_variables_of_a_kubernetes_service_are_distinguished_from_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KAON_PORT", "tcp://10.0.0.1:80")
    assert "enableServiceLinks: false" in sentence()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: x", "port in {file} is x; it must be a valid integer"),
        ("port: null", "port in {file} is None; it must be a valid integer"),
        ("served_model_name: {a: 1}", "served_model_name in {file} is {{'a': 1}}; it must be a valid list"),
        ("prot: 1", "prot in {file} is not a setting; did you mean port?"),
        ("http: {port: 1}", "http in {file} is not a setting"),
        ("port: 1\nport: 2", "{file} sets port twice, again at line 2; remove one of the two lines"),
        ("port: [1", "{file} is not YAML: expected ',' or ']', but got '<stream end>' at line 1"),
        ("- port", "{file} is YAML, but not lines of the form `setting: value`"),
        ("port", "{file} is YAML, but not lines of the form `setting: value`"),
        ("1: 2", "{file} is YAML, but not lines of the form `setting: value`"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_file_and_key(yaml_file: Path, text: str, said: str) -> None:
    yaml_file.write_text(text)
    assert sentence("--config", str(yaml_file)) == said.format(file=yaml_file)


def test_a_value_is_blamed_on_the_place_it_was_taken_from(monkeypatch: pytest.MonkeyPatch, yaml_file: Path) -> None:
    yaml_file.write_text("port: 70001\n")
    monkeypatch.setenv("KAON_PORT", "70002")
    assert sentence("--config", str(yaml_file)).startswith("KAON_PORT is 70002;")
    assert load_config(["--config", str(yaml_file), "--port", "5"]).server_config.port == 5


# -- the table of settings, from the fields of `Config` ----------------------------------------------------------


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


# -- `Config.from_fields`: a section's fields may be given at the top level --------------------------------------


def test_fields_of_sections_stand_beside_the_others() -> None:
    config = Config.from_fields(max_num_seqs=3, tensor_parallel_size=2, rank_start_timeout=5.0, port=8123)
    assert config.max_num_seqs == 3
    assert config.parallel_config == ParallelConfig(tensor_parallel_size=2, rank_start_timeout=5.0)
    assert config.server_config.port == 8123


def test_a_section_may_be_given_whole() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2)
    assert Config.from_fields(parallel_config=parallel).parallel_config is parallel


def test_a_section_and_a_field_of_it_are_not_given_together() -> None:
    with pytest.raises(ValueError, match="parallel_config and its field tensor_parallel_size are both given"):
        Config.from_fields(parallel_config=ParallelConfig(), tensor_parallel_size=2)


def test_what_is_no_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="tensor_parallel\n"):
        Config.from_fields(tensor_parallel=2)


def test_replicas_do_not_publish_events_where_another_one_answers_replays() -> None:
    given = {"kv_events_endpoint": "tcp://*:5557", "data_parallel_size": 2}
    with pytest.raises(ValidationError, match="adds its number to both ports; let them lie 2 or more apart"):
        Config.from_fields(**given, kv_events_replay_endpoint="tcp://*:5558")
    Config.from_fields(**given, kv_events_replay_endpoint="tcp://*:5559")
    # Events that are sent to a listener use no port of this host.
    Config.from_fields(
        **{**given, "kv_events_endpoint": "tcp://router:5557"}, kv_events_replay_endpoint="tcp://*:5558"
    )
