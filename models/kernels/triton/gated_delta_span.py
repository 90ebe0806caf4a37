"""The gated delta rule over spans of tokens, chunk by chunk (Yang, Kautz and Hatamizadeh, 2025, section 3.3).

The arithmetic is that of `models.layers.gated_delta_rule`. A chunk's corrections solve a unit lower triangular system
that depends on its keys alone: those inverses are made first, for all chunks at once, and a span's chunks, which
follow one another, are then left with products.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, WHOLE, Target, config_of, target_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.gated_delta import LENGTH_EPS, gates, key_heads_of, unit_rows


@triton.jit
def delta_inverse_kernel(
    convolved,  # [T, channels]: queries and keys of all key heads, values of all value heads
    ba,  # [T, key heads * 2 * GROUP]
    a_log,  # [value heads]
    dt_bias,  # [value heads]
    chunks,  # [chunks, 2] int32, first token and tokens of each
    decays,  # [chunks, value heads, CHUNK] float32, logarithms from before the chunk to behind each token
    inverses,  # [chunks, value heads, CHUNK, CHUNK] float32, times the shares
    ba_stride,
    num_heads,
    num_channels,
    KEY: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The inverse of I + L of one chunk and value head, by forward substitution. Grid: (chunks, value heads).

    L[t, j] = beta_t (k_t . k_j) times the decay from j to t. Column t of the inverse takes beta_t, which every
    right-hand side has.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks + chunk * 2), tl.load(chunks + chunk * 2 + 1)
    places, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    exists = places < count
    tokens = first + places
    decay, share = gates(ba, ba_stride, a_log, dt_bias, tokens, head, exists, GROUP)
    decay = tl.cumsum(tl.where(exists, decay, 0.0), 0)
    share = tl.where(exists, share, 0.0)
    rows = convolved + tokens[:, None].to(tl.int64) * num_channels + (num_heads + head) // GROUP * KEY
    k = unit_rows(rows + keys[None, :], exists[:, None] & (keys < KEY)[None, :], 1.0)
    overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION) * share[:, None]
    is_before = places[:, None] > places[None, :]
    # Where j is behind t the difference is positive and may overflow: it is hidden before it is raised.
    between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
    overlap = overlap * between
    inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        is_row = places == row
        of_row = tl.sum(tl.where(is_row[:, None], overlap, 0.0), 0)  # [CHUNK], nothing from `row` on
        solved = tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(is_row[:, None], inverse - solved[None, :], inverse)
    place = chunk.to(tl.int64) * num_heads + head
    tl.store(decays + place * CHUNK + places, decay)
    at = inverses + (place * CHUNK + places[:, None]) * CHUNK + places[None, :]
    tl.store(at, inverse * share[None, :])


@triton.jit
def _unit_parts(rows, exists, scale, KEY: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """As `unit_rows`, in parts of PART keys. # pointers [CHUNK, 1], [CHUNK] -> PARTS x [CHUNK, PART] float32"""
    loaded = tl.tuple(())
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        x = tl.load(rows + keys[None, :], mask=exists[:, None] & (keys < KEY)[None, :], other=0.0).to(tl.float32)
        squares = tl.sum(x * x, 1, keep_dims=True)
        if part == 0:
            length = squares
        else:
            length += squares
        loaded += (x,)
    unit = scale * tl.rsqrt(length + LENGTH_EPS)
    parts = tl.tuple(())
    for part in tl.static_range(PARTS):
        parts += (loaded[part] * unit,)
    return parts


@triton.jit(do_not_specialize_on_alignment=["slots"])  # They may begin anywhere among those of a step.
def gated_delta_span_kernel(
    convolved,  # As above
    decays,
    inverses,
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    slots,  # [rows] int64
    states,  # [slots, value heads, KEY, VALUE] float32
    out,  # [T, value heads, VALUE]
    num_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # Keys that are multiplied at a time
):
    """A span's chunks, one after the other, for a tile [KEY, VALUES] of one state that stays in registers.

    Grid: (tiles of values, value heads, rows).
    """
    PART: tl.constexpr = DEPTH if DEPTH < KEY_TILE else KEY_TILE
    PARTS: tl.constexpr = KEY_TILE // PART
    head, span = tl.program_id(1), spans + tl.program_id(2) * 4
    first, count = tl.load(span), tl.load(span + 1)
    chunk, is_new = tl.load(span + 2), tl.load(span + 3)
    places = tl.arange(0, CHUNK)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_value = values < VALUE
    key_head, key_channels = head // GROUP, num_heads // GROUP * KEY

    at_state = states + (tl.load(slots + tl.program_id(2)) * num_heads + head) * (KEY * VALUE)
    state = tl.tuple(())
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        in_state = (keys < KEY)[:, None] & has_value[None, :] & (is_new == 0)
        state += (tl.load(at_state + keys[:, None] * VALUE + values[None, :], mask=in_state, other=0.0),)
    for start in range(0, count, CHUNK):
        tokens = (first + start + places).to(tl.int64)
        exists = start + places < count
        rows = convolved + tokens[:, None] * num_channels
        k = _unit_parts(rows + key_channels + key_head * KEY, exists, 1.0, KEY, PARTS, PART)
        in_values = exists[:, None] & has_value[None, :]
        v = tl.load(rows + 2 * key_channels + head * VALUE + values[None, :], mask=in_values, other=0.0)
        place = chunk.to(tl.int64) * num_heads + head
        decay = tl.load(decays + place * CHUNK + places)
        inverse = tl.load(inverses + (place * CHUNK + places[:, None]) * CHUNK + places[None, :])

        shrunk = tl.exp(decay)[:, None]
        held = tl.zeros([CHUNK, VALUES], tl.float32)
        for part in tl.static_range(PARTS):
            held = tl.dot(k[part], state[part], held, input_precision=PRECISION)
        wanted = v.to(tl.float32) - shrunk * held
        corrections = tl.dot(inverse, tl.where(in_values, wanted, 0.0), input_precision=PRECISION)
        q = _unit_parts(rows + key_head * KEY, exists, KEY**-0.5, KEY, PARTS, PART)
        seen = places[:, None] >= places[None, :]
        between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
        overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        read = tl.zeros([CHUNK, VALUES], tl.float32)
        for part in tl.static_range(PARTS):
            overlap = tl.dot(q[part], tl.trans(k[part]), overlap, input_precision=PRECISION)
            read = tl.dot(q[part], state[part], read, input_precision=PRECISION)
        read = tl.dot(overlap * between, corrections, shrunk * read, input_precision=PRECISION)
        at = out + (tokens[:, None] * num_heads + head) * VALUE + values[None, :]
        tl.store(at, read.to(out.dtype.element_ty), mask=in_values)

        # Behind the last token the decay stays what it was there.
        to_end = tl.min(decay, 0)
        behind = tl.tuple(())
        for part in tl.static_range(PARTS):
            added = tl.trans(k[part] * tl.exp(to_end - decay)[:, None])
            behind += (tl.dot(added, corrections, state[part] * tl.exp(to_end), input_precision=PRECISION),)
        state = behind
        chunk += 1
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        in_state = (keys < KEY)[:, None] & has_value[None, :]
        tl.store(at_state + keys[:, None] * VALUE + values[None, :], state[part], mask=in_state)


def delta_spans(
    convolved: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    spans: torch.Tensor,
    chunks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Each row's tokens through its state, which is brought up to date; what queries read to `out`.

    As `delta_step`, of all the step's tokens; `slots` [rows] int64, `spans` [rows, 4] int32: first token, tokens,
    first chunk, whether it begins its sequence; `chunks` [chunks, 2] int32: first token and tokens, of `chunk_size`.
    """
    _, heads, key_dim, value_dim = states.shape
    device = convolved.device
    size = chunk_size(device)
    precision = _precision(target_of(device))
    decays = states.new_empty(len(chunks), heads, size)
    inverses = states.new_empty(len(chunks), heads, size, size)
    shape = {
        "KEY": key_dim,
        "GROUP": heads // key_heads_of(convolved, states),
        "KEY_TILE": max(16, next_power_of_2(key_dim)),
        "PRECISION": precision,
    }
    delta_inverse_kernel[(len(chunks), heads)](
        convolved,
        ba,
        a_log,
        dt_bias,
        chunks,
        decays,
        inverses,
        ba.stride(0),
        heads,
        convolved.shape[1],
        **shape,
        **launch_of("delta_inverse", device).keywords,
    )
    launch = launch_of("gated_delta_span", device)
    gated_delta_span_kernel[(cdiv(value_dim, launch.blocks["VALUES"]), heads, len(spans))](
        convolved,
        decays,
        inverses,
        spans,
        slots,
        states,
        out,
        heads,
        convolved.shape[1],
        VALUE=value_dim,
        **shape,
        **launch.keywords,
    )


def chunk_size(device: torch.device) -> int:
    """Tokens of a chunk, of which a span's last may have fewer."""
    return launch_of("gated_delta_span", device).blocks["CHUNK"]


def _precision(target: Target) -> str:
    """Of products of float32: NVIDIA's matrix units have no such, and round what goes in to 10 bits of mantissa."""
    return "tf32" if target.backend == "cuda" else "ieee"


COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant="bf16 128x128",
        target=target,
        config=config_of(name, target),
        signature={
            **dict.fromkeys(("convolved", "ba", "a_log", "dt_bias", "out"), "*bf16"),
            **dict.fromkeys(("decays", "inverses", "states"), "*fp32"),
            "chunks": "*i32",
            "spans": "*i32",
            "slots": "*i64",
            **dict.fromkeys(("ba_stride", "num_heads", "num_channels"), "i32"),
        },
        constexprs={"KEY": 128, "GROUP": 2, "KEY_TILE": 128, "PRECISION": _precision(target)}
        | ({"VALUE": 128} if name == "gated_delta_span" else {}),
        divisible=frozenset({"num_channels"}),
        large=frozenset({"states", "inverses"}),
        # NVIDIA's take it rounded.
        has_dot=target.has_float32_matrices or target.backend == "cuda",
        narrow_loads=16,
    )
    for target in TARGETS.values()
    for kernel, name in ((delta_inverse_kernel, "delta_inverse"), (gated_delta_span_kernel, "gated_delta_span"))
)
