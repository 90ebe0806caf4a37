"""The library's experts. Called by `models.layers.moe`, and by the probe."""

from typing import NamedTuple

import torch

from models.kernels.aiter.library import function, member

TILE = 16, 32
"""Rows and columns that weights are shuffled in."""
_LAYOUT = 16, 16
"""What the library calls these tiles."""


class ExpertWeights(NamedTuple):
    """Shuffled weights of a stack of experts; with scales of blocks of 128 x 128 where they are FP8."""

    w13: torch.Tensor  # [experts, 2 * inner, hidden], gate before up
    w2: torch.Tensor  # [experts, hidden, inner]
    w13_scales: torch.Tensor | None = None  # [experts, 2 * inner / 128, hidden / 128] float32
    w2_scales: torch.Tensor | None = None  # [experts, hidden / 128, inner / 128] float32


def can_shuffle(weight: torch.Tensor) -> bool:
    """Whether a stack has whole tiles. # [experts, rows, columns]"""
    _, rows, columns = weight.shape
    return rows % TILE[0] == 0 and columns % TILE[1] == 0


def shuffle(weight: torch.Tensor) -> None:
    """Put each expert's weight in the order that the library's kernels load it in, in its place.

    # [experts, rows, columns]
    """
    for one in weight:
        one.copy_(function("shuffle_weight")(one.clone(), layout=_LAYOUT))
    # The library's own mark, without which some of its releases take the order for the plain one.
    weight.is_shuffled = True  # type: ignore[attr-defined]


def experts(hidden: torch.Tensor, weights: ExpertWeights, routed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The sum of each token's experts, of gates by SiLU, by their weights. # [tokens, hidden] -> [tokens, hidden]

    `routed` [tokens, top_k] float32; `ids` [tokens, top_k] int32.
    """
    quant = "QuantType.No" if weights.w13_scales is None else "QuantType.per_128x128"
    out: torch.Tensor = function("fused_moe")(
        hidden,
        weights.w13,
        weights.w2,
        routed,
        ids,
        activation=member("ActivationType.Silu"),
        quant_type=member(quant),
        w1_scale=weights.w13_scales,
        w2_scale=weights.w2_scales,
    )
    return out
