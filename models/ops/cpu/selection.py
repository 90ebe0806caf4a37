"""CPU operators of indexers and of compressed attention: rotation of queries and keys, selection of the keys that each
token attends to, and compression of several tokens' vectors to one."""

from typing import NamedTuple

import torch

from models.ops.cpu import structures
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step
from models.ops.types import NormWeight, Rotation

_UNIT = 16
"""Number of keys that the operators multiply at a time."""


def selects(q: torch.Tensor, keys: torch.Tensor, top_k: int, most: int) -> bool:
    """Whether `select_keys` supports these queries and cached keys. # [T, H, dim], [blocks, vectors, dim]

    `most`: number of keys of the longest sequence.
    """
    heads, dim = q.shape[1:]
    fits = heads <= structures.INDEX_HEADS and dim <= structures.MAX_INDEX_DIM
    return runs(q, keys) and fits and top_k > 0 and most <= structures.MAX_INDEXED


def selects_blocks(q: torch.Tensor, keys: torch.Tensor, block: int, top_k: int, most: int) -> bool:
    """Whether `select_blocks` supports these queries, cached keys and blocks of keys. `most`: see `selects`."""
    return block % _UNIT == 0 and selects(q, keys, top_k, q.shape[1] * -(-most // block))


def rotates(x: torch.Tensor) -> bool:
    """Whether `rotate_heads` supports these heads. # [T, heads, dim]"""
    return runs(x) and x.shape[2] <= structures.MAX_LATENT_DIM and x.stride(1) == x.shape[2]


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


def store(x: torch.Tensor, pages: torch.Tensor, step: Step) -> None:
    """Write each token's vector to its slot. # [T, dim], [blocks, block_size, dim]"""
    _, block_size, dim = pages.shape
    arguments = structures.StoreVectors(x.data_ptr(), x.stride(0), pages.data_ptr(), pages.stride(0), block_size, dim)
    current().run(arguments, step, (x, pages))


class EntryFinish(NamedTuple):
    """How entries are normalised, and their last dimensions rotated by the position of their window's first token."""

    norm: torch.Tensor  # [dim]
    eps: float
    frequencies: torch.Tensor  # [pairs] float32, radians per position
    factor: float
    """The factor of cosines and sines."""


def compresses(pages: torch.Tensor, entries: torch.Tensor, bias: torch.Tensor, *, overlaps: bool) -> bool:
    """Whether `compress` supports these caches, and windows of `len(bias)` tokens."""
    span = (2 if overlaps else 1) * len(bias)
    return runs(pages, entries) and span <= structures.MOST_COMPRESSED


def compress(
    pages: torch.Tensor,
    entries: torch.Tensor,
    bias: torch.Tensor,
    step: Step,
    *,
    overlaps: bool,
    finish: EntryFinish | None,
) -> None:
    """Write the entries of the windows that the step completes. See `models.ops.compression.compress`.

    # [blocks, block_size, 2 * series], [blocks, entries of a block, dim], [rate, series] float32
    """
    rate, series = bias.shape
    block_size, dim = pages.shape[1], entries.shape[2]
    norm, eps, frequencies, factor = finish or (None, 0.0, None, 1.0)
    arguments = structures.Compress(
        pages.data_ptr(),
        pages.stride(0),
        bias.data_ptr(),
        series,
        dim,
        2 * rate if overlaps else rate,
        pointer(norm),
        eps,
        pointer(frequencies),
        0 if frequencies is None else len(frequencies),
        factor,
        entries.data_ptr(),
        entries.stride(0),
        block_size,
        rate,
    )
    current().run(arguments, step, (pages, entries, bias, norm, frequencies))


def tokens_of_pools(pools: torch.Tensor, step: Step, rate: int) -> torch.Tensor:
    """See `models.ops.compression.tokens_of_pools`. # [T, n] int32 -> [T, n * rate + rate - 1] int32"""
    runtime = current()
    num_tokens, top_k = pools.shape
    out = runtime.rows(num_tokens, top_k * rate + rate - 1, torch.int32)
    runtime.run(structures.TokensOfPools(pools.data_ptr(), top_k, rate, out.data_ptr()), step, (pools, out))
    return out
