"""Experts compute the formula's results at any sharding, and load from any spelling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from models.architectures.config import ModelConfig
from models.errors import CheckpointError
from models.layers.moe import FusedMoE
from models.layers.parameter import sources_of
from models.layers.routing import softmax_top_k
from models.loading.loader import load_model
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, assert_computes, prompt
from tests.parity.test_model_sharding import fill, random, ranks
from tests.parity.tolerance import assert_within, with_bound
from tests.parity.variants import all_variants
from tests.sweeps import sweep

HIDDEN, INNER, EXPERTS, TOP_K = 12, 8, 6, 3
SUMMED = HIDDEN + INNER + TOP_K
"""Number of products that are summed one after the other on the way to an output; few, so all of them count."""
WEIGHTS = "model.safetensors"
VARIANTS = {
    variant.architecture: variant
    for variant in all_variants()
    if variant.architecture.startswith(("Mixtral", "Glm4", "Qwen3Moe"))
}


class Whole(nn.Module):
    """The checkpoint's tensors of one layer, and its formula written out."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate_up = _constant(random(EXPERTS, 2 * INNER, HIDDEN))
        self.down = _constant(random(EXPERTS, HIDDEN, INNER))
        self.gate_up_bias = _constant(random(EXPERTS, 2 * INNER) * bias)
        self.down_bias = _constant(random(EXPERTS, HIDDEN) * bias)

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for token, (its_weights, its_ids) in enumerate(zip(weights, ids, strict=True)):
            for weight, expert in zip(its_weights, its_ids, strict=True):
                gate, up = (self.gate_up[expert] @ hidden[token] + self.gate_up_bias[expert]).chunk(2)
                output[token] += weight * (self.down[expert] @ (F.silu(gate) * up) + self.down_bias[expert])
        return output

    def with_bound(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The formula's results, and bounds of each token's rounding errors."""
        return with_bound(self, lambda: self(*inputs), terms=SUMMED, draws=8)

    def fill(self, layer: FusedMoE, *, stacked: bool) -> None:
        for parameter, value, parts in (
            (layer.w13, self.gate_up, ("gate", "up")),
            (layer.w2, self.down, ("down",)),
            (layer.w13_bias, self.gate_up_bias, ("gate", "up")),
            (layer.w2_bias, self.down_bias, ("down",)),
        ):
            if parameter is None:
                continue
            parameter.data.fill_(torch.nan)
            if stacked:
                fill(parameter, value, "stacked")
                continue
            for expert in range(EXPERTS):
                for part, tensor in zip(parts, value[expert].chunk(len(parts)), strict=True):
                    fill(parameter, tensor, (expert, part))


def _constant(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def routed(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random(num_tokens, HIDDEN), *softmax_top_k(random(num_tokens, EXPERTS), TOP_K, renormalize=False)


@sweep(2, size=[1, 2, 4], bias=[False, True], stacked=[False, True])
def test_shards_of_experts_add_up_to_the_whole_layer(size: int, bias: bool, stacked: bool) -> None:
    whole, inputs = Whole(bias=bias), routed(7)
    total = torch.zeros(7, HIDDEN)
    for parallel in ranks(size):
        layer = FusedMoE(HIDDEN, INNER, EXPERTS, bias=bias, parallel=parallel)
        whole.fill(layer, stacked=stacked)
        total += layer(*inputs)
    assert_within(total, *whole.with_bound(*inputs))


@pytest.mark.parametrize("top_k", [1, EXPERTS])
def test_a_token_may_have_one_expert_or_all(top_k: int) -> None:
    whole, hidden = Whole(bias=False), random(5, HIDDEN)
    layer = FusedMoE(HIDDEN, INNER, EXPERTS)
    whole.fill(layer, stacked=False)
    chosen = softmax_top_k(random(5, EXPERTS), top_k, renormalize=True)
    assert_within(layer(hidden, *chosen), *whole.with_bound(hidden, *chosen))


def test_experts_that_no_token_chose_are_not_touched() -> None:
    layer = FusedMoE(HIDDEN, INNER, EXPERTS)
    Whole(bias=False).fill(layer, stacked=False)
    layer.w13.data[[0, 2, 3]] = torch.nan
    layer.w2.data[[0, 2, 3]] = torch.nan
    assert layer(random(4, HIDDEN), torch.ones(4, 2), torch.tensor([[5, 1], [1, 4], [5, 4], [4, 1]])).isfinite().all()


def test_more_experts_than_the_operators_have_memory_for_are_refused_before_any_weight_is_made() -> None:
    with pytest.raises(CheckpointError, match="gives a layer 1000000000 experts; it must be at most 65536"):
        FusedMoE(4096, 4096, 10**9)


def test_an_intermediate_size_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 4, which does not divide the experts' intermediate size, 6"
    ):
        FusedMoE(HIDDEN, 6, EXPERTS, parallel=ranks(4)[0])


def checkpoint_of(architecture: str, directory: Path) -> Path:
    variant = VARIANTS[architecture]
    return make_checkpoint(directory, variant.family, **variant.overrides)


def load(path: Path) -> None:
    load_model(path, ModelConfig.from_checkpoint(path), dtype=torch.float32, device=CPU, progress=False)


def stack_experts(path: Path) -> None:
    """Rewrite a GLM checkpoint with one tensor for all experts of a layer."""
    tensors = load_file(path / WEIGHTS)
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        experts = range(len({name.split(".")[5] for name in tensors if name.startswith(f"{layer}.experts.")}))
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}.experts.{expert}.{part}_proj.weight") for expert in experts])
            for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{layer}.experts.down_proj"] = down
    assert layers
    save_file(tensors, path / WEIGHTS)


def test_stacked_experts_load_the_same_as_one_tensor_an_expert(tmp_path: Path) -> None:
    path = checkpoint_of("Glm4MoeForCausalLM", tmp_path)
    expected = PagedModel(path).logits(prompt(9))
    stack_experts(path)
    assert_computes(PagedModel(path), prompt(9), expected)


def test_experts_in_both_spellings_are_left_over_in_one(tmp_path: Path) -> None:
    path = checkpoint_of("Glm4MoeForCausalLM", tmp_path)
    tensors = load_file(path / WEIGHTS)
    stack_experts(path)
    save_file({**load_file(path / WEIGHTS), **tensors}, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"holds \d+ tensors \(model\.layers\.2\.mlp\.experts"):
        load(path)


@pytest.mark.parametrize("name", ["experts.2.w3.weight", "experts.0.w2.weight", "gate.weight"])
def test_a_missing_part_of_an_expert_is_named_as_the_checkpoint_names_it(tmp_path: Path, name: str) -> None:
    path = checkpoint_of("MixtralForCausalLM", tmp_path)
    tensors = load_file(path / WEIGHTS)
    missing = f"model.layers.1.block_sparse_moe.{name}"
    del tensors[missing]
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert f"lacks 1 tensor ({missing}), which MixtralForCausalLM needs" in str(error.value)


def test_where_all_experts_are_missing_one_spelling_is_named(tmp_path: Path) -> None:
    path = checkpoint_of("MixtralForCausalLM", tmp_path)
    tensors = {name: tensor for name, tensor in load_file(path / WEIGHTS).items() if ".1.block" not in name}
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(
        CheckpointError, match=r"lacks 10 tensors \(model\.layers\.1\.block_sparse_moe\.experts\.0\.w1"
    ):
        load(path)


@pytest.mark.parametrize("name", ["experts.1.w1.weight", "experts.1.w2.weight"])
def test_a_misshapen_expert_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    path = checkpoint_of("MixtralForCausalLM", tmp_path)
    name = f"model.layers.0.block_sparse_moe.{name}"
    save_file({**load_file(path / WEIGHTS), name: torch.zeros(6, 5)}, path / WEIGHTS)
    needed = [48, 64] if "w1" in name else [64, 48]
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert f"{name} in {path / WEIGHTS} has shape [6, 5], where the model needs {needed}" in str(error.value)


def test_layers_that_predict_further_tokens_are_ignored_as_many_as_the_config_names(tmp_path: Path) -> None:
    path = checkpoint_of("Glm4MoeForCausalLM", tmp_path)
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    extra = f"model.layers.{layers}.eh_proj.weight"
    save_file({**load_file(path / WEIGHTS), extra: torch.zeros(3)}, path / WEIGHTS)
    with pytest.raises(CheckpointError, match="holds 1 tensor"):
        load(path)
    edit_json(path / "config.json", num_nextn_predict_layers=1)
    load(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_group": 3}, "n_group of .* is 3; it must be a divisor of n_routed_experts, 8"),
        ({"n_group": 8, "topk_group": 2}, "n_group of .* is 8; .*, for 2 or more a group"),
        ({"n_group": 2, "topk_group": 3}, "topk_group of .* is 3; it must be at most n_group, 2"),
        (
            {"n_group": 4, "num_experts_per_tok": 3},
            "num_experts_per_tok of .* is 3; it must be at most 2, the experts",
        ),
        ({"use_qk_norm": "yes"}, 'use_qk_norm of .* is "yes"; it must be true or false'),
    ],
)
def test_a_config_that_routes_nowhere_is_refused_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = checkpoint_of("Glm4MoeForCausalLM", tmp_path)
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=sentence):
        load(path)


@pytest.mark.parametrize("value", [3, [1, "2"], [-1], [True]])
def test_dense_layers_must_be_named_by_their_numbers(tmp_path: Path, value: object) -> None:
    path = checkpoint_of("Qwen3MoeForCausalLM", tmp_path)
    edit_json(path / "config.json", mlp_only_layers=value)
    with pytest.raises(CheckpointError, match=r"mlp_only_layers of .* it must be a list of integers from 0"):
        load(path)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Glm4MoeForCausalLM"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_loads_into_each_rank(tmp_path: Path, architecture: str, size: int) -> None:
    path = checkpoint_of(architecture, tmp_path)
    for parallel in ranks(size):
        model = load_model(
            path, ModelConfig.from_checkpoint(path), dtype=torch.float32, device=CPU, progress=False, parallel=parallel
        )
        packed = [parameter for parameter in model.parameters() if sources_of(parameter)]
        assert packed
        assert all(parameter.isfinite().all() for parameter in model.parameters())
