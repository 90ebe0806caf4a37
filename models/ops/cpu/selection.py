"""CPU operators of indexers: rotation of queries and keys, and selection of the keys that each token attends to."""

import torch

from models.ops.cpu import structures
from models.ops.cpu.packed_weight import DEPTH
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step
from models.ops.types import NormWeight, Rotation

_UNIT = 16
"""Number of keys that the operators multiply at a time."""


def selects(q: torch.Tensor, keys: torch.Tensor, top_k: int) -> bool:
    """Whether `select_keys` supports these queries and cached keys. # [T, H, dim], [blocks, vectors, dim]"""
    heads, dim = q.shape[1:]
    fits = heads <= structures.INDEX_HEADS and DEPTH <= dim <= structures.MAX_INDEX_DIM and dim % 8 == 0
    return runs(q, keys) and fits and top_k > 0 and keys.shape[0] * keys.shape[1] <= structures.MAX_INDEXED


def selects_blocks(q: torch.Tensor, keys: torch.Tensor, block: int, top_k: int) -> bool:
    """Whether `select_blocks` supports these queries, cached keys and blocks of keys."""
    return selects(q, keys, top_k) and block % _UNIT == 0 and q.shape[1] <= block


def rotate_heads(
    x: torch.Tensor,
    rotation: Rotation,
    step: Step | None = None,
    *,
    norm: NormWeight | None = None,
    eps: float = 0.0,
    is_last: bool = False,
    is_interleaved: bool = False,
    is_back: bool = False,
    pages: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate some dimensions of heads, after applying `norm`, or a norm without weight if `eps` is not 0.

    # [T, heads, dim] -> [T, heads, dim]

    `is_last`: rotate the last dimensions instead of the first. `is_interleaved`: rotate adjacent pairs instead of
    halves. `is_back`: rotate by the negative angles. With `pages` [blocks, block_size, dim], the only head is written
    to the slots of the `step` there, and `x` is returned unchanged.
    """
    runtime = current()
    num_tokens, heads, dim = x.shape
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    out = runtime.rows(num_tokens, heads * dim) if pages is None else pages
    arguments = structures.RotateHeads(
        x.data_ptr(),
        x.stride(0),
        None if norm is None else norm.weight.data_ptr(),
        0.0 if norm is None else norm.offset,
        eps if norm is None else norm.eps,
        cos.data_ptr(),
        sin.data_ptr(),
        rotary_dim,
        dim - rotary_dim if is_last else 0,
        is_interleaved,
        is_back,
        out.data_ptr(),
        out.stride(0),
        0 if pages is None else pages.shape[1],
        heads,
        dim,
    )
    kept = x, None if norm is None else norm.weight, cos, sin, out
    runtime.run(arguments, Step(num_tokens=num_tokens) if step is None else step, kept)
    return x if pages is not None else out.view(num_tokens, heads, dim)


def select_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    keys: torch.Tensor,
    step: Step,
    top_k: int,
    *,
    block_size: int,
    rate: int = 1,
) -> torch.Tensor:
    """Select each token's `top_k` keys by score, the sum over heads of `scale * weight * relu(q . k)`.

    # [T, H, dim], [T, H] bf16, [blocks, vectors, dim] -> [T, top_k] int32, ascending, padded with -1

    `keys`: one per `rate` tokens, in blocks of `block_size` tokens. Among equal scores the first keys are selected.
    """
    return _select(q, weights, scale, keys, step, top_k, block_size, rate, 0, 0)


def select_blocks(
    q: torch.Tensor, keys: torch.Tensor, step: Step, *, block: int, top_k: int, num_local: int
) -> torch.Tensor:
    """Select blocks of `block` keys for each head of a token; a block's score is that of its best key.

    # [T, H, dim], [blocks, block_size, dim] -> [T * H, top_k] int32, ascending, padded with -1

    The last `num_local` blocks are always selected.
    """
    return _select(q, None, 0.0, keys, step, top_k, keys.shape[1], 1, block, num_local)


def _select(
    q: torch.Tensor,
    weights: torch.Tensor | None,
    scale: float,
    keys: torch.Tensor,
    step: Step,
    top_k: int,
    block_size: int,
    rate: int,
    block: int,
    num_local: int,
) -> torch.Tensor:
    runtime = current()
    num_tokens, heads, dim = q.shape
    assert q.stride(1) == dim
    selected = runtime.rows(num_tokens * (heads if weights is None else 1), top_k, torch.int32)
    arguments = structures.SelectKeys(
        q.data_ptr(),
        q.stride(0),
        pointer(weights),
        0 if weights is None else weights.stride(0),
        scale,
        keys.data_ptr(),
        keys.stride(0),
        block_size,
        rate,
        heads,
        dim,
        block,
        num_local,
        selected.data_ptr(),
        top_k,
    )
    runtime.run(arguments, step, (q, weights, keys, selected))
    return selected
