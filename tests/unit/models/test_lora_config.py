"""adapter_config.json becomes a `LoRAConfig`, or a sentence that names file, field and value."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.errors import CheckpointError
from models.lora.config import LoRAConfig

PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "self_attn.o_proj"],
    "bias": "none",
    "modules_to_save": None,
    "use_dora": False,
    "lora_dropout": 0.05,
    "init_lora_weights": "gaussian",
}
Q_PROJ, O_PROJ, MLP_O_PROJ = (
    f"model.layers.1.{end}" for end in ("self_attn.q_proj", "self_attn.o_proj", "mlp.o_proj")
)


def parse(path: Path, **fields: Any) -> LoRAConfig:
    config = {key: value for key, value in {**PEFT, **fields}.items() if value is not ...}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRAConfig.from_adapter(path)


def test_every_module_has_the_rank_and_scale_of_the_adapter(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert (config.rank_of(Q_PROJ), config.scale_of(Q_PROJ)) == (8, 2.0)
    assert parse(tmp_path, use_rslora=True).scale_of(Q_PROJ) == 16 / math.sqrt(8)


def test_patterns_match_the_end_of_a_name_and_the_first_of_them_counts(tmp_path: Path) -> None:
    config = parse(tmp_path, rank_pattern={"self_attn.o_proj": 2, r"layers\.[01]\..*": 4}, alpha_pattern={"q_proj": 3})
    assert [config.rank_of(module) for module in (O_PROJ, Q_PROJ, "model.layers.2.self_attn.q_proj")] == [2, 4, 8]
    assert (config.scale_of(O_PROJ), config.scale_of(Q_PROJ)) == (8.0, 0.75)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("expression", ["(?:[a-z._0-9]+)+[!?]", "(a|a)*b|(.*.*)*[q]Q", "((q|q_)*(r|[^x])*)*Z"])
def test_an_expression_that_backtracks_without_end_in_other_libraries_ends_here(
    expression: str, field: str, tmp_path: Path
) -> None:
    config = parse(tmp_path, **{field: {expression: 2}})
    long = "model." + "layers.0.self_attn.q_proj" * 4
    assert (config.rank_of(long), config.scale_of(long)) == (8, 2.0)


def test_each_of_many_modules_may_have_a_value_and_the_first_key_that_matches_counts(tmp_path: Path) -> None:
    ranks = {f"model.layers.{number}.self_attn.q_proj": 1 + number % 7 for number in range(20_000)}
    config = parse(tmp_path, rank_pattern={**ranks, "(q|k)_proj": 50, "k_proj": 51, "self_attn.k_proj": 52})
    assert config.rank_of("model.layers.19999.self_attn.q_proj") == ranks["model.layers.19999.self_attn.q_proj"]
    assert config.rank_of("model.layers.20000.self_attn.q_proj") == 50
    assert config.rank_of("model.layers.0.self_attn.k_proj") == 50
    assert config.rank_of("model.layers.0.self_attn.o_proj") == 8
    own = parse(tmp_path, rank_pattern={"k_proj": 51, "self_attn.k_proj": 52, "(q|k)_proj": 50})
    assert own.rank_of("model.layers.0.self_attn.k_proj") == 51


def test_targets_are_whole_parts_of_names(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert [config.targets(module) for module in (Q_PROJ, O_PROJ, MLP_O_PROJ, "model.layers.1.self_attn.eq_proj")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "fields", [{"target_modules": r".*\.q_proj"}, {"layers_to_transform": [0]}, {"exclude_modules": ["x"]}]
)
def test_an_adapter_of_some_layers_must_hold_no_particular_module(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert not parse(tmp_path, **fields).targets(Q_PROJ)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"use_dora": True}, "use_dora of {file} is true; it must be left out, because DoRA"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save of {file} is ["lm_head"]; it must be left out'),
        ({"bias": "lora_only"}, 'bias of {file} is "lora_only"; it must be none'),
        ({"lora_bias": True}, "lora_bias of {file} is true"),
        ({"peft_type": "LOHA"}, 'peft_type of {file} is "LOHA"; it must be LORA'),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters of {file}"),
        ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights of {file} is "pissa_niter_4"; it must be another'),
        ({"r": 0}, "r of {file} is 0; it must be an integer from 1"),
        ({"r": ...}, "{file} has no r"),
        ({"lora_alpha": "16"}, 'lora_alpha of {file} is "16"; it must be a number above 0'),
        (
            {"rank_pattern": {"q_proj": 1.5}},
            "q_proj of rank_pattern of {file} is 1.5; it must be an integer from 1 to",
        ),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "is NaN; it must be a number above 0"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "is Infinity; it must be a number above 0"),
        ({"lora_alpha": float("nan")}, "is NaN; it must be a number above 0"),
        (
            {"alpha_pattern": {"q_proj": True}},
            "q_proj of alpha_pattern of {file} is true; it must be a number above 0",
        ),
        ({"rank_pattern": {"(": 2}}, "'(' is not a regular expression that can be used (unclosed group)"),
        ({"rank_pattern": {"a)|(b(": 2}}, "is not a regular expression"),
        (
            {"alpha_pattern": {"a{999999999}": 2}},
            "'a{{999999999}}' counts repetitions; write them out",
        ),
        (
            {"alpha_pattern": {f"(a|{number}){'b' * 495}": 2 for number in range(10, 20)}},
            "its regular expressions have 5010 characters; they may have at most 4096",
        ),
        ({"rank_pattern": {f"(a){number}": 2 for number in range(129)}}, "129 of its keys are regular expressions"),
        ({"rank_pattern": {"(?=a)b": 2}}, "(look-around, including look-ahead and look-behind, is not supported)"),
        ({"target_modules": 3}, "target_modules of {file} is 3; it must be a list of strings"),
    ],
)
def test_what_would_be_computed_wrong_is_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse(tmp_path, **fields)
    assert sentence.format(file=tmp_path / "adapter_config.json") in str(error.value)


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        LoRAConfig.from_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        LoRAConfig.from_adapter(tmp_path / "absent")


def test_it_needs_no_torch() -> None:
    check = "import sys, models.lora.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
