"""Rotary position embedding (Su et al., 2021) with the scalings of transformers' `modeling_rope_utils`.

Two of them depend on the length of the sequence: `dynamic` lowers its frequencies as the sequence grows, `longrope`
changes its factors once it exceeds the original context. A step contains sequences of different lengths, so each
position carries the length that determines its frequencies (`models.config.rope.RopeContext`), and sequences share
cached keys only if these lengths are equal. The scheduler recomputes a sequence when it exceeds the original context
of `longrope`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from models.config.rope import RopeConfig, RopeContext, lengths_of, without_lengths
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import runtime


class RopeChange(NamedTuple):
    """How frequencies depend on the lengths that positions carry."""

    original: int
    """Number of tokens of the original context."""
    factor: float | None
    """The factor by which `dynamic` extends the context; None for `longrope`, which has a second set of
    frequencies."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions, computed once and shared by all layers.

    Computing them takes less time than one layer's norm and is as exact at position 10^6 as at 0. A table would take
    64 MiB for a context of 128k tokens with a head_dim of 128.
    """

    inv_freq: torch.Tensor
    further: torch.Tensor
    """`longrope`: the frequencies past the original context. `dynamic`: the exponents of the growth factor."""

    def __init__(self, rope: RopeConfig, max_model_len: int) -> None:
        super().__init__()
        self.attention_factor = rope.attention_factor
        frequencies = inverse_frequencies(rope, rope.original_max_len)
        # Both halves are stored, the first negated for the sign of its sine, so that `rotate` need not split its
        # input.
        self.register_buffer("inv_freq", torch.cat((-frequencies, frequencies)), persistent=False)
        self.change: RopeChange | None = None
        context = rope.context(max_model_len)
        if context is not None:
            if context.grows:
                pairs = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32)
                further = (-pairs / (rope.rotary_dim - 2)).repeat(2)
            else:
                further = inverse_frequencies(rope, context.original + 1)
                further = torch.cat((-further, further))
            self.register_buffer("further", further, persistent=False)
            self.change = RopeChange(context.original, rope.factor if context.grows else None)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines signed for `models.ops.torch_ops.rotate`.

        # [tokens] int64 -> 2 x [tokens, 1, rotary_dim] float32
        """
        change = self.change
        if runtime.active() and positions.device.type == "cpu":
            pairs = len(self.inv_freq) // 2
            further = None if change is None else (self.further[pairs:], *change)
            cos, sin = attention_ops.rope_table(positions, self.inv_freq[pairs:], self.attention_factor, further)
            return cos[:, None], sin[:, None]
        plain, frequencies = without_lengths(positions), self.inv_freq
        if change is not None:
            lengths = lengths_of(positions)
            if change.factor is None:
                frequencies = torch.where(lengths[:, None] > 0, self.further, frequencies)
            else:
                lengths = torch.maximum(lengths, plain + 1).clamp(min=change.original)
                growth = change.factor * lengths / change.original - (change.factor - 1)
                frequencies = frequencies * growth.float()[:, None] ** self.further
        angles = (plain.float()[:, None] * frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def position_scales(positions: torch.Tensor, factor: float, length: int, first: int = 0) -> torch.Tensor:
    """Return the scale of each query by its position: `1 + factor * log(1 + floor((position + first) / length))`.

    # [tokens] int64 -> [tokens, 1] float32
    """
    if runtime.active() and positions.device.type == "cpu":
        return attention_ops.position_scales(positions, factor, length, first)
    spans = ((without_lengths(positions) + first) // length).float()
    return (1 + factor * torch.log1p(spans))[:, None]


def inverse_frequencies(rope: RopeConfig, length: int) -> torch.Tensor:
    """Return the radians per position of each pair of dimensions, for a sequence of `length` tokens.

    # [rotary_dim / 2] float32
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    unscaled: torch.Tensor = 1.0 / rope.theta**exponents
    match rope.rope_type:
        case "linear":
            return unscaled / rope.factor
        case "proportional":
            pairs = torch.arange(rope.rotary_dim // 2)
            return torch.where(pairs < (rope.turning_pairs or 0), unscaled / rope.factor, 0.0)
        case "dynamic":
            stretch = rope.factor * max(length, rope.original_max_len) / rope.original_max_len
            power = rope.rotary_dim / (rope.rotary_dim - 2)
            theta: float = rope.theta * (stretch - (rope.factor - 1)) ** power
            return 1.0 / torch.pow(theta, exponents)
        case "yarn":
            return _yarn(rope, exponents)
        case "longrope":
            factors = rope.long_factor if length > rope.original_max_len else rope.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
        case "llama3":
            return _llama3(rope, unscaled)
        case _:
            return unscaled


def _yarn(rope: RopeConfig, exponents: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al., 2023): low frequencies are divided by the factor, high ones kept, with a ramp in between.

    # [rotary_dim / 2] -> [rotary_dim / 2]
    """

    def dimension_of(rotations: float) -> float:
        """Return the (fractional) pair index that makes `rotations` full turns within the original context."""
        turns = math.log(rope.original_max_len / (rotations * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    steps = rope.theta**exponents
    return (1.0 / (rope.factor * steps)) * (1 - keep) + (1.0 / steps) * keep


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: frequencies of long wavelengths are divided by the factor, others kept, with a ramp in between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    if rope.high_freq_factor == rope.low_freq_factor:
        return scaled  # Llama 4 Scout has no ramp.
    shortest = rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), ramp, scaled)


class RotaryByLength(nn.Module):
    """Wraps a rotary embedding of transformers, and calls it once for each distinct sequence length of a step.

    transformers derives the sequence length from the largest position of a call. Each call therefore has one more
    position, the last of a sequence of that length; its result is dropped. Lengths are read on the host.
    """

    def __init__(self, rotary: nn.Module, context: RopeContext, carried: Callable[[], torch.Tensor | None]) -> None:
        """`carried` returns the step's positions with their lengths, or None if no lengths are carried."""
        super().__init__()
        self.rotary: Any = rotary
        self._context, self._carried = context, carried

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of `rotary`, with each position computed for its sequence's length.

        # x, [B, n] int64 -> one or two tensors [B, n, ...]
        """
        positions = self._carried()
        if positions is None:
            self._forget()
            return self.rotary(x, position_ids, *arguments, **keywords)
        lengths, shape = lengths_of(positions), position_ids.shape
        position_ids = position_ids.reshape(1, -1)
        if self._context.grows:
            lengths = torch.maximum(lengths, position_ids[0] + 1)
        lengths = lengths.clamp(min=self._context.original)
        tables: list[torch.Tensor] = []
        for length in sorted(set(lengths.tolist())):
            self._forget()
            rows = (lengths == length).nonzero()[:, 0]
            last = position_ids.new_tensor([[length - 1]])
            found = self.rotary(x, torch.cat((position_ids[:, rows], last), 1), *arguments, **keywords)
            parts = found if isinstance(found, tuple) else (found,)
            if not tables:
                tables = [part.new_empty(1, len(lengths), *part.shape[2:]) for part in parts]
            for table, part in zip(tables, parts, strict=True):
                table[:, rows] = part[:, :-1]
        tables = [table.view(*shape, *table.shape[2:]) for table in tables]
        return tuple(tables) if isinstance(found, tuple) else tables[0]

    def _forget(self) -> None:
        # transformers caches the frequencies of the longest sequence so far; reset them to the original ones.
        if self._context.grows:
            rotary = self.rotary
            rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
