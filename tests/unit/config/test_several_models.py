"""The file of several models: ordinary settings for each, with the server's as defaults; error messages for
mistakes."""

from pathlib import Path

import pytest

from engine.config.settings import SettingsError, load_config, read_models
from engine.distributed.host_resources import HostShare
from server.cli import main

GIB = 2**30


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KAON_CONFIG", raising=False)


def test_each_model_has_its_own_settings_and_the_others_defaults() -> None:
    Path("m.yaml").write_text(
        "memory_gib: 20\n"
        "models:\n"
        "- {model: a/b, memory_gib: 12, load: start, max_model_len: 512, chat_template: t.jinja}\n"
        "- {model: c, memory_gib: 8.5, served_model_name: [x, y], num_speculative_tokens: 3, dtype: bfloat16}\n"
    )
    flags = [
        "--models",
        "m.yaml",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "7",
        "--port",
        "1",
        "--kv-cache-dtype",
        "fp8",
    ]
    models = read_models(load_config(flags))
    first, second = models.entries
    assert models.memory_bytes == 20 * GIB
    assert (first.config.model_names, first.loads_at_start, first.memory_bytes) == (("a/b",), True, 12 * GIB)
    assert (second.config.model_names, second.loads_at_start, second.memory_bytes) == (("x", "y"), False, 8.5 * GIB)
    assert [each.config.dtype for each in models.entries] == ["float32", "bfloat16"]
    assert [each.config.max_model_len for each in models.entries] == [512, None]
    assert [each.config.num_drafts for each in models.entries] == [0, 3]
    for each in models.entries:
        assert (each.config.max_num_seqs, each.config.server_config.port) == (7, 1)
        assert each.config.quantization_config.kv_cache_dtype == "fp8"
    assert first.config.server_config.chat_template == "t.jinja"


def test_one_model_is_the_special_case() -> None:
    config = load_config(["some/model"])
    (only,), budget = read_models(config)
    assert (only.config, only.loads_at_start, budget) == (config, True, None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "m.yaml lists no models; write `models:`, and an item `- model: ...` for each"),
        ("models: [a]", "model 1 in m.yaml is a; write its settings as lines of the form `setting: value`"),
        ("model: [{model: a}]", "model in m.yaml is not known; the file has a list `models`"),
        ("models: [{modle: a}]", "modle of model 1 in m.yaml is not a setting"),
        ("models: [{model: a, port: 1}]", "port of model 1 in m.yaml is the same for all models"),
        ("models: [{model: a, load: now}]", "load of model 1 in m.yaml is now; it must be start or use"),
        ("models: [{model: a, max_num_seqs: 0}]", "max_num_seqs of model 1 in m.yaml is 0; "),
        ("models: [{model: a, model: b}]", "m.yaml sets model twice, again at line 1; remove one of the two lines"),
        ("models: [{model: a}, {model: a}]", "models 1 and 2 in m.yaml both have a; give one another"),
        ("models: [{model: a}, {model: b, lora: [a=/x]}]", "models 1 and 2 in m.yaml both have a; "),
        ("memory_gib: 9\nmodels: [{model: a}]", "model 1 in m.yaml has no memory_gib, but the file has a budget"),
        ("memory_gib: x\nmodels: [{model: a}]", "memory_gib of m.yaml is x; it must be a number of GiB above 0"),
        ("memory_gib: 1\nmodels: [{model: a, memory_gib: 2}]", "memory_gib of model 1 in m.yaml is 2, more than that"),
        (
            "memory_gib: 3\nmodels: [{model: a, memory_gib: 2, load: start}, {model: b, memory_gib: 2, load: start}]",
            "the models in m.yaml that are loaded at the start take 4 GiB, more than memory_gib, 3; set `load: use`",
        ),
    ],
)
def test_mistakes_are_said(text: str, sentence: str) -> None:
    Path("m.yaml").write_text(text)
    with pytest.raises(SettingsError) as error:
        read_models(load_config(["--models", "m.yaml"]))
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["m"], "model is m, but models is m.yaml"),
        (["--nnodes", "2", "--tensor-parallel-size", "2"], "models is m.yaml, whose engines run on one host"),
        (["--metrics-aliases", "vllm"], "metrics_aliases is vllm, whose names describe one model"),
    ],
)
def test_what_several_models_cannot_have_is_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config([*flags, "--models", "m.yaml"])
    assert sentence.split(" ", 1)[1] in str(error.value)


def test_a_missing_file_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--models", "m.yaml"]) == 2
    assert capsys.readouterr().err == "kaon serve: models is m.yaml, but there is no such file\n"


def test_processes_and_log_lines_name_the_model_where_there_are_several() -> None:
    several = HostShare(model="large")
    assert several.titled("kaon-engine-0") == "kaon-engine-0 [large]"
    assert several.command("engine.core.main", "kaon-engine-0")[-3:] == ["engine.core.main", "kaon-engine-0", "large"]
    assert HostShare().titled("kaon-engine-0") == HostShare().command("x", "kaon-engine-0")[-1] == "kaon-engine-0"
