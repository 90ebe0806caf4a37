"""The kernels of products with quantised weights against their torch references."""

import pytest
import torch

from models.kernels.triton import four_bit, four_bit_gemm, fp8_gemm, moe_mxfp4_gemm, moe_sort
from models.kernels.triton.configs import target_of
from models.kernels.triton.gated import CLAMPED_SILU
from models.kernels.triton.moe_gemm import Gating
from models.kernels.triton.reference import moe_gemm as moe_reference
from models.kernels.triton.reference import quantized
from tests.parity.triton_interpreter import DEVICE

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
requires_fp8 = pytest.mark.skipif(target_of(DEVICE).fp8 is None, reason="the GPU has no FP8")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def fp8() -> torch.dtype:
    found: torch.dtype = getattr(torch, f"float8_{target_of(DEVICE).fp8}")
    return found


@requires_fp8
@DTYPES
@pytest.mark.parametrize("shape", [(1, 128), (3, 512), (5, 200)])
def test_groups_are_rounded_by_their_largest_value(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    x[0, :128] = 0
    codes, scales = fp8_gemm.quantize_groups(x)
    expected = quantized.quantize_groups(x, fp8())
    torch.testing.assert_close(scales, expected[1])
    # Dividing by a scale may be rounded to either side of what lies between two codes.
    apart = (codes.float() - expected[0].float()).abs() / expected[0].float().abs().clamp(min=2**-6)
    assert apart.max() <= 0.125


@requires_fp8
@DTYPES
@pytest.mark.parametrize("scales", ["tensor", "channel", "row", "block"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 24, 256), (19, 150, 200)])
def test_fp8_linear(rows: int, outputs: int, inputs: int, scales: str, dtype: torch.dtype) -> None:
    groups = -(-inputs // 128)
    shapes = {"tensor": (1,), "channel": (outputs,), "row": (outputs, groups), "block": (-(-outputs // 128), groups)}
    shape = shapes[scales]
    weight = fp8_gemm.FP8Weight(
        random(outputs, inputs).clamp(-3, 3).to(fp8()),
        torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    for beside in (None, bias):
        found, expected = fp8_gemm.fp8_linear(x, weight, beside), quantized.fp8_linear(x, weight, beside)
        # A code that falls to the other side moves a sum by an eighth of one product.
        torch.testing.assert_close(found, expected, atol=0.2, rtol=CLOSE[dtype])


def test_ocp_codes_mean_the_same_as_fnuz() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[None]
    found, scales = fp8_gemm.to_flavour(codes, torch.ones(1), torch.float8_e4m3fnuz)
    assert torch.equal(found.float() * scales, codes.float().where(codes.float() != 0, 0.0))


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 192)])
def test_nibbles_are_unpacked_as_they_were_packed(shape: tuple[int, ...]) -> None:
    codes = torch.randint(16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = four_bit.pack_nibbles(codes)
    assert packed.shape[-1] * 2 == shape[-1]
    assert torch.equal(four_bit.unpack_nibbles(packed), codes)
    assert torch.equal(packed[..., :32] & 15, codes[..., :32])
    assert torch.equal(packed[..., :32] >> 4, codes[..., 32:64])


@DTYPES
@pytest.mark.parametrize("group", [None, 32, 64, 192])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 24, 192), (19, 37, 192)])
def test_four_bit_linear(rows: int, outputs: int, inputs: int, group: int | None, dtype: torch.dtype) -> None:
    """MXFP4 where there is no group."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator).to(DEVICE)
    if group is None:
        exponents = torch.randint(120, 130, (outputs, inputs // 32), dtype=torch.uint8, generator=generator).to(DEVICE)
        weight = four_bit.FourBitWeight(packed, exponents)
    else:
        zeros = torch.randint(16, (outputs, inputs // group), dtype=torch.uint8, generator=generator).to(DEVICE)
        weight = four_bit.FourBitWeight(packed, random(outputs, inputs // group, dtype=dtype) * 0.1, zeros)
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    for beside in (None, bias):
        found = four_bit_gemm.four_bit_linear(x, weight, beside)
        expected = quantized.four_bit_linear(x, weight, beside)
        # The interpreter cuts what is rounded to bfloat16.
        assert (found - expected).float().norm() <= CLOSE[dtype] * expected.float().norm()


def test_what_was_mxfp4_is_rounded_to_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (40, 96), dtype=torch.uint8, generator=generator)
    packed[0] = 0
    packed[1] &= 0x99  # At most half of a scale.
    weight = four_bit.FourBitWeight(packed, torch.randint(20, 200, (40, 6), dtype=torch.uint8, generator=generator))
    dense = quantized.four_bit_weight(weight, torch.bfloat16)
    codes, exponents = four_bit.mxfp4_of(dense)
    again = four_bit.FourBitWeight(four_bit.pack_nibbles(codes), exponents)
    assert torch.equal(quantized.four_bit_weight(again, torch.bfloat16), dense)


@DTYPES
@pytest.mark.parametrize("gating", [None, Gating(CLAMPED_SILU, 1.702, 7.0)], ids=["down", "gate-up"])
@pytest.mark.parametrize(("tokens", "block"), [(1, 16), (13, 16), (40, 64)])
def test_experts_of_mxfp4(tokens: int, block: int, gating: Gating | None, dtype: torch.dtype) -> None:
    experts, top_k, columns, inner = 3, 2, 24, 192
    generator = torch.Generator().manual_seed(tokens)
    outputs = columns * (1 if gating is None else 2)
    packed = torch.randint(256, (experts, outputs, inner // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(122, 127, (experts, outputs, inner // 32), dtype=torch.uint8, generator=generator)
    weight = four_bit.FourBitWeight(packed.to(DEVICE), exponents.to(DEVICE))
    # The last of four is held elsewhere.
    ids = torch.randint(experts + 1, (tokens, top_k), generator=generator).to(DEVICE)
    rows = random(tokens if gating is not None else tokens * top_k, inner, dtype=dtype)
    bias = random(experts, outputs, dtype=dtype)
    pairs = moe_sort.moe_sort(ids, experts, block)
    found = moe_mxfp4_gemm.moe_mxfp4_gemm(rows, weight, bias, pairs, ids.numel(), gating=gating)
    expected = moe_reference.moe_gemm(rows, quantized.four_bit_weight(weight, dtype), bias, ids, gating=gating)
    held = (ids.flatten() < experts).nonzero()[:, 0]
    assert (found[held] - expected[held]).float().norm() <= CLOSE[dtype] * expected[held].float().norm()
