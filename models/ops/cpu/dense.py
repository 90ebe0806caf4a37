"""Dense CPU operators over bfloat16 tensors: products with packed weights, norms, activations and embeddings.

Rows are a step's tokens; matrices may have any row stride. `PackedWeight` holds a bfloat16 weight in the kernels'
panel layout, `QuantizedWeight` a weight rounded to 8 or 4 bits, and `CodedWeight` a quantised checkpoint's codes. The
products accept all of them.
"""

from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch

from models.ops.cpu import structures
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Arguments, Step
from models.ops.memory import mapped_zeros
from models.ops.types import NormWeight
from models.ops.weight_formats import RUN, Codes, mxfp4_of

PANEL, DEPTH = 32, 32
"""The outputs and inputs of a packed weight are padded to multiples of these."""


class WeightOperators(NamedTuple):
    """The operators that read or write a kind of packed weight."""

    linear: type[Arguments]
    pack: type[Arguments]
    embed: type[Arguments] | None
    grouped_linear: type[Arguments]
    gated_linear: type[Arguments] | None = None
    expand: type[Arguments] | None = None


class PackedWeight:
    """A bfloat16 weight in the layout of the products, see linear.c. Rows may be filled in parts."""

    operators: ClassVar = WeightOperators(
        structures.Linear, structures.Pack, structures.Embed, structures.GroupedLinear, structures.GatedLinear
    )
    options: tuple[int | None, ...] = ()
    """The last arguments of the weight's operators."""

    def __init__(self, out_features: int, in_features: int, num_bytes: int | None = None) -> None:
        """`num_bytes`: size of the memory, by default that of a bfloat16 weight."""
        self.out_features, self.in_features = out_features, in_features
        if num_bytes is None:
            num_bytes = 2 * dense_elements(out_features, in_features)
        self.expected_bytes = num_bytes
        """Exact or approximate size of the memory once the weight is filled."""
        self.memory = torch.frombuffer(mapped_zeros(num_bytes), dtype=torch.bfloat16)

    @property
    def form(self) -> list[Any] | None:
        """Description of the layout of `memory`, from which `weight_of` restores the weight; None if it cannot."""
        return [_DENSE]

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Write dense rows starting at `first`. # [count, in_features]"""
        rows = rows.to(torch.bfloat16)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        arguments = self.operators.pack(
            rows.data_ptr(), rows.stride(0), first, len(rows), self.in_features, self.memory.data_ptr(), *self.options
        )
        current().run(arguments, Step(), (rows, self.memory))

    def takes(self, rows: Codes) -> bool:
        """Whether `put_codes` accepts these rows of a quantised checkpoint; otherwise they must be made dense."""
        del rows
        return False

    def put_codes(self, first: int, rows: Codes) -> None:
        """Write quantised rows, which the weight `takes`, starting at `first`. # [count, in_features]"""
        raise NotImplementedError


def dense_elements(out_features: int, in_features: int) -> int:
    """Return the number of elements of a padded dense weight."""
    return (-(-out_features // PANEL) * PANEL) * (-(-in_features // DEPTH) * DEPTH)


def _require_rows(x: torch.Tensor, weight: PackedWeight) -> None:
    """Raise `ValueError` if `x` has another width than the weight's inputs, or another dtype than bfloat16."""
    if not runs(x) or x.shape[1:] != (weight.in_features,):
        raise ValueError(f"{x.dtype} {list(x.shape)} where a product takes rows of {weight.in_features} bfloat16")


def _multiply(
    operator: type[Arguments],
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    *options: float,
) -> torch.Tensor:
    """Run a product whose structure begins with the fields of `structures.Linear`.

    # [rows, in_features] -> [rows, out_features]
    """
    _require_rows(x, weight)
    runtime = current()
    out = runtime.rows(len(x), out_features, dtype)
    arguments = operator(
        x.data_ptr(),
        x.stride(0),
        weight.memory.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        out.stride(0),
        weight.in_features,
        weight.out_features,
        dtype is torch.float32,
        *options,
        *weight.options,
    )
    step, kept = Step(num_tokens=len(x)), (x, weight.memory, bias, out)
    if weight.operators.expand is not None:
        # Scratch for the expanded weight; the system commits it only when a step has many rows.
        room = runtime.fixed(dense_elements(weight.out_features, weight.in_features), torch.bfloat16)
        arguments.expanded = room.data_ptr()
        runtime.run(weight.operators.expand.from_buffer_copy(arguments), step, kept)
        runtime.run(arguments, step, (*kept, room))
        return out
    runtime.run(arguments, step, kept)
    return out


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Compute `x @ weight.T + bias` as bfloat16 or float32. # [rows, in_features] -> [rows, out_features]"""
    return _multiply(weight.operators.linear, x, weight, bias, weight.out_features, dtype)


def gates(weight: PackedWeight) -> bool:
    """Whether `gated_linear` supports the weight."""
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
    """Compute `gated(linear(x, weight, bias), activation)`, bit for bit, for a weight that `gates` supports.

    # [rows, in_features] -> [rows, out_features / 2]
    """
    operator = weight.operators.gated_linear
    assert operator is not None
    return _multiply(operator, x, weight, bias, weight.out_features // 2, torch.bfloat16, activation, alpha, limit)


def grouped_linear(
    x: torch.Tensor,
    weights: PackedWeight,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply the first `counts[0]` rows by the stack's first weight, the next `counts[1]` by the second, and so on.

    # [rows, in_features], [groups, out_features], [groups] int64 -> [rows, out_features]

    Rows past the sum of `counts` become 0. With `tokens` [rows] int64 the inputs are `x[tokens]`.
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


def embed(input_ids: torch.Tensor, weight: PackedWeight, scale: float = 1.0, first_row: int = 0) -> torch.Tensor:
    """Look up and scale rows of a weight. # [rows] int64 -> [rows, in_features]

    `first_row`: index of the first row of this rank's shard; the result is 0 for rows of other ranks.
    """
    assert weight.operators.embed is not None, "embeddings are packed as bfloat16 or rounded"
    runtime = current()
    out = runtime.rows(len(input_ids), weight.in_features)
    arguments = weight.operators.embed(
        weight.memory.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        weight.in_features,
        scale,
        first_row,
        weight.out_features,
        *weight.options,
    )
    step = Step(num_tokens=len(input_ids), input_ids=input_ids.data_ptr())
    runtime.run(arguments, step, (input_ids, weight.memory, out))
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
    is_centred: bool = False,
    residual: torch.Tensor | None = None,
    x_scale: float = 1.0,
) -> torch.Tensor:
    """Normalise `x`, or with `residual` the sum `x_scale * x + residual`, which overwrites `residual`. See
    `NormWeight`.

    # [rows, size], or [rows, heads, size] with contiguous heads; weights [size] or [heads, size]
    """
    out = current().rows(len(x), x.shape[1:].numel()).view(x.shape)
    _norm(x, NormWeight(weight, eps, offset, bias, is_centred), residual, out, x_scale=x_scale)
    return out


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
    is_centred: bool = False,
    sum_scale: float = 1.0,
) -> torch.Tensor:
    """Set `residual` to `sum_scale * (residual + norm of x)`, and return it. # [rows, size], or [rows, heads, size]"""
    norm = NormWeight(weight, eps, offset, bias, is_centred)
    _norm(x, norm, residual, None, is_added=True, sum_scale=sum_scale)
    return residual


def add(residual: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Add `scale * x` to `residual`, and return it. # [rows, size]"""
    # Without an output no norm is computed, and its weight (here `x`) is not read.
    _norm(x, NormWeight(x, 0.0, 0.0), residual, None, x_scale=scale)
    return residual


def _norm(
    x: torch.Tensor,
    norm: NormWeight,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    is_added: bool = False,
    x_scale: float = 1.0,
    sum_scale: float = 1.0,
) -> None:
    weight, eps, offset, bias, is_centred = norm
    arguments = structures.RMSNorm(
        x.data_ptr(),
        x.stride(0),
        pointer(residual),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        pointer(bias),
        pointer(out),
        0 if out is None else out.stride(0),
        x.shape[-1],
        x.shape[1] if x.dim() == 3 else 1,
        weight.shape[1] if weight.dim() == 2 else 0,
        is_added,
        is_centred,
        offset,
        eps,
        x_scale,
        sum_scale,
    )
    current().run(arguments, Step(num_tokens=len(x)), (x, residual, weight, bias, out))


def gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 1.0, limit: float = 0.0) -> torch.Tensor:
    """Compute `activation(gate) * up` from a row's two halves. # [rows, 2 * size] -> [rows, size]

    `alpha` and `limit`: parameters of the clamped activation, see `models.ops.activation`.
    """
    gate, up = gate_up.chunk(2, dim=1)
    return activated(gate, activation, up, alpha=alpha, limit=limit)


def activated(
    gate: torch.Tensor, activation: int, up: torch.Tensor | None, *, alpha: float = 1.0, limit: float = 0.0
) -> torch.Tensor:
    """Compute `activation(gate) * up`, or without `up` only the activation. # [rows, size] each"""
    runtime = current()
    num_rows, size = gate.shape
    out = runtime.rows(num_rows, size)
    arguments = structures.Gated(
        gate.data_ptr(),
        gate.stride(0),
        pointer(up),
        0 if up is None else up.stride(0),
        out.data_ptr(),
        out.stride(0),
        size,
        runtime.per_token(num_rows),
        activation,
        alpha,
        limit,
    )
    runtime.run(arguments, Step(num_tokens=num_rows), (gate, up, out))
    return out


# Packed weights of 8 or 4 bits.

BLOCK, STEP = 128, 64
"""Number of inputs that share a scale, with 8 bits and with 4. Inputs are padded to multiples of `BLOCK`."""
_TILE = PANEL // 2
_MIDDLE_NIBBLE = 8
_MIDDLE = {4: _MIDDLE_NIBBLE, 8: 0}
"""The code of the value 0, by number of bits."""


def group_of(bits: Literal[4, 8]) -> int:
    """Return the number of inputs that share a scale in a weight of so many bits."""
    return BLOCK if bits == 8 else STEP


class QuantizedWeight(PackedWeight):
    """A weight rounded to 8 or 4 bits as it is filled, see quantized.h. Products round activations to 8 bits."""

    operators: ClassVar = WeightOperators(
        structures.QuantizedLinear,
        structures.QuantizedPack,
        structures.QuantizedEmbed,
        structures.QuantizedGroupedLinear,
        structures.QuantizedGatedLinear,
    )

    def __init__(self, out_features: int, in_features: int, bits: Literal[4, 8]) -> None:
        super().__init__(out_features, in_features, quantized_bytes(out_features, in_features, bits))
        self.bits: Literal[4, 8] = bits
        self.options = (bits,)

    @property
    def form(self) -> list[Any] | None:
        """See `PackedWeight`."""
        return [_ROUNDED, self.bits]

    def takes(self, rows: Codes) -> bool:
        """See `PackedWeight`. Only codes and scales of exactly the form that rounding produces are accepted."""
        if rows.kind != f"int{self.bits}" or rows.order is not None or rows.scales.dtype is not torch.bfloat16:
            return False
        if rows.width != group_of(self.bits) or self.in_features % rows.width or rows.lead:
            return False
        return rows.zeros is None or bool((rows.zeros == _MIDDLE[self.bits]).all())

    def put_codes(self, first: int, rows: Codes) -> None:
        """See `PackedWeight`."""
        rows = rows.unpaired()
        # Panels that the rows fill only in part keep their other rows.
        begin, end = first // PANEL, -(-(first + len(rows.codes)) // PANEL)
        values, scales = rows.codes.view(torch.int8) - _MIDDLE[self.bits], rows.scales
        if first % PANEL or len(values) % PANEL or self.in_features % BLOCK:
            whole, whole_scales = self._read(begin, end)
            some = slice(first - begin * PANEL, first - begin * PANEL + len(values))
            whole[some] = 0
            whole[some, : self.in_features], whole_scales[some, : scales.shape[1]] = values, scales
            values, scales = whole, whole_scales
        self._write(begin, end, values, scales)

    def codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rounded values and scales. # [out_features, in_features] int8, [out_features, groups] bfloat16"""
        values, scales = self._read(0, -(-self.out_features // PANEL))
        groups = -(-self.in_features // group_of(self.bits))
        return values[: self.out_features, : self.in_features], scales[: self.out_features, :groups]

    # The layout of quantized.h: [panel][block]([step, at 4 bits][output] scales, [step][tile][four][output][input]).

    def _blocks(self, begin: int, end: int) -> torch.Tensor:
        """View panels as bytes. # [panels, blocks, bytes]"""
        blocks = -(-self.in_features // BLOCK)
        return self.memory.view(torch.uint8).view(-1, blocks, quantized_bytes(PANEL, BLOCK, self.bits))[begin:end]

    def _read(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the rows of whole panels, including padding. # [rows, inputs] int8, [rows, groups] bfloat16"""
        memory = self._blocks(begin, end)
        panels, blocks, _ = memory.shape
        groups = BLOCK // group_of(self.bits)
        num_bytes = groups * PANEL * torch.bfloat16.itemsize
        scales = memory[..., :num_bytes].contiguous().view(torch.bfloat16).view(panels, blocks, groups, PANEL)
        values = memory[..., num_bytes:].contiguous()
        if self.bits == 4:
            # The low half of a byte holds an input of one group of four, the high half one of the next group.
            pairs = values.view(panels, blocks, BLOCK // STEP, 2, STEP // 8, _TILE, 4)
            values = torch.stack((pairs & 15, pairs >> 4), 5).sub_(_MIDDLE_NIBBLE)
        fours = values.view(torch.int32).view(panels, blocks, BLOCK // STEP, 2, STEP // 4, _TILE)
        in_rows = fours.permute(0, 3, 5, 1, 2, 4).reshape(panels * PANEL, -1)
        return in_rows.view(torch.int8), scales.permute(0, 3, 1, 2).reshape(panels * PANEL, -1)

    def _write(self, begin: int, end: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the rows of whole panels and blocks; inverse of `_read`."""
        memory = self._blocks(begin, end)
        panels, blocks, _ = memory.shape
        groups = BLOCK // group_of(self.bits)
        num_bytes = groups * PANEL * torch.bfloat16.itemsize
        by_group = scales.reshape(panels, PANEL, blocks, groups).permute(0, 2, 3, 1).contiguous()
        memory[..., :num_bytes] = by_group.view(torch.uint8).view(panels, blocks, num_bytes)
        in_rows = values.contiguous().view(torch.int32).view(panels, 2, _TILE, blocks, BLOCK // STEP, STEP // 4)
        fours = in_rows.permute(0, 3, 4, 1, 5, 2).contiguous().view(torch.uint8)
        if self.bits == 4:
            pairs = fours.view(panels, blocks, BLOCK // STEP, 2, STEP // 8, 2, _TILE, 4) + _MIDDLE_NIBBLE
            fours = (pairs[..., 0, :, :] & 15) | (pairs[..., 1, :, :] << 4)
        memory[..., num_bytes:] = fours.reshape(panels, blocks, -1)


# Packed weights that keep a quantised checkpoint's codes.

_CODE_KINDS = {"int4": 0, "mxfp4": 1, "int8": 2, "fp8": 3}
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
_FP8_NAN = 0x7F


class CodedWeight(PackedWeight):
    """Codes, scales and zero points of a quantised checkpoint, see codes.h. The first rows determine the form.

    Products are bit for bit those of the dequantised bfloat16 weight.
    """

    operators: ClassVar = WeightOperators(
        structures.CodedLinear,
        structures.CodedPack,
        None,
        structures.CodedGroupedLinear,
        expand=structures.ExpandCodes,
    )

    def __init__(self, out_features: int, in_features: int, *, bits: int = 8, rounds: bool = False) -> None:
        """`bits`: of a code. `rounds`: whether dense rows are rounded to MXFP4."""
        super().__init__(out_features, in_features, 2)  # The first rows determine the real size.
        self.expected_bytes = dense_elements(out_features, in_features) * bits // 8 * 9 // 8
        self.rounds = rounds
        """Whether dense rows can be written as well."""
        self._form: _Form | None = None
        self._order: torch.Tensor | None = None

    @property
    def form(self) -> list[Any] | None:
        """See `PackedWeight`."""
        if self._form is None or self._order is not None:
            return None
        kind, width, scales, groups = self._form
        return [_CODED, kind, width, str(scales).removeprefix("torch."), groups]

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Write dense rows; the weight must have `rounds`. # [count, in_features]"""
        assert self.rounds
        codes, exponents = mxfp4_of(rows)
        self.put_codes(first, Codes("mxfp4", codes, exponents, None, RUN, lambda: rows))

    def takes(self, rows: Codes) -> bool:
        """See `PackedWeight`. The rows must have the form of those written before."""
        if rows.scales.dtype not in _SCALES or not self._group_fits(rows):
            return False
        if rows.kind == "fp8" and bool((rows.codes.view(torch.uint8) & _FP8_NAN == _FP8_NAN).any()):
            return False
        if self._form is None:
            return True
        is_one_order = rows.order is None or self._order is None or torch.equal(rows.order, self._order)
        return is_one_order and (rows.order is None) == (self._order is None) and self._form == _form_of(rows)

    def put_codes(self, first: int, rows: Codes) -> None:
        """See `PackedWeight`."""
        if self._form is None:
            self.begin(_form_of(rows), rows.order)
        codes, scales = rows.codes.view(torch.uint8), rows.scales.contiguous()
        if codes.stride(1) != 1:
            codes = codes.contiguous()
        zeros = None
        if rows.zeros is not None:
            zeros = rows.zeros.contiguous()
        elif rows.kind == "int8":
            zeros = torch.zeros_like(scales, dtype=torch.int8)
        arguments = structures.CodedPack(
            codes.data_ptr(),
            codes.stride(0),
            scales.data_ptr(),
            pointer(zeros),
            first,
            len(codes),
            self.in_features,
            self.memory.data_ptr(),
            *self.options,
            rows.is_paired,
        )
        current().run(arguments, Step(), (codes, scales, zeros, self.memory))

    def dense(self) -> PackedWeight:
        """Dequantise to a bfloat16 weight; unfilled rows are 0."""
        dense = PackedWeight(self.out_features, self.in_features)
        if self._form is not None:
            columns = linear(torch.eye(self.in_features, dtype=torch.bfloat16), self)
            dense.put(0, columns.t().contiguous())
        return dense

    def _group_fits(self, rows: Codes) -> bool:
        has_one_group = rows.scales.shape[1] == 1 and rows.width >= self.in_features
        return has_one_group or (
            not rows.lead and rows.width % DEPTH == 0 and rows.scales.shape[1] == -(-self.in_features // rows.width)
        )

    def begin(self, form: "_Form", order: torch.Tensor | None = None) -> None:
        """Allocate memory for codes of that form."""
        kind, width, scales, groups = self._form = form
        inputs = -(-self.in_features // DEPTH) * DEPTH
        group = min(width, inputs) if groups > 1 else inputs
        has_zeros = kind in ("int4", "int8")
        of_group = PANEL * (scales.itemsize + has_zeros)
        bits = 4 if kind in ("int4", "mxfp4") else 8
        of_panel = groups * of_group + PANEL * inputs * bits // 8
        self.memory = torch.frombuffer(mapped_zeros(-(-self.out_features // PANEL) * of_panel), dtype=torch.uint8)
        self._order = None if order is None else order.contiguous()
        self.options = (_CODE_KINDS[kind], _SCALES[scales], group, pointer(self._order))


_Form: TypeAlias = tuple[str, int, torch.dtype, int]
"""Kind of codes, inputs per group, dtype of the scales, groups per row."""


def _form_of(rows: Codes) -> _Form:
    return rows.kind, rows.width, rows.scales.dtype, rows.scales.shape[1]


_DENSE, _ROUNDED, _CODED = "bfloat16", "rounded", "coded"


def weight_of(form: list[Any], out_features: int, in_features: int, memory: torch.Tensor) -> PackedWeight:
    """Restore a weight from its `form` and memory. Raises `ValueError` if the memory has another size."""
    kind, *options = form
    made: PackedWeight
    if kind == _DENSE:
        made = PackedWeight(out_features, in_features)
    elif kind == _ROUNDED:
        made = QuantizedWeight(out_features, in_features, options[0])
    else:
        code_kind, width, scales, groups = options
        made = coded = CodedWeight(out_features, in_features, bits=4 if code_kind in ("int4", "mxfp4") else 8)
        coded.begin((code_kind, width, getattr(torch, scales), groups))
    if made.memory.nbytes != memory.nbytes or made.memory.dtype is not memory.dtype:
        raise ValueError(f"{memory.nbytes} bytes where a weight takes {made.memory.nbytes}")
    made.memory = memory
    return made


def quantized_bytes(out_features: int, in_features: int, bits: Literal[4, 8]) -> int:
    """Return the bytes of a rounded weight's values and its bfloat16 scales."""
    outputs, inputs = -(-out_features // PANEL) * PANEL, -(-in_features // BLOCK) * BLOCK
    return outputs * inputs * bits // 8 + outputs * inputs // group_of(bits) * 2
