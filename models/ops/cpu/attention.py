"""CPU operators for rotation, writing the paged cache, and attention over it. Called by the CPU backend and rotary
layers."""

import torch

from models.ops.cpu import structures
from models.ops.cpu.gated_delta import gate_heads
from models.ops.cpu.packed_weight import DEPTH
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step
from models.ops.types import AttentionOptions, HeadNorms, Rotation


def rope_table(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    factor: float,
    further: tuple[torch.Tensor, int, float | None] | None = None,
    *,
    base: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines, and sines whose first half is negated. # [rows] int64, [pairs] -> 2 x [rows, 2 * pairs]

    `frequencies` and both results are float32. `further`, if frequencies depend on the lengths that positions carry:
    one half of `models.layers.rotary.RotaryEmbedding.further`, and the fields of its `RopeChange`. With a `base`,
    cosines are 1, and sines are the digits of the positions in that base, whose units are `frequencies`.
    """
    runtime = current()
    pairs = len(frequencies)
    cos, sin = (runtime.rows(len(positions), 2 * pairs, torch.float32) for _ in range(2))
    others, original, growth = further or (None, 0, None)
    arguments = structures.RopeTable(
        frequencies.data_ptr(),
        pointer(others),
        cos.data_ptr(),
        sin.data_ptr(),
        pairs,
        original,
        0.0 if growth is None else growth,
        factor,
        base,
    )
    step = Step(num_tokens=len(positions), positions=positions.data_ptr())
    runtime.run(arguments, step, (positions, frequencies, others, cos, sin))
    return cos, sin


def position_scales(positions: torch.Tensor, factor: float, length: int, first: int) -> torch.Tensor:
    """`1 + factor * log(1 + floor((position + first) / length))`. # [rows] int64 -> [rows, 1] float32"""
    runtime = current()
    out = runtime.rows(len(positions), 1, torch.float32)
    arguments = structures.PositionScales(out.data_ptr(), first, length, factor)
    step = Step(num_tokens=len(positions), positions=positions.data_ptr())
    runtime.run(arguments, step, (positions, out))
    return out


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: Step,
    *,
    norms: HeadNorms | None = None,
    rotation: Rotation | None = None,
    q_scales: torch.Tensor | None = None,
    is_rotated_first: bool = False,
) -> None:
    """Normalise, rotate and scale queries (in place) and keys; write keys and values, if given, to the cache.

    # q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, value_dim], caches [blocks, kv_heads, block_size, dim]
    # and [blocks, kv_heads, block_size, value_dim] with strides of `stored_size`, q_scales [T, 1] f32
    """
    assert (k is None) == (v is None)
    cos, sin = (None, None) if rotation is None else rotation
    arguments = structures.RopeStore(
        q.data_ptr(),
        pointer(k),
        pointer(v),
        q.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        q.shape[1],
        0 if k is None else k.shape[1],
        q.shape[2],
        v_cache.shape[3],
        None if norms is None else norms.q.weight.data_ptr(),
        None if norms is None else norms.k.weight.data_ptr(),
        0.0 if norms is None else norms.q.offset,
        0.0 if norms is None else norms.q.eps,
        pointer(cos),
        pointer(sin),
        0 if cos is None else cos.shape[-1],
        is_rotated_first,
        pointer(q_scales),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.shape[2],
        k_cache.stride(0),
        v_cache.stride(0),
        k_cache.stride(2),
        v_cache.stride(2),
    )
    weights = () if norms is None else (norms.q.weight, norms.k.weight)
    current().run(arguments, step, (q, k, v, *weights, cos, sin, q_scales, k_cache, v_cache))


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: Step,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    block: int = 0,
) -> torch.Tensor:
    """Attend to the keys and values in the cache, including this step's, which `rope_store` wrote.

    # [T, heads, dim], sinks [heads] f32 -> [T, heads, value_dim]

    `selected` [T * kv_heads, k] int32: the blocks of `block` keys to which each KV head of a token attends, as
    `selection.select_blocks` returns them; None for all.
    """
    runtime = current()
    num_tokens, heads, _ = q.shape
    dim, value_dim = k_cache.stride(2), v_cache.stride(2)
    if q.shape[2] < dim:
        q = gate_heads(q, None, dim)
    out = runtime.rows(num_tokens, heads * value_dim)
    arguments = structures.Attention(
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        heads,
        k_cache.shape[1],
        dim,
        value_dim,
        k_cache.shape[2],
        k_cache.stride(0),
        v_cache.stride(0),
        options.scale,
        options.sliding_window or 0,
        options.is_chunked,
        options.soft_cap or 0.0,
        pointer(sinks),
        pointer(selected),
        0 if selected is None else selected.shape[1],
        block,
    )
    runtime.run(arguments, step, (q, k_cache, v_cache, sinks, selected, out))
    attended = out.view(num_tokens, heads, value_dim)
    is_whole = v_cache.shape[3] == value_dim
    return attended if is_whole else gate_heads(attended[..., : v_cache.shape[3]], None)


def stored_size(dim: int) -> int:
    """Return the elements that a key or value of `dim` elements takes in the cache: a size that products take."""
    return dim if dim > structures.MAX_HEAD_DIM else max(DEPTH, -(-dim // 8) * 8)


def supports(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether `rope_store` and `attention` support these shapes and dtypes."""
    sizes = k_cache.stride(2), v_cache.stride(2)
    are_sized = all(size % 8 == 0 and DEPTH <= size <= structures.MAX_HEAD_DIM for size in sizes)
    return runs(q, k_cache) and are_sized and k_cache.shape[2] % 16 == 0


def make_step(
    *,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    state_slots: torch.Tensor | None = None,
    states_after: torch.Tensor | None = None,
) -> Step:
    """Build a `Step` that points to these arrays and keeps them alive; a recorded pass adds token ids and positions.

    # [T] int64, [B + 1], [B], [B, max_blocks] int32, [B] int64, [T] int64
    """
    assert block_tables.is_contiguous()
    step = Step(
        len(slots),
        len(seq_lens),
        None,
        None,
        slots.data_ptr(),
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        pointer(state_slots),
        pointer(states_after),
    )
    step.kept = slots, query_starts, seq_lens, block_tables, state_slots, states_after
    return step
