"""Recompute single rows of attention, linear layers and experts in plain torch, and compare an operator's result.

Each function returns the row's largest error in units of the expected rounding error (see `models.ops.self_test`). It
is a tensor on the row's device, so that the host does not wait for the device.
"""

import torch
from torch import nn

from models.layers.moe import ExpertRow, FusedMoE
from models.layers.parameter import onednn_of, packed_of
from models.ops import triton
from models.ops.cpu import dense as ops
from models.ops.cpu.packed_weight import PackedWeight, padded
from models.ops.paged_attention import attend_row
from models.ops.self_test import FLOAT32, rounding_bound
from models.ops.stored_weight import stored_of
from models.ops.types import AttentionOptions

_OUTPUTS = 256
"""Number of leading outputs of a product that are recomputed."""
_PAIRED = 16
"""Tokens per group in the paired value layout of the CPU operators."""


def recompute_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: slice,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    found: torch.Tensor,
    *,
    is_paired: bool,
) -> torch.Tensor:
    """Return the error of a token's attention to cached keys and values.

    `keys`: the range of the blocks' tokens to which the token attends. `found`: the operator's result. `is_paired`:
    whether each 16 tokens' values are stored as [8 pairs, D, 2]. `k` and `v` include the padding of the cache.

    # q and found [Hq, D], k and v [blocks, Hkv, block size, padded D] -> []
    """
    if is_paired:
        blocks, heads, size, dim = v.shape
        v = v.reshape(blocks, heads, size // _PAIRED, _PAIRED // 2, dim, 2).transpose(-1, -2).reshape(v.shape)
    k, v = k[..., : q.shape[1]], v[..., : found.shape[1]]
    by_head = (each.transpose(0, 1).flatten(1, 2)[:, keys].float() for each in (k, v))
    k, v = (each * scale for each, scale in zip(by_head, (options.k_scale, options.v_scale), strict=True))
    exact, magnitude = (attend_row(q[None].float(), k, each, options, sinks)[0] for each in (v, v.abs()))
    return _error(found, exact, rounding_bound(q.dtype) * magnitude)


def product_error(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, found: torch.Tensor, *, expert: int | None = None
) -> torch.Tensor | None:
    """Return the error of a row's product with a weight, or with one expert's weight. # [inputs], [outputs] -> []

    None if the weight's form does not allow reading single rows.
    """
    stored = stored_of(weight)
    # A stored weight may have row ranges of different formats, each with its own kernel; only the first is checked.
    some = slice(0, min(_OUTPUTS, len(found) if stored is None else stored.rows[0].stop))
    product = _product(x, weight, bias, some, expert)
    if product is None:
        return None
    exact, bound = product
    return _error(found[some], exact, bound + rounding_bound(found.dtype) * exact.abs())


def recompute_expert(module: FusedMoE, expert: int, row: ExpertRow) -> torch.Tensor | None:
    """Return the larger error of a row's two products with an expert; None if another rank holds the expert."""
    if not 0 <= expert < len(module.local_experts):
        return None
    second = product_error(row.inner, module.w2, module.outer_bias, row.out, expert=expert)
    width, some = len(row.inner), slice(0, min(_OUTPUTS, len(row.inner)))
    gate = _product(row.x, module.w13, module.w13_bias, some, expert)
    # The second half of w13 is the up projection; an activation without gate has only the first half.
    behind = slice(width, width + some.stop) if module.w13.shape[1] > width else some
    up = _product(row.x, module.w13, module.w13_bias, behind, expert)
    if gate is None or up is None or second is None:
        return None
    with triton.idle():
        exact = module.activation(gate[0] if behind is some else torch.cat((gate[0], up[0])))
    # Error propagation: an upper bound of the activation's slope in gate and up, times the error of each.
    bound = 2 * gate[1] * (up[0].abs() + up[1] + 1) + 2 * up[1] * (gate[0].abs() + gate[1] + 1)
    first = _error(row.inner[some], exact, bound + rounding_bound(row.inner.dtype) * exact.abs())
    return torch.maximum(first, second)


def _product(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, some: slice, expert: int | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return some outputs of a row's product and their expected rounding errors. # [inputs] -> 2 x [outputs]
    float32"""
    dtype = x.dtype
    rows = _rows(weight, some, expert, dtype)
    if rows is None:
        return None
    stored = stored_of(weight)
    if stored is not None:
        from models.ops.triton.cases.quantized_products import as_multiplied

        x = as_multiplied(x[None], stored.rows_at(some, expert)[0])[0]
    wide = x.float()
    exact = rows @ wide
    each = (rows.square() @ wide.square()).sqrt()
    bound = 2 * rounding_bound(dtype) * each + FLOAT32 * (rows.abs() @ wide.abs())
    if bias is not None:
        exact = exact + (bias[some] if expert is None else bias[expert, some]).float()
    return exact, bound


def _rows(weight: nn.Parameter, some: slice, expert: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return some rows of a weight, or of an expert's weight, with the operators' rounding; None if unreadable.

    # -> [rows, inputs] float32
    """
    packed = packed_of(weight)
    if packed is not None:
        if type(packed) is not PackedWeight:
            return None
        first = 0 if expert is None else expert * padded(weight.shape[1])
        return ops.embed(torch.arange(first + some.start, first + some.stop), packed).float()
    at = some if expert is None else (expert, some)
    stored = stored_of(weight)
    if stored is not None:
        from models.ops.triton.cases.quantized_products import part_of

        return part_of(*stored.rows_at(some, expert), dtype)
    return None if onednn_of(weight) is not None else weight[at].float()


def _error(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """`models.ops.self_test.relative_error` without moving the result to the host."""
    error = (found.float() - exact).abs() / bound.clamp(min=torch.finfo(torch.float32).tiny)
    error = torch.where(found.isfinite(), error, torch.inf)
    return torch.where(exact.isfinite() & bound.isfinite(), error, 0.0).max()
