"""The loader reads a checkpoint as transformers writes it, and reports in a sentence the fault of any other."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.architectures.config import ModelConfig
from models.architectures.registry import ARCHITECTURES
from models.errors import CheckpointError
from models.loading.loader import load_model
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, assert_computes, prompt
from tests.parity.variants.older import VARIANTS as OLDER
from tests.parity.variants.qwen3_next import VARIANTS as QWEN3_NEXT

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint")


def load(path: Path, *, progress: bool = False) -> None:
    load_model(path, ModelConfig.from_checkpoint(path), dtype=torch.float32, device=CPU, progress=progress)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def test_sharded_checkpoints_load_the_same(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", "qwen3")
    sharded = make_checkpoint(tmp_path / "sharded", "qwen3", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_computes(PagedModel(whole), prompt(20), PagedModel(sharded).logits(prompt(20)))


@pytest.mark.parametrize(
    "names",
    [
        ("mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"),
        ("model.mtp_linear_proj.0.weight", "model.mtp_block.0.mlp.up_proj.weight"),
    ],
    ids=["Qwen3-Next and others", "Ernie 4.5"],
)
def test_modules_that_predict_further_tokens_in_published_checkpoints_are_ignored(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """Their config.json names no such layers, unlike DeepSeek's."""
    path = make_checkpoint(tmp_path, QWEN3_NEXT[0].family)
    extra = {name: torch.zeros(3) for name in names}
    rewrite(path, lambda tensors: tensors.update(extra))
    load(path)
    rewrite(path, lambda tensors: tensors.update({"mtpfc.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"holds 1 tensor \(mtpfc\.weight\)"):
        load(path)


def test_weights_are_converted_to_the_asked_type(checkpoint: Path) -> None:
    model = load_model(
        checkpoint, ModelConfig.from_checkpoint(checkpoint), dtype=torch.bfloat16, device=CPU, progress=False
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_progress_is_drawn_on_stderr_only_when_asked_and_when_loading_takes_long(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.loading.loader._BAR_AFTER_SECONDS", 3600)
    load(checkpoint, progress=True)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("models.loading.loader._BAR_AFTER_SECONDS", 0)
    load(checkpoint)
    assert capfd.readouterr() == ("", "")
    load(checkpoint, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Loading weights: 100%" in err


def test_missing_parameters_are_counted_and_the_first_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(
        CheckpointError, match=r"lacks 9 tensors \(model\.layers\.1\.input_layernorm\.weight, .*, \.\.\.\)"
    ):
        load(checkpoint)


def test_one_missing_part_of_a_packed_parameter_is_named_as_the_checkpoint_names_it(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"))
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensor \(model\.layers\.0\.self_attn\.k_proj\.weight\), which"
    ):
        load(checkpoint)


def test_left_over_tensors_are_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"holds 1 tensor \(model\.layers\.0\.self_attn\.q_proj\.bias\), which"):
        load(checkpoint)


def test_computed_frequencies_and_a_copy_of_the_tied_embedding_are_ignored(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": embedding}
    expected = PagedModel(path).logits(prompt(9))
    rewrite(path, lambda tensors: tensors.update(extras))
    model = PagedModel(path)
    assert model.config.tie_word_embeddings
    assert_computes(model, prompt(9), expected)


def test_causal_masks_that_old_releases_saved_with_gptj_are_ignored(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, next(each.family for each in OLDER if each.architecture == "GPTJForCausalLM"))
    expected = PagedModel(path).logits(prompt(9))
    masks = {"bias": torch.ones(1, 1, 512, 512, dtype=torch.bool).tril(), "masked_bias": torch.tensor(-1e9)}
    extras = {f"transformer.h.{layer}.attn.{name}": each.clone() for layer in range(2) for name, each in masks.items()}
    rewrite(path, lambda tensors: tensors.update(extras))
    assert_computes(PagedModel(path), prompt(9), expected)


def test_a_head_that_is_not_tied_must_be_there(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(lm_head\.weight\)"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("model.embed_tokens.weight", "[307, 64]"),
        ("model.norm.weight", "[64]"),
        ("model.layers.1.self_attn.v_proj.weight", "[32, 64]"),
        ("model.layers.1.self_attn.o_proj.weight", "[64, 64]"),
        ("model.layers.0.mlp.up_proj.weight", "[112, 64]"),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(checkpoint: Path, name: str, needed: str) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(6, 5)}))
    with pytest.raises(CheckpointError) as error:
        load(checkpoint)
    assert str(error.value) == (
        f"{name} in {checkpoint / WEIGHTS} has shape [6, 5], where the model needs {needed}, by config.json"
    )


def test_quantised_tensors_are_refused(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(112, 64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight in .* is torch\.int8, .*no quantisation of it"):
        load(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a_truncated_file_is_named(checkpoint: Path, keep: int) -> None:
    file = checkpoint / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or is not a safetensors file"):
        load(checkpoint)


def test_weights_of_another_format_are_refused(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor .*; convert the weights"):
        load(checkpoint)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, max_shard_size="60KB")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 file \({gone.name}\), which {INDEX} names"):
        load(path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint.parent / WEIGHTS)
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="it must name files of that directory"):
        load(checkpoint)


@pytest.mark.parametrize("weight_map", [None, [], {"lm_head.weight": 3}])
def test_an_index_without_file_names_is_refused(checkpoint: Path, weight_map: object) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map"):
        load(checkpoint)


def test_a_config_of_another_model_is_caught(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"holds 9 tensors \(model\.layers\.1\."):
        load(checkpoint)


def test_a_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, max_shard_size="60KB")
    first, *_, last = sorted(path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file({**load_file(last), name: load_file(first)[name]}, last)
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert str(error.value) == f"{name} is in both {first} and {last.name}; only one may hold it"


def test_weights_that_exceed_the_memory_are_refused_before_any_is_read(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).write_bytes(b"")
    config = ModelConfig.from_checkpoint(checkpoint)
    with pytest.raises(
        CheckpointError, match=r"does not fit the memory: its weights take 0\.00 GiB, and 0\.00 GiB are"
    ):
        load_model(checkpoint, config, dtype=torch.float32, device=CPU, progress=False, available_bytes=100_000)


def test_a_depth_that_no_model_has_is_refused_before_a_layer_is_built(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", num_hidden_layers=2**31 - 1)
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers of .* is 2147483647; it must be an integer from 1 to"
    ):
        load(checkpoint)


def test_a_model_that_memory_cannot_hold_is_reported_in_a_sentence(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", vocab_size=2**31 - 1, hidden_size=2**30)
    with pytest.raises(CheckpointError, match=r"does not fit the memory of device cpu \(.*\)$"):
        load(checkpoint)


def test_an_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"architecture is 'GPT2LMHeadModel'.*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        ARCHITECTURES["GPT2LMHeadModel"]


def test_importing_a_model_imports_neither_transformers_nor_a_compiler() -> None:
    modules = "models.loading.loader, models.architectures.qwen3"
    code = f"import sys, {modules}; print([m for m in sys.modules if m in sys.argv])"
    slow = ["transformers", "torch._dynamo", "torch._inductor", "sympy", "models.demo", "engine", "server"]
    run = subprocess.run([sys.executable, "-c", code, *slow], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
