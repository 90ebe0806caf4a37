"""Layers with kernels give the results of torch: norms, activations, routers and experts."""

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from models.architectures.gpt_oss import GptOssRouter
from models.layers.moe import FusedMoE
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.layers.routing import GroupedRouter, SoftmaxRouter
from models.ops import triton as kernels
from models.ops.activation import clamped_swiglu, geglu_tanh, swiglu
from models.parallel.tensor_parallel import ExpertParallel
from tests.parity.test_model_sharding import random, ranks
from tests.parity.test_moe import EXPERTS, HIDDEN, INNER, SUMMED, Whole, routed
from tests.parity.tolerance import assert_within, with_bound
from tests.parity.triton_interpreter import DEVICE, requires_interpreter

pytestmark = requires_interpreter


def both(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernels, and by torch."""
    by_torch = compute()
    reason = kernels.start(DEVICE)
    assert reason is None, reason
    by_kernels = compute()
    kernels.stop()
    return by_kernels, by_torch


def filled(layer: nn.Module) -> nn.Module:
    for nth, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(random(*parameter.shape, nth + 1).select(-1, 0))
    return layer


@pytest.mark.parametrize("norm_class", [RMSNorm, OffsetRMSNorm])
def test_norms(norm_class: type[RMSNorm]) -> None:
    norm = filled(norm_class(48, 1e-6))
    x, residual = random(5, 48), random(5, 48) * 2
    torch.testing.assert_close(*both(lambda: norm(x)))
    torch.testing.assert_close(*both(lambda: torch.cat(norm.add_norm(x, residual.clone()))))
    torch.testing.assert_close(*both(lambda: norm.norm_add(x, residual.clone())))


def test_the_norm_of_heads_that_lie_apart() -> None:
    norm = filled(RMSNorm(8, 1e-6))
    heads = random(5, 60)[:, 12:44].unflatten(-1, (4, 8))
    torch.testing.assert_close(*both(lambda: norm(heads)))


@pytest.mark.parametrize("activation", [swiglu, geglu_tanh, partial(clamped_swiglu, alpha=1.702, limit=1.0)])
def test_activations(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gate_up = random(3, 40) * 3
    torch.testing.assert_close(*both(lambda: activation(gate_up)))


@pytest.mark.parametrize(
    "router",
    [
        SoftmaxRouter(HIDDEN, 12, 4, renormalize=True),
        SoftmaxRouter(HIDDEN, 12, 4, renormalize=False),
        GptOssRouter(HIDDEN, 12, 4),
        GroupedRouter(HIDDEN, 12, 4, renormalize=True, num_groups=4, top_groups=2, scaling_factor=2.5),
        GroupedRouter(HIDDEN, 12, 4, renormalize=False, scoring="softmax", has_correction_bias=False),
    ],
)
def test_routers(router: nn.Module) -> None:
    filled(router)
    hidden = random(9, HIDDEN)

    def by_expert() -> torch.Tensor:
        weights, ids = router(hidden)
        return torch.zeros(9, 12).scatter_(-1, ids, weights)

    torch.testing.assert_close(*both(by_expert))


@pytest.mark.parametrize(
    "activation", [swiglu, partial(clamped_swiglu, alpha=1.702, limit=1.0), lambda x: x.chunk(2, -1)[1]]
)
@pytest.mark.parametrize("size", [1, 2])
def test_experts_of_ranks(size: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole, inputs = Whole(bias=True), routed(19)
    for parallel in ranks(size):
        layer = FusedMoE(HIDDEN, INNER, EXPERTS, activation=activation, bias=True, parallel=parallel)
        whole.fill(layer, stacked=True)
        for shared in ((), (random(19, HIDDEN), random(19, 1))):
            compute = partial(layer, *inputs, *shared)
            by_kernels, _ = both(compute)
            assert_within(by_kernels, *with_bound(layer, compute, terms=SUMMED, draws=8))


@pytest.mark.parametrize("size", [2, 3])
def test_experts_that_are_held_elsewhere_give_nothing(size: int) -> None:
    whole, inputs = Whole(bias=True), routed(7)
    total = torch.zeros(7, HIDDEN)
    for parallel in ranks(size):
        parallel = dataclasses.replace(parallel, experts=ExpertParallel())
        layer = FusedMoE(HIDDEN, INNER, EXPERTS, bias=True, parallel=parallel)
        whole.fill(layer, stacked=True)
        total += both(lambda: layer(*inputs))[0]  # noqa: B023
    assert_within(total, *whole.with_bound(*inputs))
