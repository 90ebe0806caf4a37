"""A gated delta net between its projections: convolution, delta rule, gated norm. Called by `GatedDeltaNet`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from models.kernels.triton.delta_conv import delta_conv
from models.kernels.triton.gated_delta import delta_step, gated_norm
from models.kernels.triton.gated_delta_span import chunk_size, delta_spans
from models.upload import upload


class DeltaPlan(NamedTuple):
    """A step's rows as the kernels read them; the same for all layers."""

    num_decodes: int
    slots: torch.Tensor  # [B] int64
    spans: torch.Tensor | None = None
    """[rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence; None where all decode"""
    token_rows: torch.Tensor | None = None  # [T - num_decodes] int32
    chunks: torch.Tensor | None = None  # [chunks, 2] int32: first token and tokens


def make_plan(query_lens: Sequence[int], seq_lens: Sequence[int], slots: torch.Tensor, num_decodes: int) -> DeltaPlan:
    """Of a step whose first `num_decodes` rows have one token each. `slots` [B] int64 lies on the device."""
    if num_decodes == len(query_lens):
        return DeltaPlan(num_decodes, slots)
    size = chunk_size(slots.device)
    spans: list[tuple[int, int, int, bool]] = []
    chunks: list[tuple[int, int]] = []
    first = num_decodes
    for count, length in zip(query_lens[num_decodes:], seq_lens[num_decodes:], strict=True):
        spans.append((first, count, len(chunks), count == length))
        chunks += [(first + start, min(size, count - start)) for start in range(0, count, size)]
        first += count
    token_rows = np.repeat(np.arange(len(spans)), [count for _, count, _, _ in spans])
    tables = [np.array(table, np.int32) for table in (spans, token_rows, chunks)]
    return DeltaPlan(num_decodes, slots, *upload(tables, slots.device))


def remember(
    projected: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    inputs: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the convolution gives of each token, and what it reads of its state: `delta_net` before its norm.

    # -> [T, channels], [T, value heads, value_dim]
    """
    _, heads, key_dim, value_dim = states.shape
    num_tokens = projected.shape[0]
    convolved = projected.new_empty(num_tokens, conv.shape[0])
    read = projected.new_empty(num_tokens, heads, value_dim)
    decodes, gates = plan.num_decodes, (ba, a_log, dt_bias)
    shape = {"key_dim": key_dim, "key_heads": key_heads}
    if decodes:
        slots, of_decodes = plan.slots, read
        if plan.spans is not None:
            slots, of_decodes = slots[:decodes], read[:decodes]
        delta_conv(projected, conv, inputs, slots, convolved, None, **shape)
        delta_step(convolved, *gates, states, slots, of_decodes)
    if plan.spans is not None:
        assert plan.token_rows is not None
        assert plan.chunks is not None
        slots = plan.slots[decodes:]
        spans = plan.spans, plan.token_rows
        delta_conv(projected, conv, inputs, slots, convolved, spans, first_token=decodes, **shape)
        delta_spans(convolved, *gates, states, slots, plan.spans, plan.chunks, read)
    return convolved, read


def delta_net(
    projected: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    inputs: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
) -> torch.Tensor:
    """Each row's tokens through its convolution and its state, which are brought up to date, and a gated norm.

    # projected [T, key_heads * 2 * (key_dim + group * value_dim)], ba [T, key_heads * 2 * group],
    # conv [channels, 1, taps], a_log and dt_bias [value heads], inputs [slots, channels, taps - 1],
    # states [slots, value heads, key_dim, value_dim] float32 -> [T, value heads * value_dim]
    """
    _, heads, key_dim, _ = states.shape
    _, read = remember(projected, ba, conv, a_log, dt_bias, inputs, states, plan, key_heads=key_heads)
    return gated_norm(read, projected, *norm, key_dim=key_dim, group=heads // key_heads)
