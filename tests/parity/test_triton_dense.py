"""The kernels of norms, activations and mixtures of experts against their torch references."""

import functools

import pytest
import torch

from models.layers.routing import grouped_top_k, softmax_top_k
from models.ops.triton import elementwise, expert_products, expert_routing
from models.ops.triton.cases import elementwise as elementwise_reference
from models.ops.triton.cases import experts as experts_reference
from models.ops.types import CLAMPED_SILU, CLIPPED_SILU, GELU_TANH, SILU
from tests.parity.triton_interpreter import DEVICE
from tests.sweeps import sweep

# A rounding to bfloat16 or float16 may go either way, twice if two numbers were rounded.
CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 4e-2), torch.float16: (2e-3, 4e-3)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = CLOSE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@sweep(
    2,
    shape=[(1, 64), (5, 96), (3, 7), (2, 3, 130)],
    mode=[elementwise.PLAIN, elementwise.ADD_NORM, elementwise.NORM_ADD],
    dtype=DTYPES,
)
def test_rms_norm(shape: tuple[int, ...], mode: int, dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    residual, of_reference = (
        None if mode == elementwise.PLAIN else random(*shape, dtype=dtype, seed=2) for _ in range(2)
    )
    found = elementwise.rms_norm(x, weight, 1e-5, offset=1.0, residual=residual, mode=mode)
    expected = elementwise_reference.reference_rms_norm(x, weight, 1e-5, offset=1.0, residual=of_reference, mode=mode)
    assert_close(found, expected)
    if residual is not None and of_reference is not None:
        assert_close(residual, of_reference)


def test_rms_norm_of_rows_that_lie_apart() -> None:
    wide = random(5, 40)
    weight = random(24, seed=1)
    assert_close(
        elementwise.rms_norm(wide[:, 8:32], weight, 1e-5),
        elementwise_reference.reference_rms_norm(wide[:, 8:32], weight, 1e-5),
    )


@sweep(2, features=[8, 33, 96], activation=[SILU, GELU_TANH, CLAMPED_SILU, CLIPPED_SILU], dtype=DTYPES)
def test_gated(activation: int, features: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * features, dtype=dtype) * 4
    compute = functools.partial(elementwise_reference.reference_gated, gate_up, activation, alpha=1.702, limit=7.0)
    assert_close(elementwise.gated(gate_up, activation, alpha=1.702, limit=7.0), compute())


@pytest.mark.parametrize("experts", [6, 16, 60])
@pytest.mark.parametrize(("sigmoid", "renormalize"), [(False, True), (False, False), (True, True)])
def test_moe_route(experts: int, sigmoid: bool, renormalize: bool) -> None:
    # Rounded, so that some experts are equal.
    logits = (random(5, experts) * 2).round() / 2
    how = {"sigmoid": sigmoid, "renormalize": renormalize, "scaling_factor": 1.5}
    weights, ids = expert_routing.moe_route(logits, 3, **how)
    expected_weights, expected_ids = experts_reference.reference_moe_route(logits, 3, **how)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("corrected", [False, True])
def test_moe_route_by_groups_is_that_of_the_layer(groups: int, top_groups: int, corrected: bool) -> None:
    logits = random(7, 24, seed=3)
    correction = random(24, seed=4) if corrected else None
    weights, ids = expert_routing.moe_route(
        logits,
        4,
        sigmoid=True,
        renormalize=True,
        correction=correction,
        num_groups=groups,
        top_groups=top_groups,
        scaling_factor=2.5,
    )
    expected_weights, expected_ids = grouped_top_k(
        logits,
        4,
        renormalize=True,
        correction_bias=correction,
        num_groups=groups,
        top_groups=top_groups,
        scaling_factor=2.5,
    )
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights)


def test_moe_route_chooses_experts_whatever_the_logits_are() -> None:
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    logits[1] = -torch.inf
    _, ids = expert_routing.moe_route(logits, 4, sigmoid=True, renormalize=True)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_moe_route_of_softmax_is_that_of_the_layer() -> None:
    logits = random(4, 60, dtype=torch.bfloat16)
    weights, ids = expert_routing.moe_route(logits, 5, sigmoid=False, renormalize=True)
    expected_weights, expected_ids = softmax_top_k(logits, 5, renormalize=True)
    assert_close(weights, expected_weights)
    assert_close(logits.gather(1, ids).float(), logits.gather(1, expected_ids).float())


def blocks_of(found: expert_routing.SortedPairs) -> list[tuple[int, list[int]]]:
    of_experts = [
        (int(found.block_experts[nth]), found.pairs[nth * found.block :][: int(found.block_rows[nth])].tolist())
        for nth in range(int(found.num_blocks))
    ]
    return sorted(of_experts)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"), [(1, 2, 5, 16), (3, 4, 6, 2), (40, 3, 11, 4), (70, 1, 1, 16)]
)
@pytest.mark.parametrize("held", [1.0, 0.5])
def test_moe_sort(tokens: int, top_k: int, experts: int, block: int, held: float) -> None:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    ids = scores.topk(top_k).indices.to(DEVICE)
    num_experts = max(1, int(experts * held))
    found = expert_routing.moe_sort(ids, num_experts, block)
    assert blocks_of(found) == sorted(experts_reference.reference_moe_sort(ids, num_experts, block))
    assert int(found.num_blocks) <= found.max_blocks


@sweep(
    2,
    dtype=DTYPES,
    sizes=[(1, 2, 4, 32, 16), (5, 3, 7, 24, 20), (30, 2, 3, 16, 17)],
    block=[16, 64],
    gating=[expert_products.Gating(SILU), expert_products.Gating(CLAMPED_SILU, 1.702, 7.0)],
)
def test_moe_gemm_both_ways_and_combine(
    sizes: tuple[int, int, int, int, int], gating: expert_products.Gating, block: int, dtype: torch.dtype
) -> None:
    tokens, top_k, experts, hidden, inner = sizes
    x = random(tokens, hidden, dtype=dtype)
    has_bias = gating.activation == CLAMPED_SILU
    w13, w2 = random(experts, 2 * inner, hidden, dtype=dtype), random(experts, hidden, inner, dtype=dtype)
    b13, b2 = (
        random(*shape, dtype=dtype) if has_bias else None for shape in ((experts, 2 * inner), (experts, hidden))
    )
    ids = torch.rand(tokens, experts + 2, generator=torch.Generator().manual_seed(1)).topk(top_k).indices.to(DEVICE)
    weights = random(tokens, top_k).abs()
    pairs = expert_routing.moe_sort(ids, experts, block)

    gates = expert_products.moe_gemm(x, w13, b13, pairs, ids.numel(), gating=gating)
    here = (ids < experts).flatten()
    expected_gates = experts_reference.reference_moe_gemm(x, w13, b13, ids, gating=gating)
    assert_close(gates[here], expected_gates[here])

    products = expert_products.moe_gemm(expected_gates, w2, b2, pairs, ids.numel())
    expected_products = experts_reference.reference_moe_gemm(expected_gates, w2, b2, ids)
    assert_close(products[here], expected_products[here])

    products[~here] = torch.nan
    shared, gate = random(tokens, hidden, dtype=dtype), random(tokens, 1)
    for also in ((), (shared,), (shared, gate)):
        found = expert_routing.moe_combine(products, weights, ids, experts, *also)
        assert_close(found, experts_reference.reference_moe_combine(products, weights, ids, experts, *also))


def test_pairs_of_a_block_do_not_change_each_other() -> None:
    x, w = random(20, 32, dtype=torch.bfloat16), random(2, 24, 32, dtype=torch.bfloat16)
    ids = torch.zeros(20, 1, dtype=torch.int64, device=DEVICE)
    whole = expert_products.moe_gemm(x, w, None, expert_routing.moe_sort(ids, 2, 16), 20)
    for token in (0, 7, 19):
        alone = expert_products.moe_gemm(x[token : token + 1], w, None, expert_routing.moe_sort(ids[:1], 2, 16), 1)
        assert torch.equal(alone[0], whole[token])
