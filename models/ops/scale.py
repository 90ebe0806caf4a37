"""`scale`: multiplication by factors that some models have between their layers."""

import torch

from models.ops.cpu import recurrent as ops
from models.ops.cpu import runtime


def scale(x: torch.Tensor, by: float | torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x` by a number, or each column by its own factor, and add `plus`, if given.

    # [tokens, features], [features] float32, [tokens, features] -> [tokens, features]
    """
    if plus is None and isinstance(by, float) and by == 1.0:
        return x
    if runtime.runs(x):
        return ops.scale(x, by, plus)
    scaled = x if isinstance(by, float) and by == 1.0 else (x * by).to(x.dtype)
    return scaled if plus is None else scaled + plus
