"""The CPU's operators of mixtures of experts against torch, for every instruction set of this processor."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from models.layers.moe import FusedMoE
from models.layers.parameter import fill_rows, pack_products
from models.layers.routing import grouped_top_k, softmax_top_k
from models.ops.activation import GatedActivation, clamped_swiglu, clipped_swiglu, swiglu
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime, structures
from models.ops.cpu.packed_weight import PackedWeight, QuantizedWeight
from models.ops.cpu.program import NotRecordable, record
from tests.parity.test_cpu_operators import bf16, operators, packed, pytestmark
from tests.parity.tolerance import gamma

__all__ = ["operators", "pytestmark"]


def f32(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("operators")
class TestFloatLinear:
    @pytest.mark.parametrize(
        ("rows", "inputs", "outputs"), [(1, 64, 8), (2, 100, 7), (5, 1031, 1), (33, 7, 66), (70, 512, 130)]
    )
    def test_equals_the_reference(self, rows: int, inputs: int, outputs: int) -> None:
        x, weight = bf16(rows, inputs), f32(outputs, inputs, seed=1)
        expected = x.double() @ weight.double().T
        found = expert_ops.float_linear(x, weight)
        assert (found - expected).abs().max() <= 1e-6 * math.sqrt(inputs) * expected.abs().max()

    def test_gives_a_row_the_same_in_any_company(self) -> None:
        x, weight = bf16(103, 1000), f32(37, 1000, seed=1)
        together = expert_ops.float_linear(x, weight)
        for size in (1, 2, 5, 16, 31):
            assert torch.equal(
                torch.cat([expert_ops.float_linear(part, weight) for part in x.split(size)]), together
            ), size

    def test_reads_rows_of_any_stride(self) -> None:
        wide, weight = bf16(9, 200), f32(40, 96, seed=1)
        assert torch.equal(
            expert_ops.float_linear(wide[:, 64:160], weight), expert_ops.float_linear(wide[:, 64:160].clone(), weight)
        )


def assert_same_choice(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], experts: int
) -> None:
    """Both sum over all experts; an exponential and two quotients add errors of a few units of roundoff."""
    order = [ids.argsort(dim=-1) for _, ids in (found, expected)]
    ids = [of[1].gather(-1, by) for of, by in zip((found, expected), order, strict=True)]
    weights = [of[0].gather(-1, by) for of, by in zip((found, expected), order, strict=True)]
    assert torch.equal(*ids)
    torch.testing.assert_close(*weights, rtol=2 * gamma(experts + 8), atol=0)


@pytest.mark.usefixtures("operators")
class TestRoute:
    @pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (9, 9), (128, 8), (257, 3)])
    @pytest.mark.parametrize("renormalize", [True, False])
    def test_softmax_equals_the_reference(self, experts: int, top_k: int, renormalize: bool) -> None:
        logits = 4 * f32(23, experts)
        found = expert_ops.route(logits, top_k, scoring=structures.SOFTMAX, renormalize=renormalize)
        assert_same_choice(found, softmax_top_k(logits, top_k, renormalize=renormalize), experts)

    def test_the_largest_number_of_experts_fits_a_threads_memory(self) -> None:
        experts = structures.MAX_EXPERTS
        options: dict[str, Any] = {"renormalize": True, "num_groups": experts // 2, "top_groups": 60}
        logits, correction = f32(2, experts), f32(experts, seed=1)
        found = expert_ops.route(logits, 100, scoring=structures.SIGMOID, correction=correction, **options)
        expected = grouped_top_k(logits, 100, correction_bias=correction, **options)
        assert_same_choice(found, expected, experts)
        counts, _, _ = expert_ops.sort_pairs(found[1], experts)
        assert torch.equal(counts, found[1].flatten().bincount(minlength=experts))

    @pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (8, 8), (3, 1)])
    @pytest.mark.parametrize("corrected", [True, False])
    @pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
    def test_groups_equal_the_reference(self, num_groups: int, top_groups: int, corrected: bool, scoring: Any) -> None:
        logits = f32(31, 24)
        options: dict[str, Any] = {"num_groups": num_groups, "top_groups": top_groups, "scaling_factor": 2.5}
        correction = f32(24, seed=1) if corrected else None
        found = expert_ops.route(
            logits,
            3,
            scoring={"sigmoid": structures.SIGMOID, "softmax": structures.SOFTMAX}[scoring],
            renormalize=True,
            correction=correction,
            **options,
        )
        expected = grouped_top_k(logits, 3, renormalize=True, scoring=scoring, correction_bias=correction, **options)
        assert_same_choice(found, expected, 24)

    @pytest.mark.parametrize("by_token", [False, True])
    def test_roots_of_softplus_equal_the_reference(self, by_token: bool) -> None:
        experts, top_k, vocabulary = 24, 3, 40
        logits, correction = 30 * f32(17, experts), f32(experts, seed=2)
        scores = torch.nn.functional.softplus(logits).sqrt()
        table = torch.stack([torch.randperm(experts)[:top_k] for _ in range(vocabulary)])
        tokens = torch.arange(17) * 2
        ids = table[tokens] if by_token else (scores + correction).topk(top_k).indices
        weights = scores.gather(1, ids)
        expected = weights / weights.sum(-1, keepdim=True) * 1.5, ids
        found = expert_ops.route(
            logits,
            top_k,
            scoring=structures.SQRT_SOFTPLUS,
            renormalize=True,
            correction=None if by_token else correction,
            scaling_factor=1.5,
            table=(table, tokens) if by_token else None,
        )
        assert_same_choice(found, expected, experts)

    def test_of_equals_the_first_are_chosen_best_first(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
        weights, ids = expert_ops.route(logits, 4, scoring=structures.SOFTMAX, renormalize=True)
        assert ids.tolist() == [[1, 3, 2, 4]]
        assert weights[0, 0] == weights[0, 1] > weights[0, 2] == weights[0, 3]
        _, ids = expert_ops.route(
            torch.zeros(1, 6), 2, scoring=structures.SIGMOID, renormalize=True, num_groups=3, top_groups=1
        )
        assert ids.tolist() == [[0, 1]]

    @pytest.mark.parametrize("scoring", [structures.SOFTMAX, structures.SIGMOID, structures.SQRT_SOFTPLUS])
    @pytest.mark.parametrize("value", [-1e30, 1e30, torch.inf, -torch.inf, torch.nan])
    def test_chooses_different_experts_whatever_the_scores(self, scoring: int, value: float) -> None:
        logits = f32(2, 8)
        logits[0], logits[1, 3:] = value, value
        _, ids = expert_ops.route(logits, 3, scoring=scoring, renormalize=True, num_groups=4, top_groups=2)
        assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in ids.tolist())

    def test_a_score_that_is_no_number_reaches_the_weights(self) -> None:
        logits = f32(1, 8)
        logits[0, 5] = torch.nan
        weights, ids = expert_ops.route(logits, 2, scoring=structures.SIGMOID, renormalize=False)
        assert ids[0, 0] == 5
        assert weights[0, 0].isnan()


@pytest.mark.usefixtures("operators")
class TestPairs:
    @pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (7, 4, 2), (100, 60, 8), (3, 500, 5)])
    def test_are_sorted_by_expert_in_the_order_of_tokens(self, tokens: int, experts: int, top_k: int) -> None:
        ids = f32(tokens, experts).topk(top_k).indices
        counts, of_token, places = expert_ops.sort_pairs(ids, experts)
        order = ids.flatten().argsort(stable=True)
        assert torch.equal(counts, ids.flatten().bincount(minlength=experts))
        assert torch.equal(of_token, order // top_k)
        assert torch.equal(places.flatten()[order], torch.arange(tokens * top_k))

    @pytest.mark.parametrize("size", [1, 30, 129])
    @pytest.mark.parametrize("has_shared", [True, False])
    def test_are_added_up_by_their_weights(self, size: int, has_shared: bool) -> None:
        ids = f32(9, 6).topk(3).indices
        _, _, places = expert_ops.sort_pairs(ids, 6)
        products, weights = bf16(27, size), f32(9, 3).abs()
        shared = bf16(9, size, seed=1) if has_shared else None
        expected = (products.double()[places] * weights[..., None]).sum(1)
        expected += 0 if shared is None else shared
        found = expert_ops.combine(products, weights, places, shared)
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-5)

    def test_meet_their_experts_weights_without_being_gathered_first(self) -> None:
        counts, x = torch.tensor([0, 3, 0, 17, 40]), bf16(20, 100)
        weights, tokens = packed(bf16(5 * 64, 100, seed=1)), torch.arange(60) % 20
        assert torch.equal(
            ops.grouped_linear(x, weights, None, counts, tokens=tokens),
            ops.grouped_linear(x[tokens], weights, None, counts),
        )


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("tokens", [1, 9, 70, 300])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_groups_of_columns_are_multiplied_by_their_own_weights(tokens: int, bits: int) -> None:
    weights = PackedWeight(3 * 64, 160) if bits == 16 else QuantizedWeight(3 * 64, 160, bits)
    weights.put(0, bf16(3 * 64, 160, seed=1))
    x = bf16(tokens, 3, 160)
    runs = ops.grouped_linear(x.transpose(0, 1).reshape(-1, 160), weights, None, torch.tensor([tokens] * 3))
    expected = runs.view(3, tokens, 64).transpose(0, 1).reshape(tokens, -1)
    assert torch.equal(ops.linear_by_group(x, weights, 64), expected)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    "activation", [partial(clamped_swiglu, alpha=1.702, limit=7.0), partial(clipped_swiglu, limit=7.0)]
)
def test_a_clamped_gate_equals_the_reference(activation: GatedActivation) -> None:
    gate_up = bf16(5, 2 * 77, scale=4.0)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 77], gate_up[3, 77] = 300.0, -300.0, 300.0, -300.0
    gate_up[4, 0], gate_up[4, 78] = torch.nan, torch.nan
    expected, found = activation(gate_up.float()), activation(gate_up)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-5, equal_nan=True)


def experts(hidden: int, inner: int, count: int, *, is_packed: bool, **options: Any) -> FusedMoE:
    made = FusedMoE(hidden, inner, count, **options).bfloat16()
    if is_packed:
        pack_products(made)
    for name, shape in ("w13", (count, 2 * inner, hidden)), ("w2", (count, hidden, inner)):
        for place, weight in enumerate(bf16(*shape, seed=len(name), scale=0.1)):
            fill_rows(getattr(made, name), 0, weight, place)
    for bias in (made.w13_bias, made.w2_bias):
        if bias is not None:
            bias.data.copy_(bf16(*bias.shape, seed=9))
    return made


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("bias", [True, False])
def test_experts_equal_torchs_and_give_a_token_the_same_in_any_company(bias: bool) -> None:
    options = {"bias": bias, "activation": partial(clamped_swiglu, alpha=1.7, limit=2.0) if bias else swiglu}
    hidden, shared = bf16(150, 96), bf16(150, 96, seed=5)
    weights, ids = softmax_top_k(f32(150, 7), 3, renormalize=True)
    ours = experts(96, 48, 7, is_packed=True, **options)
    with torch.inference_mode():
        together = ours(hidden, weights, ids, shared)
        for size in (1, 4, 33):
            rows = [part.split(size) for part in (hidden, weights, ids, shared)]
            assert torch.equal(torch.cat([ours(*some) for some in zip(*rows, strict=True)]), together)
        runtime.stop()
        expected = experts(96, 48, 7, is_packed=False, **options).float()(hidden.float(), weights, ids, shared.float())
    assert (together - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_rows_that_are_no_multiple_of_the_steps_tokens_are_not_recorded() -> None:
    loaded = runtime.start(1)
    assert loaded is not None
    weight = packed(bf16(32, 32))

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del positions
        return ops.linear(ops.embed(input_ids, weight)[1:], weight)

    with pytest.raises(NotRecordable, match="has 4 rows where the step has 5 tokens"):
        record(loaded, forward, 5)
