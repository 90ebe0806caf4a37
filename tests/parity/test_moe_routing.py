"""Routers select the experts, and the weights, that transformers' routers select."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from models.layers.routing import grouped_top_k, softmax_top_k
from models.ops.torch_ops import top_k_lower_first
from tests.parity.test_model_sharding import random

HIDDEN, EXPERTS, TOP_K = 12, 6, 3


def theirs(router: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The router's weights, zero for experts that were not selected. # [tokens, experts]"""
    with torch.inference_mode():
        logits, weights, ids = router(hidden)
    return torch.zeros(logits.shape).scatter_(-1, ids, weights)


def ours(chosen: tuple[torch.Tensor, torch.Tensor], num_experts: int) -> torch.Tensor:
    weights, ids = chosen
    return torch.zeros(len(ids), num_experts).scatter_(-1, ids, weights)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_routing_is_that_of_qwen3_and_mixtral(renormalize: bool) -> None:
    fields: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**fields, num_experts=EXPERTS, norm_topk_prob=renormalize))
    mixtral = MixtralTopKRouter(MixtralConfig(**fields, num_local_experts=EXPERTS))
    hidden, weight = random(50, HIDDEN), random(EXPERTS, HIDDEN)
    router.weight.data.copy_(weight)
    mixtral.weight.data.copy_(weight)
    found = ours(softmax_top_k(hidden @ weight.T, TOP_K, renormalize=renormalize), EXPERTS)
    torch.testing.assert_close(found, theirs(router, hidden))
    if renormalize:
        torch.testing.assert_close(found, theirs(mixtral, hidden))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (4, 3), (3, 1)])
@pytest.mark.parametrize(
    ("router_class", "config_class"),
    [(DeepseekV3TopkRouter, DeepseekV3Config), (Glm4MoeTopkRouter, Glm4MoeConfig)],
)
def test_grouped_routing_with_correction_bias_is_that_of_deepseek_v3_and_glm(
    router_class: type[nn.Module], config_class: Any, num_groups: int, top_groups: int, renormalize: bool
) -> None:
    config = config_class(
        hidden_size=HIDDEN,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    hidden, weight, bias = random(50, HIDDEN), random(24, HIDDEN), random(24)
    router: Any = router_class(config)
    router.weight.data.copy_(weight)
    router.e_score_correction_bias.copy_(bias)
    chosen = grouped_top_k(
        hidden @ weight.T,
        4,
        renormalize=renormalize,
        correction_bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=2.5,
    )
    torch.testing.assert_close(ours(chosen, 24), theirs(router, hidden))


@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (6, 5)])
def test_grouped_routing_without_correction_bias_is_that_of_deepseek_v2(num_groups: int, top_groups: int) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=top_groups,
        topk_method="greedy" if num_groups == 1 else "group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    router, hidden, weight = DeepseekV2TopkRouter(config), random(50, HIDDEN), random(24, HIDDEN)
    router.weight.data.copy_(weight)
    chosen = grouped_top_k(
        hidden @ weight.T,
        4,
        renormalize=False,
        scoring="softmax",
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=16.0,
    )
    torch.testing.assert_close(ours(chosen, 24), theirs(router, hidden))


def test_a_group_left_out_gives_no_expert_even_where_the_bias_makes_all_scores_negative() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]])
    bias = torch.full((6,), -5.0)
    _, ids = grouped_top_k(logits, 2, renormalize=True, correction_bias=bias, num_groups=3, top_groups=1)
    assert sorted(ids[0].tolist()) == [0, 1]


def test_the_lower_of_equal_experts_is_chosen_by_every_way_of_choosing() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 1.0, 1.0, -0.0, 0.0], [0.0] * 8])
    _, ids = softmax_top_k(logits, 4, renormalize=True)
    assert ids.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]
    _, ids = grouped_top_k(logits, 2, renormalize=True, num_groups=4, top_groups=2)
    assert ids.tolist() == [[1, 2], [0, 1]]


def test_the_largest_numbers_are_taken_in_order_and_the_lower_index_of_equal_ones() -> None:
    values = (torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 4).round() / 2
    values[0, :7] = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, -1e-30, 1e-30, torch.inf])
    found, ids = top_k_lower_first(values, 40)
    order = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found, order.values[:, :40])
    assert torch.equal(ids, order.indices[:, :40])
