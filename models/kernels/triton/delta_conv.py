"""The short causal convolution of a gated delta net, over each row's tokens and the last inputs of its slot.

Channels are read where the projection left them, a key head's queries, keys and values side by side, and are written
in the order of the convolution's weight: all queries, all keys, all values.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


@triton.jit
def _channels(head, columns, num_key_heads, KEY: tl.constexpr, VALUES: tl.constexpr):
    """The convolution's channels of a key head's columns. # [COLUMNS]"""
    of_keys = tl.where(columns < KEY, head * KEY + columns, num_key_heads * KEY + head * KEY + columns - KEY)
    return tl.where(columns < 2 * KEY, of_keys, 2 * num_key_heads * KEY + head * VALUES + columns - 2 * KEY)


# What differs from step to step; the slots of spans may begin anywhere among those of a step.
@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["slots"])
def delta_conv_kernel(
    projected,  # [T, num_key_heads * (2 * KEY + 2 * VALUES)]
    weight,  # [channels, 1, TAPS]
    inputs,  # [slots, channels, TAPS - 1], what came before
    slots,  # [rows] int64, -1 for a row that is none
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    token_rows,  # [T - first_token] int32; this and spans any pointers where IS_DECODE
    out,  # [T, channels]
    first_token,  # Of the rows; decodes begin at 0
    stride,  # Of projected
    slot_stride,  # Of inputs
    num_key_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,  # A key head's value heads' dimensions together
    COLUMNS: tl.constexpr,  # 2 * KEY + VALUES, filled up to a power of two
    TAPS: tl.constexpr,
    IS_DECODE: tl.constexpr,  # Every row has one token: its slot is brought up to date as well
):
    """The channels of one key head for one token. Grid: (tokens of the rows, key heads)."""
    token, head = first_token + tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < 2 * KEY + VALUES
    channels = _channels(head, columns, num_key_heads, KEY, VALUES)
    row = token
    start, is_new = token, 0
    if not IS_DECODE:
        row = tl.load(token_rows + tl.program_id(0))
        start, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 3)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    before = inputs + slot * slot_stride + channels * (TAPS - 1)
    at = projected + token.to(tl.int64) * stride + head * (2 * KEY + 2 * VALUES) + columns
    place = token - start  # Among its row's tokens
    summed = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        # An input of this step, or one of the last of the steps before.
        is_here = place >= TAPS - 1 - tap
        x = tl.load(at - (TAPS - 1 - tap) * stride, mask=exists & is_here, other=0.0)
        if tap < TAPS - 1:
            was = exists & (is_here == 0) & (is_new == 0)
            x = tl.where(is_here, x, tl.load(before + place + tap, mask=was, other=0.0).to(x.dtype))
        if IS_DECODE and tap > 0:
            tl.debug_barrier()  # A thread may hold the same channel as another, which still reads it.
            tl.store(before + tap - 1, x.to(inputs.dtype.element_ty), mask=exists)
        share = tl.load(weight + channels * TAPS + tap, mask=exists, other=0.0)
        summed += x.to(tl.float32) * share.to(tl.float32)
    summed = summed * tl.sigmoid(summed)
    tl.store(out + token.to(tl.int64) * num_channels + channels, summed.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def keep_inputs_kernel(
    projected,  # As above
    inputs,
    slots,
    spans,
    stride,
    slot_stride,
    num_key_heads,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """A row's last inputs into its slot, once every token was convolved. Grid: (rows, key heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < 2 * KEY + VALUES
    channels = _channels(head, columns, num_key_heads, KEY, VALUES)
    start, count, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 1), tl.load(spans + row * 4 + 3)
    at = projected + start.to(tl.int64) * stride + head * (2 * KEY + 2 * VALUES) + columns
    before = inputs + tl.load(slots + row) * slot_stride + channels * (TAPS - 1)
    for tap in tl.static_range(TAPS - 1):
        place = count - (TAPS - 1) + tap
        # A row of few tokens keeps some of the inputs before them; they lie behind where this tap's is written.
        x = tl.load(at + place.to(tl.int64) * stride, mask=exists & (place >= 0), other=0.0)
        was = tl.load(before + count + tap, mask=exists & (place < 0) & (is_new == 0), other=0.0)
        tl.debug_barrier()  # A thread may hold the same channel as another, which still reads it.
        tl.store(before + tap, tl.where(place >= 0, x.to(was.dtype), was), mask=exists)


def delta_conv(
    projected: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    spans: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    key_dim: int,
    key_heads: int,
    first_token: int = 0,
) -> None:
    """`silu` of the convolution of some rows' tokens, to their rows of `out`; `inputs` are brought up to date.

    # projected [T, key_heads * (2 * key_dim + 2 * values)], weight [channels, 1, taps], out [T, channels],
    # inputs [slots, channels, taps - 1], slots [rows] int64

    `spans`: the rows as `gated_delta_span.delta_spans` has them, and [T - first_token] int32, the row of each token
    from `first_token` on. None: each of the first tokens is a row of its own.
    """
    num_channels = out.shape[1]
    values = num_channels // key_heads - 2 * key_dim
    launch = launch_of("delta_conv", projected.device)
    shape = {
        "KEY": key_dim,
        "VALUES": values,
        "COLUMNS": next_power_of_2(2 * key_dim + values),
        "TAPS": weight.shape[-1],
    }
    table, token_rows = (slots, slots) if spans is None else spans
    delta_conv_kernel[(len(token_rows), key_heads)](
        projected,
        weight,
        inputs,
        slots,
        table,
        token_rows,
        out,
        first_token,
        projected.stride(0),
        inputs.stride(0),
        key_heads,
        num_channels,
        **shape,
        IS_DECODE=spans is None,
        **launch.keywords,
    )
    if spans is not None:
        keep_inputs_kernel[(len(slots), key_heads)](
            projected,
            inputs,
            slots,
            table,
            projected.stride(0),
            inputs.stride(0),
            key_heads,
            **shape,
            **launch.keywords,
        )


_SIGNATURE = {
    **dict.fromkeys(("projected", "weight", "inputs", "out"), "*bf16"),
    "slots": "*i64",
    "spans": "*i32",
    "token_rows": "*i32",
    **dict.fromkeys(("first_token", "stride", "slot_stride", "num_key_heads", "num_channels"), "i32"),
}
_SHAPE = {"KEY": 128, "VALUES": 256, "COLUMNS": 512, "TAPS": 4}
COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant=variant,
        target=target,
        config=config_of("delta_conv", target),
        signature=_SIGNATURE,
        constexprs={**_SHAPE, **more},
        divisible=frozenset({"stride", "slot_stride", "num_channels"}),
        large=frozenset({"inputs"}),
        # The weight and the slots have a channel's taps side by side: loads of neighbouring channels lie apart.
        has_wide_loads=False,
        narrow_loads=64,
    )
    for target in TARGETS.values()
    for kernel, variant, more in (
        (delta_conv_kernel, "decode 512x4", {"IS_DECODE": True}),
        (delta_conv_kernel, "spans 512x4", {"IS_DECODE": False}),
        (keep_inputs_kernel, "512x4", {}),
    )
)
