"""`PackedWeight`: a weight in the layout that the CPU kernels read, and its two quantised kinds.

In order: bfloat16 panels (linear.c), weights that are rounded to 8 or 4 bits as they are filled (quantized.h), and
weights that keep the codes of a quantised checkpoint (codes.h). The products of `models.ops.cpu.dense` accept all.
"""

from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch

from models.ops.cpu import structures
from models.ops.cpu.runtime import current, pointer
from models.ops.cpu.structures import Arguments, Step
from models.ops.memory import mapped_zeros
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

    def accepts(self, rows: Codes) -> bool:
        """Whether `put_codes` accepts these rows of a quantised checkpoint; otherwise they must be made dense."""
        del rows
        return False

    def put_codes(self, first: int, rows: Codes) -> None:
        """Write quantised rows, which the weight `accepts`, starting at `first`. # [count, in_features]"""
        raise NotImplementedError


def padded(features: int) -> int:
    """Return the number of outputs or inputs that a packed weight of `features` holds."""
    return -(-features // PANEL) * PANEL


def dense_elements(out_features: int, in_features: int) -> int:
    """Return the number of elements of a padded dense weight."""
    return padded(out_features) * padded(in_features)


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

    def accepts(self, rows: Codes) -> bool:
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
        # Copies: a weight of one panel and one block is contiguous as it is, and `_write` may not read its own output.
        of_scales, values = (
            part.clone(memory_format=torch.contiguous_format)
            for part in (memory[..., :num_bytes], memory[..., num_bytes:])
        )
        scales = of_scales.view(torch.bfloat16).view(panels, blocks, groups, PANEL)
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

    Zero points are stored from the first rows on that need them.

    By AMX, products are bit for bit those of the dequantised bfloat16 weight; on other paths within rounding.
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
    def is_empty(self) -> bool:
        """Whether no rows have been written, so that the form is not determined."""
        return self._form is None

    @property
    def form(self) -> list[Any] | None:
        """See `PackedWeight`."""
        if self._form is None or self._order is not None:
            return None
        kind, width, scales, groups, has_zeros = self._form
        return [_CODED, kind, width, str(scales).removeprefix("torch."), groups, has_zeros]

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Write dense rows; the weight must have `rounds`. # [count, in_features]"""
        assert self.rounds
        codes, exponents = mxfp4_of(rows)
        self.put_codes(first, Codes("mxfp4", codes, exponents, None, RUN, lambda: rows))

    def accepts(self, rows: Codes) -> bool:
        """See `PackedWeight`. The rows must have the form of those written before, except for zero points."""
        if rows.scales.dtype not in _SCALES or not self._group_fits(rows):
            return False
        if rows.kind == "fp8" and bool((rows.codes.view(torch.uint8) & _FP8_NAN == _FP8_NAN).any()):
            return False
        if self._form is None:
            return True
        is_one_order = rows.order is None or self._order is None or torch.equal(rows.order, self._order)
        is_one_form = self._form[:-1] == _form_of(rows)[:-1]
        return is_one_order and (rows.order is None) == (self._order is None) and is_one_form

    def put_codes(self, first: int, rows: Codes) -> None:
        """See `PackedWeight`."""
        if self._form is None:
            self.begin(_form_of(rows), rows.order)
        assert self._form is not None
        if not self._form[-1] and _form_of(rows)[-1]:
            self._add_zeros(self._form)
        codes, scales = rows.codes.view(torch.uint8), rows.scales.contiguous()
        if codes.stride(1) != 1:
            codes = codes.contiguous()
        zeros = None if rows.zeros is None or not self._form[-1] else rows.zeros.contiguous()
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

    def _add_zeros(self, form: "_Form") -> None:
        """Store the zero points that the rows written so far imply."""
        panels = -(-self.out_features // PANEL)
        old, size = self.memory.view(panels, -1), PANEL * form[2].itemsize
        self.begin((*form[:-1], True), self._order)
        new = self.memory.view(panels, -1)
        bits = 4 if form[0] == "int4" else 8
        of_group = size + PANEL * int(self.options[2] or 0) * bits // 8
        for group, scales in enumerate(range(0, old.shape[1], of_group)):
            zeros = scales + size
            codes, moved = old[:, zeros : scales + of_group], new[:, zeros + group * PANEL :]
            new[:, scales + group * PANEL :][:, :size] = old[:, scales:zeros]
            moved[:, :PANEL] = _ZEROS[form[0]]
            moved[:, PANEL : PANEL + codes.shape[1]] = codes

    def _group_fits(self, rows: Codes) -> bool:
        has_one_group = rows.scales.shape[1] == 1 and rows.width >= self.in_features
        return has_one_group or (
            not rows.lead and rows.width % DEPTH == 0 and rows.scales.shape[1] == -(-self.in_features // rows.width)
        )

    def begin(self, form: "_Form", order: torch.Tensor | None = None) -> None:
        """Allocate memory for codes of that form."""
        kind, width, scales, groups, has_zeros = self._form = form
        inputs = padded(self.in_features)
        group = min(width, inputs) if groups > 1 else inputs
        of_group = PANEL * (scales.itemsize + has_zeros)
        bits = 4 if kind in ("int4", "mxfp4") else 8
        of_panel = groups * of_group + PANEL * inputs * bits // 8
        self.memory = torch.frombuffer(mapped_zeros(-(-self.out_features // PANEL) * of_panel), dtype=torch.uint8)
        self._order = None if order is None else order.contiguous()
        self.options = (_CODE_KINDS[kind], _SCALES[scales], group, has_zeros, pointer(self._order))


_Form: TypeAlias = tuple[str, int, torch.dtype, int, bool]
"""Kind of codes, inputs per group, dtype of the scales, groups per row, whether zero points are stored."""
_ZEROS = {"int4": _MIDDLE[4], "int8": 0}
"""The zero point of each kind that a form without stored zero points implies."""


def _form_of(rows: Codes) -> _Form:
    has_zeros = rows.zeros is not None and bool((rows.zeros != _ZEROS[rows.kind]).any())
    return rows.kind, rows.width, rows.scales.dtype, rows.scales.shape[1], has_zeros


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
        code_kind, width, scales, groups, has_zeros = options
        made = coded = CodedWeight(out_features, in_features, bits=4 if code_kind in ("int4", "mxfp4") else 8)
        coded.begin((code_kind, width, getattr(torch, scales), groups, has_zeros))
    if made.memory.nbytes != memory.nbytes or made.memory.dtype is not memory.dtype:
        raise ValueError(f"{memory.nbytes} bytes where a weight takes {made.memory.nbytes}")
    made.memory = memory
    return made


def quantized_bytes(out_features: int, in_features: int, bits: Literal[4, 8]) -> int:
    """Return the bytes of a rounded weight's values and its bfloat16 scales."""
    outputs, inputs = padded(out_features), -(-in_features // BLOCK) * BLOCK
    return outputs * inputs * bits // 8 + outputs * inputs // group_of(bits) * 2
