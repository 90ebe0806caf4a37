"""The kernels of products with quantised weights against their torch references."""

import dataclasses

import pytest
import torch

from models.ops import triton as kernels
from models.ops.triton import expert_products, expert_routing, quantized_products
from models.ops.triton.cases import experts as moe_reference
from models.ops.triton.cases import quantized_products as reference
from models.ops.triton.configs import target_of
from models.ops.types import CLAMPED_SILU, SILU, Gating
from models.ops.weight_formats import (
    FourBitWeight,
    FP8Weight,
    Int8Weight,
    MixedStack,
    expert_of,
    mxfp4_of,
    pack_nibbles,
    to_flavour,
    unpack_nibbles,
)
from tests.parity.triton_interpreter import DEVICE
from tests.sweeps import sweep

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
requires_fp8 = pytest.mark.skipif(target_of(DEVICE).fp8 is None, reason="the GPU has no FP8")


@sweep(inputs=[1152, 2112], kind=["fp8", "no fp8", "four bits"])
def test_products_are_split_by_the_weight_alone(kind: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's sums are the same alone and in a batch, and those of all inputs."""
    if kind == "no fp8":
        without_fp8(monkeypatch)
    rows, outputs = 16, 40
    x, bias = random(rows, inputs), random(outputs)
    weight: FP8Weight | FourBitWeight = fp8_weight("row", outputs, inputs)
    if kind == "four bits":
        codes = torch.randint(
            256, (outputs, inputs // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        weight = FourBitWeight(codes.to(DEVICE), random(outputs, inputs // 64), torch.full((outputs, inputs // 64), 8))
    splits: list[int] = []
    merged = quantized_products.merged

    def noted(partial: torch.Tensor, *others: object) -> torch.Tensor:
        splits.append(len(partial))
        return merged(partial, *others)

    monkeypatch.setattr(quantized_products, "merged", noted)
    found = quantized_products.quantized_linear(x, weight, bias)
    for row in (0, 7):
        assert torch.equal(quantized_products.quantized_linear(x[row : row + 1], weight, bias)[0], found[row])
    assert splits == [2 if inputs < 2048 else 4] * 3
    more = quantized_products.quantized_linear(torch.cat((x, x, x)), weight, bias)
    assert len(splits) == 4
    assert torch.equal(more.view(3, rows, outputs), found.expand(3, -1, -1))
    many = quantized_products.quantized_linear(torch.cat((x,) * 5), weight, bias)
    torch.testing.assert_close(found, many[:rows], rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(kernels, "_is_invariant", True)
    many = quantized_products.quantized_linear(torch.cat((x,) * 5), weight, bias)
    assert len(splits) == 4, "one program adds the splits' sums of many rows, or there are none"
    assert torch.equal(many[:rows], found)


@pytest.mark.parametrize(
    ("rows", "outputs", "steps", "splits"),
    [(1, 4096, 32, 4), (64, 4096, 32, 4), (65, 4096, 32, 1), (1, 1024, 128, 8), (1, 28672, 32, 1), (1, 64, 4, 1)],
)
def test_as_many_splits_as_make_enough_programs(
    rows: int, outputs: int, steps: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = outputs, steps, 32, 64
    assert quantized_products.splits_of(rows, *shape) == (splits, splits == 1)
    monkeypatch.setattr(kernels, "_is_invariant", True)
    few, is_whole = quantized_products.splits_of(rows, *shape)
    assert (few, is_whole) == (quantized_products.splits_of(1, *shape)[0], rows > 64 or few == 1)


EXPERTS = 3
"""Experts that a rank holds; one more is held elsewhere."""


def expert_ids(tokens: int) -> torch.Tensor:
    """Two experts of each token; `none` of them is never the second. # [tokens, 2]"""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(EXPERTS, (tokens, 2), generator=generator)
    return torch.where(ids >= 1, ids + 1, ids).to(DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def fp8_dtype() -> torch.dtype:
    found: torch.dtype = getattr(torch, f"float8_{target_of(DEVICE).fp8 or 'e4m3fn'}")
    return found


@requires_fp8
@DTYPES
@pytest.mark.parametrize("shape", [(1, 128), (3, 512), (5, 200)])
def test_groups_are_rounded_by_their_largest_value(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    x[0, :128] = 0
    codes, scales = quantized_products.quantize_groups(x)
    expected = reference.reference_quantize_groups(x, fp8_dtype())
    torch.testing.assert_close(scales, expected[1])
    # Division by a scale may round a value between two codes either way.
    apart = (codes.float() - expected[0].float()).abs() / expected[0].float().abs().clamp(min=2**-6)
    assert apart.max() <= 0.125


def without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hardware without FP8 products: weights are converted in registers, and activations stay unchanged."""
    if fp8_dtype() is not torch.float8_e4m3fn:
        pytest.skip("weights are of another FP8 on this GPU")
    target = dataclasses.replace(target_of(DEVICE), fp8=None)
    monkeypatch.setattr(quantized_products, "target_of", lambda device: target)


def fp8_weight(scales: str, *shape: int) -> FP8Weight:
    """Random codes that include all values, and scales of one `tensor`, `channel`, `row` or `block`."""
    *experts, outputs, inputs = shape
    groups = -(-inputs // 128)
    sizes = {"tensor": (1,), "channel": (outputs,), "row": (outputs, groups), "block": (-(-outputs // 128), groups)}
    size = (*experts, *sizes[scales])
    return FP8Weight(
        random(*shape).clamp(-3, 3).to(fp8_dtype()),
        torch.rand(size, generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )


FP8_HARDWARE = pytest.mark.parametrize("hardware", [pytest.param("fp8", marks=requires_fp8), "no fp8"])


@sweep(
    2,
    computes=[("fp8", torch.float32), ("fp8", torch.bfloat16), ("no fp8", torch.bfloat16)],
    scales=["tensor", "channel", "row", "block"],
    sizes=[(1, 24, 256), (19, 150, 200)],
)
def test_fp8_linear(
    computes: tuple[str, torch.dtype], scales: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (hardware, dtype), (rows, outputs, inputs) = computes, sizes
    if hardware == "no fp8":
        without_fp8(monkeypatch)
    elif target_of(DEVICE).fp8 is None:
        pytest.skip("the GPU has no FP8")
    weight = fp8_weight(scales, outputs, inputs)
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    for each in (None, bias):
        found = quantized_products.fp8_linear(x, weight, each)
        expected = reference.reference_fp8_linear(x, weight, each, is_rounded=hardware == "fp8")
        # A code that is rounded the other way changes a sum by an eighth of one product.
        torch.testing.assert_close(found, expected, atol=0.2 if hardware == "fp8" else 1e-3, rtol=CLOSE[dtype])


def test_every_fp8_byte_becomes_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fp8(monkeypatch)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    weight = FP8Weight(codes[:, None].expand(-1, 128).contiguous().to(DEVICE), torch.ones(1, device=DEVICE))
    x = torch.eye(128, device=DEVICE)[:1]
    assert torch.equal(quantized_products.fp8_linear(x, weight)[0], codes.float().to(DEVICE))


@FP8_HARDWARE
@pytest.mark.parametrize(
    ("tokens", "block", "inner", "scales", "gating", "dtype"),
    [
        (1, 16, 128, "row", Gating(SILU), torch.bfloat16),
        (13, 16, 200, "row", None, torch.float32),
        (13, 16, 200, "channel", Gating(CLAMPED_SILU, 1.702, 7.0), torch.float32),
        (40, 64, 72, "channel", None, torch.bfloat16),
        (40, 64, 200, "row", Gating(SILU), torch.float32),
    ],
)
def test_experts_of_fp8(
    tokens: int,
    block: int,
    inner: int,
    scales: str,
    gating: Gating | None,
    dtype: torch.dtype,
    hardware: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hardware == "no fp8":
        without_fp8(monkeypatch)
    columns = 19
    weight = fp8_weight(scales, EXPERTS, columns * (1 if gating is None else 2), inner)
    ids = expert_ids(tokens)
    rows = random(tokens if gating is not None else ids.numel(), inner, dtype=dtype) / inner**0.5
    bias = None if gating is None else random(EXPERTS, weight.codes.shape[1], dtype=dtype)
    pairs = expert_routing.moe_sort(ids, EXPERTS, block)
    found = expert_products.moe_fp8_gemm(rows, weight, bias, pairs, ids.numel(), gating=gating)
    by = reference.rounded(rows, fp8_dtype()) if hardware == "fp8" else rows.float()
    expected = moe_reference.reference_moe_gemm(by, weight.dense(), bias, ids, gating=gating)
    held = (ids.flatten() < EXPERTS).nonzero()[:, 0]
    # Rounding to FP8 may go either way for a value between two codes.
    close = max(CLOSE[dtype], 1e-2 if hardware == "fp8" else 0.0)
    assert (found[held].float() - expected[held]).norm() <= close * expected[held].norm()


@pytest.mark.parametrize(
    ("tokens", "block", "inner", "gating", "dtype"),
    [
        (1, 16, 128, Gating(SILU), torch.bfloat16),
        (13, 16, 200, None, torch.float32),
        (40, 64, 200, Gating(CLAMPED_SILU, 1.702, 7.0), torch.float32),
    ],
)
def test_experts_of_8_bit_integers(
    tokens: int, block: int, inner: int, gating: Gating | None, dtype: torch.dtype
) -> None:
    weight = integer_experts(19 * (1 if gating is None else 2), inner)
    ids = expert_ids(tokens)
    rows = random(tokens if gating is not None else ids.numel(), inner, dtype=dtype)
    bias = None if gating is None else random(EXPERTS, weight.codes.shape[1], dtype=dtype)
    pairs = expert_routing.moe_sort(ids, EXPERTS, block)
    found = expert_products.moe_int8_gemm(rows, weight, bias, pairs, ids.numel(), gating=gating)
    by = reference.as_multiplied(rows, weight)
    expected = moe_reference.reference_moe_gemm(by, weight.dense(), bias, ids, gating=gating)
    held = (ids.flatten() < EXPERTS).nonzero()[:, 0]
    assert (found[held].float() - expected[held]).norm() <= CLOSE[dtype] * expected[held].norm()


def integer_experts(outputs: int, inner: int) -> Int8Weight:
    codes = (random(EXPERTS, outputs, inner) * 40).clamp(-127, 127).to(torch.int8)
    return Int8Weight(codes, random(EXPERTS, outputs).abs() * 1e-2)


def test_experts_of_several_forms_are_multiplied_each_by_its_own_kernel() -> None:
    """As by one dense stack, except for rounded rows; pairs of experts held elsewhere stay unchanged."""
    tokens, inner, outputs = 13, 200, 24
    integers = integer_experts(outputs, inner)
    dense = random(2, outputs, inner)
    stack = MixedStack.of((dense, integers), ((0, 0), (1, 0), (1, 1), (0, 1), (1, 2)), DEVICE)
    ids = torch.randint(6, (tokens, 2), generator=torch.Generator().manual_seed(2)).clamp(max=5).to(DEVICE)
    rows = random(ids.numel(), inner)
    bias = random(5, outputs)
    pairs = expert_routing.moe_sort(ids, 5, 16)
    found = expert_products.grouped_products(rows, stack, bias, pairs, ids.numel())
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 5:
            of_form, at = expert_of(stack, expert)
            x = reference.as_multiplied(rows[pair : pair + 1], of_form)[0]
            expected = reference.part_of(of_form, at, torch.float32) @ x + bias[expert]
            torch.testing.assert_close(found[pair], expected, rtol=1e-4, atol=1e-3)


def test_ocp_codes_mean_the_same_as_fnuz() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[None]
    found, scales = to_flavour(codes, torch.ones(1), torch.float8_e4m3fnuz)
    assert torch.equal(found.float() * scales, codes.float().where(codes.float() != 0, 0.0))


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 192)])
def test_nibbles_are_unpacked_as_they_were_packed(shape: tuple[int, ...]) -> None:
    codes = torch.randint(16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_nibbles(codes)
    assert packed.shape[-1] * 2 == shape[-1]
    assert torch.equal(unpack_nibbles(packed), codes)
    assert torch.equal(packed[..., :32] & 15, codes[..., :32])
    assert torch.equal(packed[..., :32] >> 4, codes[..., 32:64])


@DTYPES
@pytest.mark.parametrize("group", [None, 32, 64, 192])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 24, 192), (19, 37, 192)])
def test_four_bit_linear(rows: int, outputs: int, inputs: int, group: int | None, dtype: torch.dtype) -> None:
    """MXFP4 if there is no group."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator).to(DEVICE)
    if group is None:
        exponents = torch.randint(120, 130, (outputs, inputs // 32), dtype=torch.uint8, generator=generator).to(DEVICE)
        weight = FourBitWeight(packed, exponents)
    else:
        zeros = torch.randint(16, (outputs, inputs // group), dtype=torch.uint8, generator=generator).to(DEVICE)
        weight = FourBitWeight(packed, random(outputs, inputs // group, dtype=dtype) * 0.1, zeros)
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    for each in (None, bias):
        found = quantized_products.four_bit_linear(x, weight, each)
        expected = reference.reference_four_bit_linear(x, weight, each)
        # The interpreter truncates values that are rounded to bfloat16.
        assert (found - expected).float().norm() <= CLOSE[dtype] * expected.float().norm()


def test_what_was_mxfp4_is_rounded_to_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (40, 96), dtype=torch.uint8, generator=generator)
    packed[0] = 0
    packed[1] &= 0x99  # At most half of a scale.
    weight = FourBitWeight(packed, torch.randint(20, 200, (40, 6), dtype=torch.uint8, generator=generator))
    dense = weight.dense(torch.bfloat16)
    codes, exponents = mxfp4_of(dense)
    again = FourBitWeight(pack_nibbles(codes), exponents)
    assert torch.equal(again.dense(torch.bfloat16), dense)


@pytest.mark.parametrize("gating", [None, Gating(CLAMPED_SILU, 1.702, 7.0)], ids=["down", "gate-up"])
@pytest.mark.parametrize(
    ("tokens", "block", "group", "dtype"),
    [
        (1, 16, None, torch.bfloat16),
        (13, 16, None, torch.float32),
        (40, 64, None, torch.float32),
        (1, 16, 32, torch.float32),
        (13, 16, 64, torch.bfloat16),
        (40, 64, 192, torch.float32),
    ],
)
def test_experts_of_four_bits(
    tokens: int, block: int, group: int | None, gating: Gating | None, dtype: torch.dtype
) -> None:
    """MXFP4 if there is no group."""
    columns, inner = 19, 192
    outputs = columns * (1 if gating is None else 2)
    generator = torch.Generator().manual_seed(tokens)

    def codes(least: int, most: int, size: int) -> torch.Tensor:
        return torch.randint(least, most, (EXPERTS, outputs, size), dtype=torch.uint8, generator=generator).to(DEVICE)

    packed = codes(0, 256, inner // 2)
    if group is None:
        weight = FourBitWeight(packed, codes(122, 127, inner // 32))
    else:
        scales = random(EXPERTS, outputs, inner // group, dtype=dtype) * 0.1
        weight = FourBitWeight(packed, scales, codes(0, 16, inner // group))
    ids = expert_ids(tokens)
    rows = random(tokens if gating is not None else ids.numel(), inner, dtype=dtype)
    bias = random(EXPERTS, outputs, dtype=dtype)
    pairs = expert_routing.moe_sort(ids, EXPERTS, block)
    found = expert_products.moe_four_bit_gemm(rows, weight, bias, pairs, ids.numel(), gating=gating)
    expected = moe_reference.reference_moe_gemm(rows, weight.dense(dtype), bias, ids, gating=gating)
    held = (ids.flatten() < EXPERTS).nonzero()[:, 0]
    assert (found[held] - expected[held]).float().norm() <= CLOSE[dtype] * expected[held].float().norm()


def test_no_token_has_no_products() -> None:
    pairs = expert_routing.moe_sort(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), EXPERTS, 16)
    weight = fp8_weight("row", EXPERTS, 24, 128)
    packed = torch.zeros(EXPERTS, 24, 64, dtype=torch.uint8, device=DEVICE)
    four_bits = FourBitWeight(packed, torch.zeros(EXPERTS, 24, 4, dtype=torch.uint8, device=DEVICE))
    rows = random(0, 128)
    assert expert_products.moe_fp8_gemm(rows, weight, None, pairs, 0).shape == (0, 24)
    assert expert_products.moe_four_bit_gemm(rows, four_bits, None, pairs, 0).shape == (0, 24)


@requires_fp8
def test_a_row_with_nan_is_not_finite_in_fp8() -> None:
    """Rounding to FP8 clamps, and NaN would become the smallest number."""
    x = random(3, 256, dtype=torch.bfloat16)
    x[1, 200] = float("nan")
    found = quantized_products.fp8_linear(x, fp8_weight("row", 24, 256))
    assert found[[0, 2]].isfinite().all()
    assert not found[1].isfinite().any()


def four_bit_weight(group: int | None, outputs: int, inputs: int, dtype: torch.dtype) -> FourBitWeight:
    """All codes and zero points among its random ones, with a scale for `group` inputs; None: MXFP4."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    packed = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    if group is None:
        exponents = torch.randint(110, 130, (outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        return FourBitWeight(packed.to(DEVICE), exponents.to(DEVICE))
    shape = outputs, inputs // group
    zeros = torch.randint(16, shape, dtype=torch.uint8, generator=generator)
    return FourBitWeight(packed.to(DEVICE), (0.05 * random(*shape)).to(dtype), zeros.to(DEVICE))


@pytest.mark.parametrize(
    ("group", "outputs", "inputs", "dtype", "has_bias"),
    [
        (None, 8, 64, torch.bfloat16, False),  # less than a tile of inputs
        (None, 41, 1088, torch.bfloat16, True),  # columns past the end, splits, and an uneven tail
        (None, 72, 256, torch.float16, True),
        (32, 24, 192, torch.bfloat16, True),  # low and high nibbles of a run have scales of their own
        (32, 41, 1024, torch.float16, False),
        (64, 9, 320, torch.bfloat16, False),
        (96, 16, 192, torch.bfloat16, True),  # groups that begin within a run
        (128, 40, 1152, torch.bfloat16, True),
    ],
)
def test_one_row_by_four_bits(
    group: int | None, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    """In float32, of codes that are not rounded; and as close to it as the kernel of several rows."""
    weight = four_bit_weight(group, outputs, inputs, dtype)
    x = random(1, inputs, dtype=dtype)
    bias = random(outputs, dtype=dtype) if has_bias else None
    found = quantized_products.four_bit_linear(x, weight, bias)
    assert torch.equal(found, quantized_products.four_bit_linear(x.clone(), weight, bias))
    dense = weight.dense(torch.float32)
    exact = torch.nn.functional.linear(x.double(), dense.double(), None if bias is None else bias.double())
    terms = x.abs().double() @ dense.abs().double().T
    # The interpreter cuts off what bfloat16 has no bits for.
    last = 2.0 ** (-7 if dtype is torch.bfloat16 else -10)
    assert ((found.double() - exact).abs() <= last * exact.abs() + 2e-6 * (terms + 1)).all()


def test_one_row_is_read_at_any_offset_and_stride() -> None:
    """Four inputs are one integer of 64 bits, whose address would not be a multiple of 8."""
    weight = four_bit_weight(64, 16, 128, torch.bfloat16)
    wide = random(1, 300, dtype=torch.bfloat16)
    expected = quantized_products.four_bit_linear(wide[:, 3:131].clone(), weight)
    assert torch.equal(quantized_products.four_bit_linear(wide[:, 3:131], weight), expected)
    strided = wide[:, 3:259:2]
    assert torch.equal(
        quantized_products.four_bit_linear(strided, weight),
        quantized_products.four_bit_linear(strided.clone(), weight),
    )


def test_one_row_of_extreme_numbers_by_mxfp4() -> None:
    """Codes are unpacked far below 1 and lifted again: neither may overflow or lose bits on the way."""
    weight = four_bit_weight(None, 16, 64, torch.bfloat16)
    for power in (-60, 0, 60):
        x = (random(1, 64) * 2.0**power).to(torch.bfloat16)
        exact = x.double() @ weight.dense(torch.float32).double().T
        found = quantized_products.four_bit_linear(x, weight).double()
        assert ((found - exact).abs() <= 2**-7 * exact.abs() + 1e-6 * exact.abs().max()).all()
    x[0, 5] = float("nan")
    assert not quantized_products.four_bit_linear(x, weight).isfinite().any()


def test_with_batch_invariance_one_row_is_computed_as_several_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_is_invariant", True)
    weight = four_bit_weight(64, 40, 1152, torch.bfloat16)
    x = random(3, 1152, dtype=torch.bfloat16)
    many = quantized_products.four_bit_linear(x, weight)
    assert torch.equal(quantized_products.four_bit_linear(x[1:2], weight)[0], many[1])
