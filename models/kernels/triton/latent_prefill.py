"""Attention of prompts to expanded latents: every head's key is its expansion beside the one rotated key of all heads.

In DeepSeek-V3's shape a query and a key cost 320 multiplications a head expanded, and 1088 in the latents' space;
expanding a latent costs 131072, which some 170 queries save. So prompts expand and decodes do not. The memory of
expansions is bounded by taking a long context in pieces, between which a query's softmax is carried on, as it is from
tile to tile (FlashAttention-2, Dao, 2023).
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


class Piece(NamedTuple):
    """Some keys of one row, to which its queries attend: a row of the kernel's table."""

    first_query: int
    num_queries: int
    first_key: int
    """Among the expanded latents."""
    num_keys: int
    offset: int
    """The first query sees the piece's keys up to this one, the next one more; below 0: none yet."""
    is_first: bool
    is_last: bool
    """Of its row's pieces, which follow one another, each in a launch of its own."""


@triton.jit
def _load_tile(rows, has_row, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The first WIDTH numbers of some rows, and 0 up to TILE. # pointers [N, 1], [N] -> [N, TILE]"""
    columns = tl.arange(0, TILE)[None, :]
    return tl.load(rows + columns, mask=has_row[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def _attend_keys(
    q_nope,  # [QUERIES, NOPE_TILE]
    q_rope,  # [QUERIES, ROPE_TILE]
    attended,  # [QUERIES, VALUE_TILE] float32
    highest,  # [QUERIES] float32
    total,  # [QUERIES] float32
    expanded,  # Of the piece's first key and this head
    shared,
    begin,
    end,
    num_keys,
    last_seen,  # [QUERIES], the last key of the piece that each query sees
    scale,
    key_stride,
    shared_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The softmax of a tile of queries, carried over the keys from `begin` to `end`."""
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        exists = keys < num_keys
        rows = expanded + keys[:, None].to(tl.int64) * key_stride
        k_nope = _load_tile(rows, exists, NOPE, NOPE_TILE)
        k_rope = _load_tile(shared + keys[:, None].to(tl.int64) * shared_stride, exists, ROPE, ROPE_TILE)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.dot(q_nope, tl.trans(k_nope), scores, input_precision="ieee") * scale
        if IS_MASKED:
            seen = exists[None, :] & (keys[None, :] <= last_seen[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(shares, 1)
        v = _load_tile(rows + NOPE, exists, VALUE, VALUE_TILE)
        attended = tl.dot(shares.to(v.dtype), v, attended * shrink[:, None], input_precision="ieee")
        highest = higher
    return attended, highest, total


@triton.jit
def latent_prefill_kernel(
    q,  # [T, H, NOPE]
    rotated,  # [T, H, ROPE], the rest of each query
    expanded,  # [keys, H, NOPE + VALUE]
    shared,  # [keys, ROPE], a row every shared_stride
    pieces,  # [P, 7] int32, see Piece
    out,  # [T, H, VALUE]
    carried,  # [T, H, VALUE] float32, between the pieces of a row
    carried_softmax,  # [T, H, 2] float32, highest score and total
    scale,  # Of the scores, to base 2
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    key_stride,
    shared_stride,
    num_heads,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A tile [QUERIES, VALUE] of one head over one piece of its row's keys. Grid: (tiles of queries, H, P)."""
    head = tl.program_id(1)
    piece = pieces + tl.program_id(2) * 7
    first_query, num_queries = tl.load(piece), tl.load(piece + 1)
    first_key, num_keys = tl.load(piece + 2), tl.load(piece + 3)
    offset, is_first, is_last = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6)
    # The last tiles have the most keys: they begin first.
    tile = tl.cdiv(num_queries, QUERIES) - 1 - tl.program_id(0)
    if tile < 0:
        return
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    has_query = queries < num_queries
    rows = (first_query + queries).to(tl.int64)
    q_nope = _load_tile(q + rows[:, None] * q_stride + head * q_head_stride, has_query, NOPE, NOPE_TILE)
    q_rope = _load_tile(rotated + rows[:, None] * rope_stride + head * rope_head_stride, has_query, ROPE, ROPE_TILE)

    place = rows * num_heads + head
    is_carried = has_query & (is_first == 0)
    values = tl.arange(0, VALUE_TILE)
    has_value = has_query[:, None] & (values < VALUE)[None, :]
    highest = tl.load(carried_softmax + place * 2, mask=is_carried, other=-1.0e30)
    total = tl.load(carried_softmax + place * 2 + 1, mask=is_carried, other=0.0)
    at = carried + place[:, None] * VALUE
    attended = _load_tile(at, is_carried, VALUE, VALUE_TILE)

    expanded += first_key.to(tl.int64) * key_stride + head * (NOPE + VALUE)
    shared += first_key.to(tl.int64) * shared_stride
    # A query sees the keys up to its own position; whole tiles that the first query sees need no mask.
    last_seen = queries + offset
    seen_by_all = tl.minimum(tl.maximum(tile * QUERIES + offset + 1, 0), num_keys) // KEYS * KEYS
    seen_by_one = tl.minimum(tl.maximum(tl.minimum((tile + 1) * QUERIES, num_queries) + offset, 0), num_keys)
    attended, highest, total = _attend_keys(
        q_nope, q_rope, attended, highest, total, expanded, shared, 0, seen_by_all, num_keys, last_seen, scale,
        key_stride, shared_stride, NOPE, ROPE, VALUE, NOPE_TILE, ROPE_TILE, VALUE_TILE, KEYS, False,
    )  # fmt: skip
    attended, highest, total = _attend_keys(
        q_nope, q_rope, attended, highest, total, expanded, shared, seen_by_all, seen_by_one, num_keys, last_seen,
        scale, key_stride, shared_stride, NOPE, ROPE, VALUE, NOPE_TILE, ROPE_TILE, VALUE_TILE, KEYS, True,
    )  # fmt: skip

    if is_last != 0:
        attended = attended / total[:, None]
        tl.store(out + place[:, None] * VALUE + values[None, :], attended.to(out.dtype.element_ty), mask=has_value)
    else:
        tl.store(carried_softmax + place * 2, highest, mask=has_query)
        tl.store(carried_softmax + place * 2 + 1, total, mask=has_query)
        tl.store(at + values[None, :], attended, mask=has_value)


def latent_prefill(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    pieces: torch.Tensor,
    out: torch.Tensor,
    carried: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    longest: int,
    scale: float,
) -> None:
    """Attend to one piece of each of some rows; whose last it is has its result in `out`. Sums are float32.

    q [T, H, nope]; q_rope [T, H, rope], rotated; expanded [keys, H, nope + v]; shared [keys, rope], the rotated key of
    all heads; pieces [P, 7] int32, each a `Piece`; `longest` the most queries of one; out [T, H, v]; `carried`
    [T, H, v] and [T, H, 2] float32, for rows of several pieces: None where each has one.
    """
    _, num_heads, nope = q.shape
    rope, value = shared.shape[1], out.shape[2]
    launch = launch_of("latent_prefill", q.device, element=q.element_size())
    nothing = out.new_empty(1, dtype=torch.float32)
    sums, softmax = carried or (nothing, nothing)
    latent_prefill_kernel[(cdiv(longest, launch.blocks["QUERIES"]), num_heads, len(pieces))](
        q,
        q_rope,
        expanded,
        shared,
        pieces,
        out,
        sums,
        softmax,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        expanded.stride(0),
        shared.stride(0),
        num_heads,
        NOPE=nope,
        ROPE=rope,
        VALUE=value,
        NOPE_TILE=max(16, next_power_of_2(nope)),
        ROPE_TILE=max(16, next_power_of_2(rope)),
        VALUE_TILE=max(16, next_power_of_2(value)),
        **launch.keywords,
    )


_STRIDES = ("q_stride", "q_head_stride", "rope_stride", "rope_head_stride", "key_stride", "shared_stride")
COMPILATIONS = tuple(
    Compilation(
        kernel=latent_prefill_kernel,
        variant="bf16 128+64",
        target=target,
        config=config_of("latent_prefill", target, element=2),
        signature={
            **dict.fromkeys(("q", "rotated", "expanded", "shared", "out"), "*bf16"),
            **dict.fromkeys(("carried", "carried_softmax"), "*fp32"),
            **dict.fromkeys((*_STRIDES, "num_heads"), "i32"),
            "pieces": "*i32",
            "scale": "fp32",
        },
        constexprs={
            "NOPE": 128,
            "ROPE": 64,
            "VALUE": 128,
            "NOPE_TILE": 128,
            "ROPE_TILE": 64,
            "VALUE_TILE": 128,
        },
        divisible=frozenset(_STRIDES),
        large=frozenset({"expanded", "carried"}),
        has_dot=True,
    )
    for target in TARGETS.values()
)
