"""What products of quantised weights compute, in torch: dense weights, in float32."""

import torch
import torch.nn.functional as F

from models.kernels.triton.four_bit import FourBitWeight, unpack_nibbles
from models.kernels.triton.fp8 import FP8Weight
from models.kernels.types import FP8_GROUP

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_groups(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel's launcher, for an FP8 of any device."""
    largest = 240.0 if dtype is torch.float8_e4m3fnuz else 448.0
    padded = F.pad(x.float(), (0, -x.shape[1] % FP8_GROUP)).view(len(x), -1, FP8_GROUP)
    reach = padded.abs().amax(-1)
    scales = torch.where(reach > 0, reach / largest, 1.0)
    codes = (padded / scales[..., None]).clamp(-largest, largest).to(dtype)
    return codes.flatten(1)[:, : x.shape[1]], scales


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Activations as products of FP8 see them. # [M, K] -> [M, K] float32"""
    codes, scales = quantize_groups(x, dtype)
    return codes.float() * scales.repeat_interleave(FP8_GROUP, 1)[:, : x.shape[1]]


def fp8_weight(weight: FP8Weight) -> torch.Tensor:
    """Dense. # [.., N, K] float32"""
    scales, (outputs, inputs) = weight.scales, weight.codes.shape[-2:]
    if not weight.is_blocked:
        return weight.codes.float() * scales[..., None]
    rows = 1 if scales.shape[-2] == outputs else FP8_GROUP
    scales = scales.repeat_interleave(rows, -2).repeat_interleave(FP8_GROUP, -1)
    return weight.codes.float() * scales[..., :outputs, :inputs]


def fp8_linear(
    x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None, *, is_rounded: bool = True
) -> torch.Tensor:
    """As the kernel's launcher; `is_rounded`: as where the hardware has FP8."""
    by = rounded(x, weight.codes.dtype) if is_rounded else x.float()
    return F.linear(by, fp8_weight(weight), None if bias is None else bias.float()).to(x.dtype)


def four_bit_weight(weight: FourBitWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dense. # [.., out, in]"""
    codes = unpack_nibbles(weight.packed).long()
    size = codes.shape[-1] // weight.scales.shape[-1]
    if weight.zeros is None:
        values = torch.tensor(_E2M1, device=codes.device)[codes & 7] * (1 - (codes >> 3) * 2)
        scales = torch.exp2(weight.scales.float() - 127)
    else:
        values = (codes - weight.zeros.long().repeat_interleave(size, -1)).float()
        scales = weight.scales.float()
    return (values * scales.repeat_interleave(size, -1)).to(dtype)


def four_bit_linear(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the kernel's launcher."""
    dense = four_bit_weight(weight, x.dtype).float()
    return F.linear(x.float(), dense, None if bias is None else bias.float()).to(x.dtype)
