"""Products with weights of 8 and 4 bits against float references, for each instruction set of this processor."""

import itertools
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from models.ops.cpu import dense as ops
from models.ops.cpu import runtime, structures
from models.ops.cpu.packed_weight import BLOCK, STEP, QuantizedWeight, padded, quantized_bytes
from tests.parity.test_cpu_operators import LIBRARY, PATHS, SILU, bf16, greedy_head
from tests.sweeps import sweep

pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="the operators were not built: install again where there is a C compiler"
)
Bits = Literal[4, 8]
SIZES = [(1, 64, 64), (3, 100, 70), (17, 1024, 96), (33, 48, 1000), (65, 1031, 65), (513, 544, 40), (16, 1, 1)]


@pytest.fixture(params=PATHS, ids=runtime.INSTRUCTION_SETS.__getitem__, autouse=True)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """The operators on two threads, with each instruction set that this processor supports."""
    runtime.start(2, request.param)
    yield
    runtime.stop()


@pytest.fixture(params=[8, 4])
def bits(request: pytest.FixtureRequest) -> Bits:
    return request.param  # type: ignore[no-any-return]


def quantized(weight: torch.Tensor, bits: Bits) -> QuantizedWeight:
    made = QuantizedWeight(*weight.shape, bits)
    made.put(0, weight)
    return made


def held(weight: QuantizedWeight) -> torch.Tensor:
    """The rounded weight: its products with ones, each alone in its block. # [out, in] float64"""
    ones = torch.eye(weight.in_features).bfloat16()
    return ops.linear(ones, weight, dtype=torch.float32).double().T


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows as products round them: one scale for 128 inputs, and its inverse in float32. # [rows, in] -> float64"""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    inverse = torch.full_like(most, 127).div(most)
    return ((blocks.double() * inverse.double()).round() * most.double() / 127).flatten(1)[:, : x.shape[1]]


def largest(weight: torch.Tensor, group: int) -> torch.Tensor:
    """The largest magnitude of each group of a row's inputs, for each input. # [out, in]"""
    groups = torch.nn.functional.pad(weight.double(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    return groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_equals_the_reference(rows: int, inputs: int, outputs: int, bits: Bits) -> None:
    x, weight, bias = bf16(rows, inputs), quantized(bf16(outputs, inputs, seed=1), bits), bf16(outputs, seed=2)
    expected = rounded_rows(x) @ held(weight).T + bias.double()
    found = ops.linear(x, weight, bias, dtype=torch.float32)
    sizes = rounded_rows(x).abs() @ held(weight).abs().T + bias.double().abs()
    # Sums of integers are exact, so an error of one in them would be seen: only the sum of blocks is rounded.
    assert ((found - expected).abs() <= 2**-20 * sizes).all()
    assert torch.equal(ops.linear(x, weight, bias), found.bfloat16())


@pytest.mark.parametrize("inputs", [1, 64, 100, 1031])
def test_rounding_8_bits_errs_by_half_a_step(inputs: int) -> None:
    weight = bf16(70, inputs) * torch.logspace(-6, 6, 70)[:, None].bfloat16()
    error = (held(quantized(weight, 8)) - weight.double()).abs()
    # A scale is rounded up to bfloat16.
    assert (error <= largest(weight, BLOCK) / 127 * (0.5 + 2**-7) * (1 + 1e-5)).all()


@pytest.mark.parametrize("inputs", [64, 100, 1031])
def test_rounding_4_bits_errs_little(inputs: int) -> None:
    weight = bf16(70, inputs) * torch.logspace(-25, 35, 70)[:, None].bfloat16()
    error = (held(quantized(weight, 4)) - weight.double()).abs()
    assert (error <= largest(weight, STEP) / 4).all()
    assert (error.norm(dim=1) / weight.double().norm(dim=1)).mean() <= 0.11


def test_of_few_values_4_bits_hold_each() -> None:
    weight = torch.randint(-8, 8, (40, 200), generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, ::STEP] = -8
    torch.testing.assert_close(held(quantized(weight, 4)), weight.double(), rtol=1e-5, atol=0)


def test_gives_a_row_the_same_in_any_company(bits: Bits) -> None:
    x, weight = bf16(600, 1056), quantized(bf16(96, 1056, seed=1), bits)
    together = ops.linear(x, weight, dtype=torch.float32)
    for size in (*range(1, 18), 31, 33, 65, 100):
        found = torch.cat([ops.linear(part, weight, dtype=torch.float32) for part in x.split(size)])
        assert torch.equal(found, together), size


def test_reads_rows_of_any_stride(bits: Bits) -> None:
    wide, weight = bf16(9, 200), quantized(bf16(40, 96, seed=1), bits)
    part = wide[:, 64:160]
    assert torch.equal(ops.linear(part, weight), ops.linear(part.contiguous(), weight))


def test_a_weight_may_be_packed_in_pieces(bits: Bits) -> None:
    weight = bf16(150, 70)
    made = QuantizedWeight(150, 70, bits)
    for first, past in itertools.pairwise((0, 7, 64, 65, 150)):
        made.put(first, weight[first:past])
    assert torch.equal(made.memory.view(torch.int16), quantized(weight, bits).memory.view(torch.int16))
    assert made.memory.nbytes == quantized_bytes(150, 70, bits)


def test_a_weight_gives_its_rows_back(bits: Bits) -> None:
    weight = quantized(bf16(150, 171), bits)
    ids = torch.tensor([0, 149, 31, 32, 15, 16, 77])
    # Rounded to float32, and then to bfloat16.
    torch.testing.assert_close(ops.embed(ids, weight).double(), held(weight)[ids], rtol=2**-8 + 2**-23, atol=1e-9)


def test_what_is_not_finite_stays_in_its_row_and_its_output(bits: Bits) -> None:
    x, weight = bf16(20, 300), bf16(40, 300, seed=1)
    good = ops.linear(x, quantized(weight, bits))
    x[3, 200], x[7, 0], weight[5, 299] = torch.inf, torch.nan, -torch.inf
    found = ops.linear(x, quantized(weight, bits))
    assert found[[3, 7]].isnan().all()
    assert found[:, 5].isnan().all()
    rows, outputs = [row for row in range(20) if row not in (3, 7)], [output for output in range(40) if output != 5]
    assert torch.equal(found[rows][:, outputs], good[rows][:, outputs])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [5, 16])  # AVX2 expands 4 bits for many rows.
def test_sums_of_the_largest_values_do_not_overflow(rows: int, sign: int, bits: Bits) -> None:
    """At 4 bits AVX2 adds 32 products in 16 bits, of codes up to 15: the sums wrap around until all are added."""
    x, largest = torch.full((rows, 256), 1.0).bfloat16(), torch.full((32, 256), float(sign)).bfloat16()
    x[1::2] = -1
    for near in (1.0, 0.875):
        largest[:, 1::2] = -near * sign
        for each in (largest, largest.abs()):
            weight = quantized(each, bits)
            expected = rounded_rows(x) @ held(weight).T
            found = ops.linear(x, weight, dtype=torch.float32).double()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tiny", [0.0, 1e-38])
def test_zeros_give_the_bias(bits: Bits, tiny: float) -> None:
    x, weight, bias = bf16(5, 200), bf16(40, 200, seed=1), bf16(40, seed=2)
    nothing = torch.full_like(x, tiny), torch.full_like(weight, tiny)
    for rows, of in ((x, quantized(nothing[1], bits)), (nothing[0], quantized(weight, bits))):
        assert torch.equal(ops.linear(rows, of, bias), bias.expand(5, 40))


@pytest.mark.parametrize("counts", [[0, 3, 0, 1, 40, 600], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize(("has_bias", "outputs"), [(True, 96), (False, 96), (True, 75)])
def test_grouped_rows_each_meet_their_own_weight(counts: list[int], has_bias: bool, outputs: int, bits: Bits) -> None:
    x, weights, apart = bf16(sum(counts) + 2, 100), bf16(6, outputs, 100, seed=1), padded(outputs)
    bias = bf16(6, outputs, seed=2) if has_bias else None
    stack = QuantizedWeight(6 * apart, 100, bits)
    for place, weight in enumerate(weights):
        stack.put(place * apart, weight)
    found = ops.grouped_linear(x, stack, bias, torch.tensor(counts), out_features=outputs)
    for place, rows in enumerate(x[:-2].split(counts)):
        own = ops.linear(rows, quantized(weights[place], bits), None if bias is None else bias[place])
        assert torch.equal(found[sum(counts[:place]) : sum(counts[: place + 1])], own)
    assert not found[-2:].any()


@pytest.mark.parametrize("rows", [1, 5, 33, 70, 530])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_gated_product_equals_the_gate_of_the_product(rows: int, has_bias: bool, bits: Bits) -> None:
    x, weight = bf16(rows, 171), quantized(bf16(2 * 608, 171, seed=1), bits)
    bias = bf16(2 * 608, seed=2) if has_bias else None
    expected = ops.gated(ops.linear(x, weight, bias), SILU)
    assert torch.equal(ops.gated_linear(x, weight, bias, SILU), expected)


@sweep(2, rows=[1, 4, 33, 600], shape=[(64, 64), (71, 100), (1000, 1056), (1, 16)], has_bias=[True, False])
def test_a_head_chooses_what_its_logits_would(rows: int, shape: tuple[int, int], has_bias: bool, bits: Bits) -> None:
    x, weight = bf16(rows, shape[1]), quantized(bf16(*shape, seed=1), bits)
    bias = bf16(shape[0], seed=2) if has_bias else None
    logits = ops.linear(x, weight, bias, dtype=torch.float32)
    tokens, peaks = greedy_head(weight, bias, rows).choose(x)
    assert tokens.tolist() == logits.numpy().argmax(-1).tolist()
    assert peaks.tolist() == logits.amax(-1).tolist()


def test_a_product_refuses_what_it_would_misread(bits: Bits) -> None:
    with pytest.raises(ValueError, match="rows of 64 bfloat16"):
        ops.linear(torch.ones(3, 64), quantized(bf16(32, 64), bits))


def test_the_longest_rows_fit_a_threads_scratch(bits: Bits) -> None:
    inputs = structures.MAX_IN_FEATURES
    x, weight = bf16(40, inputs), bf16(32, inputs, seed=1)
    found, expected = ops.linear(x, quantized(weight, bits), dtype=torch.float32), x.double() @ weight.double().T
    assert (found - expected).norm() <= (0.02 if bits == 8 else 0.15) * expected.norm()
