"""Checks of kernels at sizes as many models have them, for where no model is loaded."""

import torch

from models.kernels.cpu.structures import SILU
from models.kernels.triton.checks.attention import AttentionForm
from models.kernels.triton.checks.dense import ActivationForm, NormForm
from models.kernels.triton.checks.experts import ExpertsForm, RouteForm
from models.kernels.triton.checks.findings import Check, Numbers
from models.kernels.triton.checks.products import ProductForm
from models.kernels.triton.checks.recurrent import DeltaForm
from models.kernels.triton.four_bit import RUN
from models.kernels.types import FP8_GROUP, AttentionOptions
from models.layers.activation import Gating
from models.layers.moe import FusedMoE
from models.layers.quantized_product import StoredWeight
from models.quantization.stored import Codes, QuantizedRows

VOCABULARY = 128256
_DTYPE = torch.bfloat16
_HIDDEN, _INNER, _EXPERTS, _EXPERT_INNER, _OUTPUTS, _HEAD = 4096, 14336, 8, 768, 1024, 128
_BLOCK_SIZE = 16
_MOST_TOKENS = 2048


def usual_checks(device: torch.device) -> dict[str, list[Check]]:
    """By operator but for sampling."""
    options = AttentionOptions(_HEAD**-0.5)
    attention = AttentionForm(32, 8, _HEAD, options, _DTYPE, _DTYPE, _BLOCK_SIZE, False, None, _HEAD)
    weights = [stored_weight(kind, _OUTPUTS, _HIDDEN, device, _DTYPE) for kind in ("fp8", "int4", "mxfp4")]
    return {
        "attention": [attention.check],
        "norm": [NormForm(_HIDDEN, 1e-6, 0.0, _DTYPE, _DTYPE).check],
        "activation": [ActivationForm(_INNER, Gating(SILU), _DTYPE).check],
        "moe": [
            RouteForm(_EXPERTS, 2, sigmoid=False, renormalize=True).check,
            ExpertsForm(_experts(device), 2, _DTYPE, _MOST_TOKENS).check,
        ],
        "linear": [ProductForm(weight, _OUTPUTS, _HIDDEN, None, _DTYPE).check for weight in weights],
        "recurrent": [DeltaForm(16, 2, _HEAD, _HEAD, 4, 1e-6, _DTYPE, _DTYPE).check],
    }


def _experts(device: torch.device) -> FusedMoE:
    layer, numbers = FusedMoE(_HIDDEN, _EXPERT_INNER, _EXPERTS), Numbers(device)
    for weight in (layer.w13, layer.w2):
        weight.data = numbers.normal(*weight.shape, dtype=_DTYPE, scale=weight.shape[-1] ** -0.5)
    return layer


def stored_weight(kind: str, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> StoredWeight:
    """A weight of any numbers that stays quantised. # [outputs, inputs]"""
    weight = StoredWeight(torch.Size((outputs, inputs)), dtype, device)
    is_put = weight.put(0, quantized_rows(kind, outputs, inputs, dtype))
    assert is_put
    return weight


def quantized_rows(kind: str, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> QuantizedRows:
    """Rows of any numbers in FP8, `int4` or `mxfp4`, on the host. # [outputs, inputs]"""
    numbers = Numbers(torch.device("cpu"), seed)
    width = RUN if kind == "mxfp4" else min(FP8_GROUP, inputs)
    scales, zeros = 0.02 * numbers.near_one(outputs, -(-inputs // width)), None
    if kind == "fp8":
        codes = numbers.normal(outputs, inputs).to(torch.float8_e4m3fn)
    else:
        codes = (numbers.normal(outputs, inputs, scale=3.0) + 8).clamp(0, 15).to(torch.uint8)
        if kind == "int4":
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        else:
            scales = torch.full(scales.shape, 121, dtype=torch.uint8)
    return QuantizedRows.of(Codes(kind, codes, scales, zeros, width, codes.float), dtype)
