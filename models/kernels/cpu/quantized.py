"""`QuantizedWeight`: a packed weight of 8 or 4 bits, which the products of `ops` take like any other."""

from typing import ClassVar, Literal

from models.kernels.cpu import structures
from models.kernels.cpu.ops import PANEL, PackedWeight, WeightOperators

BLOCK, STEP = 128, 64
"""Inputs that share a scale, at 8 bits and at 4; a weight has a multiple of the first."""


class QuantizedWeight(PackedWeight):
    """Rows are rounded as they are put in: see quantized.h. The rows that it meets are rounded to 8 bits too."""

    operators: ClassVar = WeightOperators(
        structures.QuantizedLinear,
        structures.QuantizedPack,
        structures.QuantizedEmbed,
        structures.QuantizedGroupedLinear,
    )

    def __init__(self, out_features: int, in_features: int, bits: Literal[4, 8]) -> None:
        super().__init__(out_features, in_features, quantized_bytes(out_features, in_features, bits))
        self.options = (bits,)


def quantized_bytes(out_features: int, in_features: int, bits: Literal[4, 8]) -> int:
    """Of a weight's values and, in bfloat16, scales."""
    outputs, inputs = -(-out_features // PANEL) * PANEL, -(-in_features // BLOCK) * BLOCK
    return outputs * inputs * bits // 8 + outputs * inputs // (BLOCK if bits == 8 else STEP) * 2
