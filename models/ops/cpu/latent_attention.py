"""CPU operators of latent attention (DeepSeek-V2, 2024)."""

from typing import NamedTuple

import torch

from models.ops.cpu import structures
from models.ops.cpu.packed_weight import DEPTH, PackedWeight, padded
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step


class PackedHeads:
    """Packed projections of each head's key and value from a latent.

    The key projection is transposed, so that it maps queries to the latent space instead of latents to keys.
    """

    def __init__(self, kv_b: torch.Tensor, nope_dim: int) -> None:
        """Copies from `kv_b` [heads, nope + v, rank]."""
        self.num_heads, _, self.rank = kv_b.shape
        self.nope_dim = nope_dim
        self.v_dim = kv_b.shape[1] - nope_dim
        self.keys = _stack(kv_b[:, :nope_dim].transpose(1, 2))
        self.values = _stack(kv_b[:, nope_dim:])


def _stack(weights: torch.Tensor) -> PackedWeight:
    """Pack one weight per head, each padded to whole panels. # [heads, out_features, in_features]"""
    heads, out_features, in_features = weights.shape
    rows = padded(out_features)
    packed = PackedWeight(heads * rows, in_features)
    for head, weight in enumerate(weights):
        packed.put(head * rows, weight)
    return packed


def supports(q: torch.Tensor, cache: torch.Tensor, rank: int) -> bool:
    """Whether the operators support these shapes and dtypes. # [T, H, nope + rope], [blocks, block_size, rank +
    rope]"""
    block_size, size = cache.shape[1], cache.stride(1)
    fits = rank <= structures.MAX_LATENT_RANK and size <= structures.MAX_LATENT_DIM
    return runs(q, cache) and fits and size % DEPTH == 0 and block_size % 16 == 0


def stored_size(dim: int) -> int:
    """Return the elements that a vector of `dim` elements takes in the cache: a size that products take."""
    return dim if dim > structures.MAX_LATENT_DIM else padded(dim)


def latent_queries(q: torch.Tensor, heads: PackedHeads, size: int) -> torch.Tensor:
    """Project queries to the latent space; the part of the result after the rank is left unset.

    # [T, H, nope + rope] -> [T, H, size]
    """
    out = current().rows(len(q), heads.num_heads * size)
    _headed_linear(q, heads.nope_dim, heads.keys, out, size, heads.rank)
    return out.view(len(q), heads.num_heads, size)


def latent_values(attended: torch.Tensor, heads: PackedHeads) -> torch.Tensor:
    """Project attention outputs from the latent space to values. # [T, H, rank] -> [T, H, v]"""
    out = current().rows(len(attended), heads.num_heads * heads.v_dim)
    _headed_linear(attended, heads.rank, heads.values, out, heads.v_dim, heads.v_dim)
    return out.view(len(attended), heads.num_heads, heads.v_dim)


def _headed_linear(
    x: torch.Tensor, in_features: int, weight: PackedWeight, out: torch.Tensor, out_step: int, wide: int
) -> None:
    """Multiply the first `in_features` of each head of `x` by the head's weight; write the first `wide` of each head's
    `out_step` elements of `out`."""
    arguments = structures.HeadedLinear(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        weight.memory.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        out_step,
        x.shape[1],
        in_features,
        wide,
    )
    current().run(arguments, Step(num_tokens=len(x)), (x, weight.memory, out))


def latent_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    latent_q: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    *,
    norm: tuple[torch.Tensor, float],
    rotation: tuple[torch.Tensor, torch.Tensor],
    is_interleaved: bool,
) -> None:
    """Rotate queries into `latent_q`; normalise latents, rotate the heads' shared key, and write both to the cache.

    # q [T, H, nope + rope], latent [T, rank + rope], latent_q [T, H, size], cache [blocks, block_size, rank + rope]
    # with a stride of `size`

    `norm`: weight and epsilon. `is_interleaved`: whether adjacent dimensions are rotated as a pair, else halves.
    """
    cos, sin = rotation
    rope = cos.shape[-1]
    weight, eps = norm
    arguments = structures.LatentStore(
        q.data_ptr(),
        q.stride(0),
        latent_q.data_ptr(),
        q.shape[1],
        q.shape[2] - rope,
        latent.shape[1] - rope,
        rope,
        latent.data_ptr(),
        latent.stride(0),
        weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        is_interleaved,
        cache.data_ptr(),
        cache.shape[1],
        cache.stride(0),
        cache.stride(1),
    )
    current().run(arguments, step, (q, latent, latent_q, weight, cos, sin, cache))


class Entries(NamedTuple):
    """Cached vectors of `rate` tokens each, to which a token attends in addition to its window."""

    vectors: torch.Tensor  # [blocks, vectors of a block, dim]
    block_size: int
    """Number of tokens of a block."""
    rate: int
    selected: torch.Tensor | None
    """The entries to which each token attends, as `selection.select_keys` returns them; None for all complete ones."""


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor | None,
    step: Step,
    rank: int,
    scale: float,
    *,
    window: int = 0,
    entries: Entries | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to cached vectors, whose first `rank` elements are the values. # [T, H, size] -> [T, H, rank]

    Attends to the sequence's vectors in `cache`, with `window` only to the last ones, and to `entries`. `sinks` [H]
    float32.
    """
    runtime = current()
    num_tokens, heads, dim = q.shape
    width = padded(rank)  # Values are computed in whole steps, so that the last may include elements after the rank.
    out = runtime.rows(num_tokens, heads * width)
    selected = None if entries is None else entries.selected
    arguments = structures.LatentAttention(
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        pointer(cache),
        heads,
        width,
        dim,
        0 if cache is None else cache.shape[1],
        0 if cache is None else cache.stride(0),
        scale,
        window,
        None if entries is None else entries.vectors.data_ptr(),
        0 if entries is None else entries.vectors.stride(0),
        0 if entries is None else entries.block_size,
        0 if entries is None else entries.rate,
        pointer(selected),
        0 if selected is None else selected.shape[1],
        pointer(sinks),
    )
    runtime.run(arguments, step, (q, cache, None if entries is None else entries.vectors, selected, sinks, out))
    return out.view(num_tokens, heads, width)[..., :rank]
