"""Single rows of attention, linear layers and experts in plain torch, compared with what an operator computed.

Each function returns the largest error of a row as a tensor on the row's device, so that the host need not wait for
it, in units of what rounding explains: see `models.ops.self_test`.
"""

import torch
from torch import nn

from models.layers.moe import ExpertRow, FusedMoE
from models.layers.parameter import onednn_of, packed_of
from models.ops import triton
from models.ops.cpu import dense as ops
from models.ops.paged_attention import attend_row
from models.ops.self_test import FLOAT32, rounding_bound
from models.ops.stored_weight import stored_of
from models.ops.types import AttentionOptions

_OUTPUTS = 256
"""Outputs of a product that are computed again, from the first on."""
_PAIRED = 16
"""Tokens whose values the CPU's operators store together."""


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
    """The error of a token's attention to cached keys and values. # q and found [Hq, D], blocks [n, Hkv, block, D]

    `keys`: of the blocks' tokens, those that the token sees. `is_paired`: values lie as [pairs, D, 2] of 16 tokens.
    """
    if is_paired:
        blocks, heads, size, dim = v.shape
        v = v.reshape(blocks, heads, size // _PAIRED, _PAIRED // 2, dim, 2).transpose(-1, -2).reshape(v.shape)
    by_head = (each.transpose(0, 1).flatten(1, 2)[:, keys].float() for each in (k, v))
    k, v = (each * scale for each, scale in zip(by_head, (options.k_scale, options.v_scale), strict=True))
    exact, magnitude = (attend_row(q[None].float(), k, each, options, sinks)[0] for each in (v, v.abs()))
    return _error(found, exact, rounding_bound(q.dtype) * magnitude)


def product_error(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, found: torch.Tensor, *, expert: int | None = None
) -> torch.Tensor | None:
    """The error of a row's product with a weight, or with that of an expert. # [inputs], [outputs] -> []

    None where the weight is in a form of which no rows can be read.
    """
    stored = stored_of(weight)
    # Rows of another form are multiplied by another kernel.
    some = slice(0, min(_OUTPUTS, len(found) if stored is None else stored.rows[0].stop))
    product = _product(x, weight, bias, some, expert)
    if product is None:
        return None
    exact, bound = product
    return _error(found[some], exact, bound + rounding_bound(found.dtype) * exact.abs())


def recompute_expert(module: FusedMoE, expert: int, row: ExpertRow) -> torch.Tensor | None:
    """The error of a row's two products with an expert of this rank; None where it is another rank's."""
    if not 0 <= expert < len(module.local_experts):
        return None
    second = product_error(row.inner, module.w2, module.outer_bias, row.out, expert=expert)
    width, some = len(row.inner), slice(0, min(_OUTPUTS, len(row.inner)))
    gate = _product(row.x, module.w13, module.w13_bias, some, expert)
    # Without gates the activation takes the first product alone.
    behind = slice(width, width + some.stop) if module.w13.shape[1] > width else some
    up = _product(row.x, module.w13, module.w13_bias, behind, expert)
    if gate is None or up is None or second is None:
        return None
    with triton.idle():
        exact = module.activation(gate[0] if behind is some else torch.cat((gate[0], up[0])))
    # The activation is no steeper than this in either of its arguments.
    bound = 2 * gate[1] * (up[0].abs() + up[1] + 1) + 2 * up[1] * (gate[0].abs() + gate[1] + 1)
    first = _error(row.inner[some], exact, bound + rounding_bound(row.inner.dtype) * exact.abs())
    return torch.maximum(first, second)


def _product(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, some: slice, expert: int | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Some outputs of a row's product, and what rounding explains of them. # [inputs] -> 2 x [outputs] float32"""
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
    """Some rows of a weight, or of an expert's, as operators multiply by them. # -> [rows, inputs] float32"""
    packed = packed_of(weight)
    if packed is not None:
        if type(packed) is not ops.PackedWeight:
            return None
        first = 0 if expert is None else expert * weight.shape[1]
        return ops.embed(torch.arange(first + some.start, first + some.stop), packed).float()
    at = some if expert is None else (expert, some)
    stored = stored_of(weight)
    if stored is not None:
        from models.ops.triton.cases.quantized_products import part_of

        return part_of(*stored.rows_at(some, expert), dtype)
    return None if onednn_of(weight) is not None else weight[at].float()


def _error(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """As `models.ops.self_test.relative_error`, on the device."""
    error = (found.float() - exact).abs() / bound.clamp(min=torch.finfo(torch.float32).tiny)
    error = torch.where(found.isfinite(), error, torch.inf)
    return torch.where(exact.isfinite() & bound.isfinite(), error, 0.0).max()
