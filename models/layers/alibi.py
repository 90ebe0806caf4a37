"""ALiBi (Press et al., 2022), attention with biases that are linear in the distance, as a rotary embedding.

A head adds `slope * (key position - query position)` to its scores. Here these biases are products of further
dimensions of queries and keys, so that every attention operator, kernel and cache computes them unchanged. A
position is split into four digits of base 16, which every dtype of the cache holds exactly, and the slope of a digit
into up to three numbers of the model's dtype, whose sum is exact to float32. For each of these twelve pairs of a digit
and a number, a head has one pair of dimensions `(low, high)`, and the rotation

    low' = low - high * digit,    high' = high + low * digit

with keys `(16, 0)` and queries `(0, number / 16)`, which become `(16, 16 * digit)` and `(-number * digit / 16,
number / 16)`. The product of a query and a key is then `number * (key's digit - query's digit)`. Only the query's
digit is multiplied inexactly, which adds the same to all scores of the query, so that the softmax does not change.
"""

import torch
from torch import nn

from models.config.rope import without_lengths
from models.errors import CheckpointError
from models.ops.columns import precede_heads
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import runtime

_BASE, _DIGITS, _NUMBERS = 16, 4, 3
_KEY = 16.0
"""The constant dimension of keys. With it, numbers and products stay within float16 and E4M3."""
_UNUSED = 1 << 30
"""The unit of a digit that is 0 for every position."""
_ALIGNMENT = 32
"""Heads whose size is a multiple of it have no overlapping last vector in the CPU operators."""


class AlibiEmbedding(nn.Module):
    """The digits of a step's positions, in the place of the tables of `RotaryEmbedding`."""

    units: torch.Tensor

    def __init__(self, head_dim: int, max_model_len: int) -> None:
        """Raises `CheckpointError` for contexts whose positions have more digits."""
        super().__init__()
        if max_model_len > _BASE**_DIGITS:
            raise CheckpointError(
                f"max_model_len is {max_model_len}, but ALiBi is computed for contexts of up to {_BASE**_DIGITS} "
                "tokens; set it to that or less"
            )
        used = [_BASE**digit for digit in range(_DIGITS) for _ in range(_NUMBERS)]
        units = used + [_UNUSED] * (num_extra_dims(head_dim) // 2 - len(used))
        self.register_buffer("units", torch.tensor(units, dtype=torch.float32), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, which are 1, and sines, which are digits, for `models.ops.torch_ops.rotate`.

        # [tokens] int64 -> 2 x [tokens, 1, extra dims] float32
        """
        if runtime.active() and positions.device.type == "cpu":
            cos, sin = attention_ops.rope_table(positions, self.units, 1.0, base=_BASE)
            return cos[:, None], sin[:, None]
        digits = (without_lengths(positions)[:, None] // self.units.long() % _BASE).float()
        sin = torch.cat((-digits, digits), dim=-1)[:, None]
        return torch.ones_like(sin), sin


class AlibiHeads(nn.Module):
    """Adds the dimensions of the biases to queries and keys."""

    of_queries: torch.Tensor
    of_keys: torch.Tensor

    def __init__(self, slopes: torch.Tensor, num_kv_heads: int, head_dim: int, scale: float) -> None:
        """`slopes` and `num_kv_heads`: this rank's. `scale`: the factor of the scores. # [heads] float32"""
        super().__init__()
        extra = num_extra_dims(head_dim)
        queries, keys = (torch.zeros(heads, extra) for heads in (len(slopes), num_kv_heads))
        for digit in range(_DIGITS):
            rest = slopes.double() * float(_BASE**digit) / (scale * _KEY)
            for number in range(_NUMBERS):
                pair = digit * _NUMBERS + number
                keys[:, pair] = _KEY
                queries[:, extra // 2 + pair] = rest.to(queries.dtype)
                rest = rest - queries[:, extra // 2 + pair].double()
        self.register_buffer("of_queries", queries, persistent=False)
        self.register_buffer("of_keys", keys, persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, heads, head_dim], [tokens, kv_heads, head_dim] -> the same, with extra dims + head_dim"""
        return precede_heads(self.of_queries, q), precede_heads(self.of_keys, k)


def num_extra_dims(head_dim: int) -> int:
    """The number of a head's dimensions that hold its bias."""
    least = 2 * _DIGITS * _NUMBERS
    return least + -(head_dim + least) % _ALIGNMENT
