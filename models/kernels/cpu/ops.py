"""The operators over tensors, bfloat16 on the CPU: run at once, or written down while a `Recorder` listens.

Rows are a step's tokens. Matrices may have any stride from row to row.
"""

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch

from models.host_memory import mapped_zeros
from models.kernels.cpu import library, structures
from models.kernels.cpu.library import Library, Operations
from models.kernels.cpu.structures import Arguments, Step

if TYPE_CHECKING:
    from models.attention.base import AttentionOptions, Rotation
    from models.layers.norm import HeadNorms

PANEL, DEPTH = 32, 32
"""Outputs and inputs of which a packed weight has a multiple."""


class Runtime(Protocol):
    """Where operators go."""

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for an operator's output: a row or several a token."""

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for an output that is of one size whatever the step. # [size]"""

    def per_token(self, num_rows: int) -> int:
        """Rows of such a matrix to each row that the operator's step counts."""

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        """Run an operator, or see that it is. `kept` is the memory that its arguments point to."""


class _Immediate:
    """Runs each operator when it is called."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(num_rows, columns, dtype=dtype)

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def per_token(self, num_rows: int) -> int:
        del num_rows  # An operator on its own runs as if each row were a token.
        return 1

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        del kept
        self._library.run(Operations((arguments,)), step)


_runtime: Runtime | None = None


def start(threads: int, isa: int = library.AMX) -> Library | None:
    """Have the operators run on `threads` threads from here on; None where they were not built.

    Raises `RuntimeError` where the threads cannot be made.
    """
    global _runtime
    loaded = library.load_library()
    if loaded is not None:
        loaded.start(threads, isa)
        _runtime = _Immediate(loaded)
    return loaded


def stop() -> None:
    """Have torch compute everything again."""
    global _runtime
    _runtime = None


def active() -> bool:
    """Whether the operators were started."""
    return _runtime is not None


def runs(*tensors: torch.Tensor) -> bool:
    """Whether the operators compute tensors such as these."""
    return _runtime is not None and all(
        tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and tensor.stride(-1) == 1 for tensor in tensors
    )


def redirect(runtime: Runtime) -> Runtime:
    """Send operators there from here on; where they went before."""
    global _runtime
    assert _runtime is not None, "operators are redirected after `start`"
    before, _runtime = _runtime, runtime
    return before


def current() -> Runtime:
    """Where operators go now."""
    assert _runtime is not None, "an operator is called after `start`"
    return _runtime


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The memory of an argument that may be left out."""
    return None if tensor is None else tensor.data_ptr()


class WeightOperators(NamedTuple):
    """Those that read or write a kind of packed weight."""

    linear: type[Arguments]
    pack: type[Arguments]
    embed: type[Arguments]
    grouped_linear: type[Arguments]
    gated_linear: type[Arguments] | None = None


class PackedWeight:
    """A weight as the products read it: see linear.c. Rows may be put in piece by piece."""

    operators: ClassVar = WeightOperators(
        structures.Linear, structures.Pack, structures.Embed, structures.GroupedLinear, structures.GatedLinear
    )
    options: tuple[int, ...] = ()
    """What those operators are told after their other arguments."""

    def __init__(self, out_features: int, in_features: int, num_bytes: int | None = None) -> None:
        """`num_bytes`: that it takes, where it is not bfloat16."""
        self.out_features, self.in_features = out_features, in_features
        if num_bytes is None:
            num_bytes = 2 * (-(-out_features // PANEL) * PANEL) * (-(-in_features // DEPTH) * DEPTH)
        self.memory = torch.frombuffer(mapped_zeros(num_bytes), dtype=torch.bfloat16)

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Fill rows from `first` on. # [count, in_features]"""
        rows = rows.to(torch.bfloat16)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        arguments = self.operators.pack(
            rows.data_ptr(), rows.stride(0), first, len(rows), self.in_features, self.memory.data_ptr(), *self.options
        )
        current().run(arguments, Step(), (rows, self.memory))


def _require_rows(x: torch.Tensor, weight: PackedWeight) -> None:
    """Raise `ValueError` for what a product would read past, or as other numbers than it holds."""
    if not runs(x) or x.shape[1:] != (weight.in_features,):
        raise ValueError(f"{x.dtype} {list(x.shape)} where a product takes rows of {weight.in_features} bfloat16")


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """`x @ weight.T + bias`, given as bfloat16 or float32. # [rows, in_features] -> [rows, out_features]"""
    _require_rows(x, weight)
    runtime = current()
    out = runtime.rows(len(x), weight.out_features, dtype)
    arguments = weight.operators.linear(
        x.data_ptr(),
        x.stride(0),
        weight.memory.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        out.stride(0),
        weight.in_features,
        weight.out_features,
        dtype is torch.float32,
        *weight.options,
    )
    runtime.run(arguments, Step(num_tokens=len(x)), (x, weight.memory, bias, out))
    return out


def gates(weight: PackedWeight) -> bool:
    """Whether `gated_linear` takes such a weight."""
    return weight.operators.gated_linear is not None and weight.out_features % (2 * PANEL) == 0


def gated_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: int,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """`gated(linear(x, weight, bias), activation)`, bit for bit, of a weight that `gates` is true of.

    # [rows, in_features] -> [rows, out_features / 2]
    """
    _require_rows(x, weight)
    assert weight.operators.gated_linear is not None
    runtime = current()
    out = runtime.rows(len(x), weight.out_features // 2)
    arguments = weight.operators.gated_linear(
        x.data_ptr(),
        x.stride(0),
        weight.memory.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        out.stride(0),
        weight.in_features,
        weight.out_features,
        False,
        activation,
        alpha,
        limit,
        *weight.options,
    )
    runtime.run(arguments, Step(num_tokens=len(x)), (x, weight.memory, bias, out))
    return out


def grouped_linear(
    x: torch.Tensor,
    weights: PackedWeight,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first `counts[0]` rows by the stack's first weight, the next `counts[1]` by its second ...; 0 past the last.

    # [rows, in_features], [groups, out_features], [groups] int64 -> [rows, out_features]

    With `tokens` [rows] int64 the rows are `x[tokens]`.
    """
    _require_rows(x, weights)
    runtime = current()
    groups, num_rows = len(counts), len(x if tokens is None else tokens)
    out_features = weights.out_features // groups
    out = runtime.rows(num_rows, out_features)
    arguments = weights.operators.grouped_linear(
        x.data_ptr(),
        x.stride(0),
        pointer(tokens),
        weights.memory.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        out.stride(0),
        counts.data_ptr(),
        groups,
        weights.in_features,
        out_features,
        runtime.per_token(num_rows),
        *weights.options,
    )
    runtime.run(arguments, Step(num_tokens=num_rows), (x, tokens, weights.memory, bias, counts, out))
    return out


def embed(input_ids: torch.Tensor, weight: PackedWeight, scale: float = 1.0) -> torch.Tensor:
    """Rows of a weight, scaled. # [rows] int64 -> [rows, in_features]"""
    runtime = current()
    out = runtime.rows(len(input_ids), weight.in_features)
    arguments = weight.operators.embed(
        weight.memory.data_ptr(), out.data_ptr(), out.stride(0), weight.in_features, scale, *weight.options
    )
    step = Step(num_tokens=len(input_ids), input_ids=input_ids.data_ptr())
    runtime.run(arguments, step, (input_ids, weight.memory, out))
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of `x`, or of its sum with `residual`, which then holds that sum. # [rows, size]"""
    out = current().rows(*x.shape)
    _norm(x, weight, eps, offset, residual, out)
    return out


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """`residual`, to which the norm of `x` was added. # [rows, size]"""
    _norm(x, weight, eps, offset, residual, None)
    return residual


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    arguments = structures.RMSNorm(
        x.data_ptr(),
        x.stride(0),
        pointer(residual),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        pointer(out),
        0 if out is None else out.stride(0),
        x.shape[1],
        out is None,
        offset,
        eps,
    )
    current().run(arguments, Step(num_tokens=len(x)), (x, residual, weight, out))


def gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 1.0, limit: float = 0.0) -> torch.Tensor:
    """`activation(gate) * up` of the two side by side. # [rows, 2 * size] -> [rows, size]

    `alpha` and `limit` are the clamped activation's: see `models.layers.activation`.
    """
    runtime = current()
    num_rows = len(gate_up)
    out = runtime.rows(num_rows, gate_up.shape[1] // 2)
    arguments = structures.Gated(
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        out.stride(0),
        out.shape[1],
        runtime.per_token(num_rows),
        activation,
        alpha,
        limit,
    )
    runtime.run(arguments, Step(num_tokens=num_rows), (gate_up, out))
    return out


def rope_table(positions: torch.Tensor, frequencies: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines, and sines of which the first half has its sign turned. # [rows] int64, [pairs] -> 2 x [rows, 2 * pairs]

    `frequencies` and both results are float32.
    """
    runtime = current()
    pairs = len(frequencies)
    cos, sin = (runtime.rows(len(positions), 2 * pairs, torch.float32) for _ in range(2))
    arguments = structures.RopeTable(frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), pairs, factor)
    step = Step(num_tokens=len(positions), positions=positions.data_ptr())
    runtime.run(arguments, step, (positions, frequencies, cos, sin))
    return cos, sin


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: Step,
    *,
    norms: "HeadNorms | None" = None,
    rotation: "Rotation | None" = None,
) -> None:
    """Normalise and rotate queries, in place, and keys; write keys and values to the cache.

    # q [T, heads, dim], k and v [T, kv_heads, dim], caches [blocks, kv_heads, block_size, dim]
    """
    cos, sin = (None, None) if rotation is None else rotation
    arguments = structures.RopeStore(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q.shape[1],
        k.shape[1],
        k.shape[2],
        None if norms is None else norms.q.weight.data_ptr(),
        None if norms is None else norms.k.weight.data_ptr(),
        0.0 if norms is None else norms.q.offset,
        0.0 if norms is None else norms.q.eps,
        pointer(cos),
        pointer(sin),
        0 if cos is None else cos.shape[-1],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.shape[2],
        k_cache.stride(0),
    )
    weights = () if norms is None else (norms.q.weight, norms.k.weight)
    current().run(arguments, step, (q, k, v, *weights, cos, sin, k_cache, v_cache))


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: Step,
    options: "AttentionOptions",
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to what `rope_store` wrote, this step's tokens included. # [T, heads, dim], sinks [heads] f32 -> q's"""
    runtime = current()
    num_tokens, heads, dim = q.shape
    out = runtime.rows(num_tokens, heads * dim)
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
        k_cache.shape[2],
        k_cache.stride(0),
        options.scale,
        options.sliding_window or 0,
        options.soft_cap or 0.0,
        pointer(sinks),
    )
    runtime.run(arguments, step, (q, k_cache, v_cache, sinks, out))
    return out.view(num_tokens, heads, dim)


def attends(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether `rope_store` and `attention` compute heads and caches such as these."""
    block_size, dim = k_cache.shape[2:]
    return runs(q, k_cache) and dim % DEPTH == 0 and dim <= structures.MAX_HEAD_DIM and block_size % 16 == 0


def make_step(
    *,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    input_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
) -> Step:
    """A step of these arrays, which it keeps.

    # [T] int64, [B + 1], [B], [B, max_blocks] int32, 2 x [T] int64, [B] int64
    """
    assert block_tables.is_contiguous()
    step = Step(
        len(slots),
        len(seq_lens),
        pointer(input_ids),
        pointer(positions),
        slots.data_ptr(),
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        pointer(state_slots),
    )
    step.kept = slots, query_starts, seq_lens, block_tables, input_ids, positions, state_slots
    return step
