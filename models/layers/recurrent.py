"""Shared parts of recurrent layers: iteration over a step's rows by state slot, and the short causal convolution.

A step's rows are ordered: first decodes, which all implementations process as a batch, one token of each row at a
time; then prefills, processed row by row. A slot is the index of a sequence's state in the cache. With speculation
each draft token of a row writes its state into a slot of its own (`states_after`), so that rejected tokens are undone
by continuing from an earlier slot.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.backend import AttentionMetaData
from models.attention.gpu import TritonMetaData
from models.layers.base import StateCacheSpec
from models.layers.parameter import WeightPart, empty_parameter, require_shape
from models.ops import triton
from models.ops.activation import ACTIVATIONS, activate
from models.ops.cpu import recurrent as ops
from models.ops.types import Gating

if TYPE_CHECKING:
    from models.ops.self_test import Case
    from models.ops.triton.gated_delta import DeltaPlan


class RowSpan(NamedTuple):
    """The tokens of a prefill row."""

    slot: int
    tokens: slice
    is_first: bool
    """Whether these are the first tokens of their sequence, which starts from a zero state."""


def row_spans(metadata: AttentionMetaData) -> list[RowSpan]:
    """Return the prefill rows, which follow the decodes."""
    assert metadata.states is not None
    num_decodes = metadata.num_decodes if metadata.states_after is None else metadata.num_by_token
    if num_decodes == len(metadata.states):
        return []  # A captured graph must not read from the device.
    ends = metadata.cu_seqlens_q.tolist()
    rows = range(num_decodes, len(metadata.states))
    slots, lengths = metadata.states.tolist(), metadata.seq_lens.tolist()
    return [
        RowSpan(slots[row], slice(ends[row], ends[row + 1]), lengths[row] == ends[row + 1] - ends[row]) for row in rows
    ]


def single_tokens(metadata: AttentionMetaData) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Iterate over the decodes' tokens, one token of each row at a time.

    Yields the indexes of the tokens, and the slots from which each reads its state and to which it writes it.
    """
    assert metadata.states is not None
    slots, after = metadata.states, metadata.states_after
    if after is None:
        if count := metadata.num_decodes:
            yield slice(0, count), slots[:count], slots[:count]
        return
    count = metadata.num_by_token
    if metadata.query_len > 1:
        # A captured graph must not read from the device. A padding token's slot is -1: its state is written into the
        # last slot, which belongs to padding rows.
        length = metadata.query_len
        before = slots[:count]
        for index in range(length):
            tokens = slice(index, count * length, length)
            yield tokens, before, after[tokens]
            before = torch.where(after[tokens] < 0, before, after[tokens])
        return
    starts = metadata.cu_seqlens_q.long()
    counts = starts[1 : count + 1] - starts[:count]
    before = slots[:count]
    for index in range(int(counts.max())):
        rows = torch.nonzero(counts > index)[:, 0]
        of_rows = starts[rows] + index
        yield of_rows, before[rows], after[of_rows]
        before = before.index_copy(0, rows, after[of_rows])


def plan_of(metadata: TritonMetaData) -> "DeltaPlan":
    """Return the step's plan for the Triton kernels, made by the first recurrent layer and reused by the others.

    The plan of a captured graph has decodes only.
    """
    import models.ops.triton.gated_delta as kernels

    assert metadata.states is not None
    by_token = None
    if metadata.states_after is not None:
        by_token = kernels.ByToken(metadata.cu_seqlens_q, metadata.states_after)
    if metadata.lengths is None:
        return kernels.DeltaPlan(metadata.num_decodes, metadata.states, by_token=by_token)
    if "delta" not in metadata.plans:
        queries, contexts = metadata.lengths.queries.tolist(), metadata.lengths.contexts.tolist()
        num_decodes = metadata.num_decodes if by_token is None else metadata.num_by_token
        metadata.plans["delta"] = kernels.make_plan(queries, contexts, metadata.states, num_decodes, by_token)
    plan: DeltaPlan = metadata.plans["delta"]
    return plan


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over each sequence's last `taps` tokens, optionally with a bias and an
    activation. The operators compute SiLU with the convolution, and other activations after it.

    The checkpoint's weight is [channels, 1, taps]. Here it is [taps, channels], because channels are contiguous in the
    input. The cache holds a sequence's last `taps - 1` inputs as [taps - 1, channels]. A weight of one tap has a
    second one here, which is 0, because no kernel has a cache of no inputs.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        spans: tuple[tuple[int, int], ...],
        whole: int,
        *,
        bias: bool,
        activation: str | None,
    ) -> None:
        """`spans`: first index and count of each range of this rank's channels in the checkpoint's `whole`
        channels. `activation`: a name of `ACTIVATIONS`, or None for none."""
        super().__init__()
        self.spans, self.whole, self.has_silu = spans, whole, activation == "silu"
        self.other_activation = None if activation is None or self.has_silu else ACTIVATIONS[activation]
        self.stored_taps = taps
        self.weight = empty_parameter(max(taps, 2), channels, weight_loader=self._load)
        self.bias = empty_parameter(channels, weight_loader=self._load) if bias else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of the cached inputs of a sequence."""
        taps, channels = self.weight.shape
        return taps - 1, channels

    def forward(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor,
        metadata: AttentionMetaData,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """# [tokens, channels], [slots, taps - 1, channels] -> [tokens, channels]

        `gates`: factors of the input and of the output. # 2 x [tokens, channels]
        """
        convolved = self._convolved(x, inputs, metadata, gates)
        return convolved if self.other_activation is None else activate(convolved, self.other_activation)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of an activation that is not computed with the convolution."""
        from models.ops.triton.cases.elementwise import ActivationCase

        del max_tokens
        if self.other_activation is not None:
            yield ActivationCase(self.weight.shape[1], Gating(self.other_activation), dtype, is_gated=False)

    def _convolved(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor,
        metadata: AttentionMetaData,
        gates: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if metadata.step is not None and ops.convolves(x, weight, inputs):
            return ops.convolve(x, weight, bias, inputs, metadata.step, gates=gates, has_silu=self.has_silu)
        if (
            isinstance(metadata, TritonMetaData)
            and x.dtype is inputs.dtype
            and triton.runs(x, inputs, operator="recurrent")
        ):
            import models.ops.triton.state_space as kernels

            plan = plan_of(metadata)
            return kernels.convolve(x, weight, bias, inputs, plan, gates=gates, has_silu=self.has_silu)
        return self._forward_torch(x, inputs, metadata, gates)

    def _forward_torch(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor,
        metadata: AttentionMetaData,
        gates: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        assert metadata.states is not None
        x = x if gates is None else gates[0] * x
        out = torch.zeros_like(x)
        for tokens, before, after in single_tokens(metadata):
            window = torch.cat((inputs[before], x[tokens, None]), dim=1)  # [rows, taps, channels]
            inputs[after] = window[:, 1:]
            out[tokens] = self._convolve(window)[:, 0]
        for slot, span, is_first in row_spans(metadata):
            if is_first:
                inputs[slot] = 0
            window = torch.cat((inputs[slot], x[span]))
            inputs[slot] = window[len(window) - inputs.shape[1] :]
            out[span] = self._convolve(window[None])[0]
        return out if gates is None else gates[1] * out

    def _convolve(self, window: torch.Tensor) -> torch.Tensor:
        """# [batch, taps - 1 + n, channels] -> [batch, n, channels]"""
        weight = self.weight.T[:, None].to(window.dtype)
        out = F.conv1d(window.transpose(1, 2), weight, self.bias, groups=len(weight)).transpose(1, 2)
        return F.silu(out) if self.has_silu else out

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        is_bias = parameter is self.bias
        require_shape(loaded, (self.whole,) if is_bias else (self.whole, 1, self.stored_taps))
        mine = torch.cat([loaded[first : first + count] for first, count in self.spans])
        if is_bias:
            parameter.data.copy_(mine)
        else:
            parameter.data[: -self.stored_taps] = 0
            parameter.data[-self.stored_taps :] = mine[:, 0].T


def convolution_cache(layer_name: str, convolution: ShortConvolution) -> StateCacheSpec:
    """Return the cache spec of a layer whose only state is a convolution's inputs."""
    return StateCacheSpec(layer_name, (convolution.state_shape,), (None,))
