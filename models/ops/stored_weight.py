"""Weights that stay quantized on a GPU: their memory, which is filled row by row, and their products.

A parameter marked by `keep_quantized` has the shape and dtype of the dense weight, but its values are in a
`StoredWeight`.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from models.ops import aiter, triton
from models.ops.aiter import operators as aiter_operators
from models.ops.weight_formats import (
    FP8_GROUP,
    RUN,
    Codes,
    FourBitWeight,
    FP8Weight,
    Int8Weight,
    MixedStack,
    QuantizedWeight,
    RoundedRows,
    Rows,
    StackOperand,
    expert_of,
    pack_nibbles,
    to_flavour,
)


class StoredForm(NamedTuple):
    """The layout of a part's codes. Parts of equal forms can be joined."""

    kind: str
    width: int
    """Number of inputs of a group."""
    groups: int
    lead: int = 0
    """Columns of zeros before the first input, which complete a group whose first inputs are another rank's."""
    trail: int = 0
    """Columns of zeros after the last input."""


class StoredPart:
    """The memory of the rows of a weight, or of the experts of a stack, that have one form, quantized or dense.

    The first rows that are written determine the form.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._form: StoredForm | None = None
        self._codes = self._scales = torch.empty(0)
        self._zeros: torch.Tensor | None = None
        self._numbers: torch.Tensor | None = None
        """The values of a dense part."""
        self._fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._has_looked_for_blocks = False

    @property
    def form(self) -> Hashable:
        """Equal for parts that can be joined; None before rows are written."""
        if self._numbers is not None:
            return "dense"
        return self._form

    @property
    def kind(self) -> str | None:
        """`fp8`, `int8`, `int4` or `mxfp4`; None if the part is dense."""
        return None if self._form is None else self._form.kind

    @property
    def rounds_rows(self) -> bool:
        """Whether a product rounds its input rows to FP8 in groups that start at the first input."""
        return self._form is not None and self._form.kind == "fp8" and not self._form.lead

    def put(self, first: int, rows: Codes, index: int | None = None) -> bool:
        """Write quantized rows starting at `first`; in a stack, of weight `index`. # [count, inputs]

        Return False if their form differs from that of earlier rows, or no kernel supports it.
        """
        rows = rows.unpaired()
        if rows.kind == "int8" and (rows.scales.shape[1] > 1 or _has_zero_points(rows)):
            return False
        rows, form = _in_whole_groups(rows)
        if self._numbers is not None or self._form not in (None, form):
            return False
        if self._form is None:
            self._begin(rows, form)
        some = slice(first, first + len(rows.codes))
        at = some if index is None else (index, some)
        codes, scales = self._as_kernels_read(rows)
        self._codes.view(torch.uint8)[at] = codes.view(torch.uint8)
        self._scales[at] = scales.to(self._scales.dtype)
        if self._zeros is not None:
            assert rows.zeros is not None
            self._zeros[at] = rows.zeros.to(self._device)
        return True

    def put_dense(self, first: int, rows: torch.Tensor) -> None:
        """Write dense rows of one weight starting at `first`, which makes the part dense. # [count, inputs]"""
        if self._numbers is None:
            self._numbers = self.dense()
            self._form, self._zeros = None, None
            self._codes = self._scales = torch.empty(0)
        self._numbers[first : first + len(rows)].copy_(rows)

    def _begin(self, rows: Codes, form: "StoredForm") -> None:
        from models.ops.triton.configs import target_of

        self._form = form
        *outputs, _ = self._shape
        inputs, groups = rows.inputs, form.groups

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(*outputs, columns, dtype=dtype, device=self._device)

        if rows.kind == "fp8":
            self._codes = empty(inputs, getattr(torch, f"float8_{target_of(self._device).fp8 or 'e4m3fn'}"))
            self._scales = empty(groups, torch.float32)
        elif rows.kind == "int8":
            self._codes, self._scales = empty(inputs, torch.int8), empty(groups, torch.float32)
        else:
            self._codes = empty(inputs // 2, torch.uint8)
            self._scales = empty(groups, torch.uint8 if rows.kind == "mxfp4" else self._dtype)
            self._zeros = empty(groups, torch.uint8) if rows.kind == "int4" else None

    def _as_kernels_read(self, rows: Codes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales in the kernels' layout, on the device."""
        codes, scales = rows.codes.to(self._device), rows.scales.to(self._device)
        if rows.kind == "int8":
            return codes, scales
        return to_flavour(codes, scales, self._codes.dtype) if rows.kind == "fp8" else (pack_nibbles(codes), scales)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, rounded: RoundedRows | None = None) -> torch.Tensor:
        """See `StoredWeight.linear`."""
        import models.ops.triton.quantized_products as kernels

        if self.kind == "fp8" and aiter.runs("linear", x) and (blocks := self.fp8_blocks()) is not None:
            return _multiply_by_aiter(x, *blocks, bias, rounded)
        operand = self.operand
        if not isinstance(operand, torch.Tensor):
            return kernels.quantized_linear(x, operand, bias, rounded)
        return dense_linear(x, operand, bias)

    def fp8_blocks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return FP8 codes and their scales by blocks of 128 x 128, or None if the weight has another form.

        # [..., outputs, inputs], [..., outputs / 128, inputs / 128] float32
        """
        if not self._has_looked_for_blocks:  # Once, since it waits for the device.
            form = self._form
            is_whole = form is not None and form.kind == "fp8" and form.width == FP8_GROUP and not form.lead
            if is_whole and self._shape[-1] % FP8_GROUP == 0:
                blocks = aiter_operators.scale_blocks(self._scales)
                self._fp8_blocks = None if blocks is None else (self._codes, blocks)
            self._has_looked_for_blocks = True
        return self._fp8_blocks

    def dense(self, at: Rows = ...) -> torch.Tensor:
        """Return the dequantized values, or those of some rows; unwritten rows are undefined."""
        if self._numbers is not None:
            return self._numbers[at]
        if self._form is None:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)[at]
        return self._quantized.part(at).dense(self._dtype)

    @property
    def operand(self) -> torch.Tensor | QuantizedWeight:
        """Return the weight in the form that kernels read."""
        return self._quantized if self._numbers is None else self._numbers

    @property
    def _quantized(self) -> QuantizedWeight:
        assert self._form is not None, "a weight is filled before it is used"
        form = self._form
        if form.kind == "fp8":
            scales = self._scales if form.width == FP8_GROUP else self._scales[..., 0]
            return FP8Weight(self._codes, scales, form.lead)
        if form.kind == "int8":
            return Int8Weight(self._codes, self._scales[..., 0])
        return FourBitWeight(self._codes, self._scales, self._zeros, form.lead, form.trail)

    def some(self, at: slice | list[int]) -> "StoredPart":
        """Return a copy of some rows or experts."""
        return self._with([self], lambda tensors: tensors[0][at].clone())

    @staticmethod
    def joined(parts: "Sequence[StoredPart]", join: Callable[[list[torch.Tensor]], torch.Tensor]) -> "StoredPart":
        """Join parts of one form; `join` is torch.cat for rows, torch.stack for experts."""
        return parts[0] if len(parts) == 1 and join is torch.cat else parts[0]._with(parts, join)

    def _with(self, parts: "Sequence[StoredPart]", make: Callable[[list[torch.Tensor]], torch.Tensor]) -> "StoredPart":
        """Return a part, each of whose tensors `make` computes from the corresponding tensors of `parts`."""

        def made(name: str) -> torch.Tensor:
            tensors = [getattr(part, name) for part in parts]
            dtype = tensors[0].dtype
            # torch's copying operators do not support every FP8 dtype, so that bytes are copied.
            return make([tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor for tensor in tensors]).view(
                dtype
            )

        shape = made("_codes" if self._numbers is None else "_numbers").shape
        found = StoredPart(torch.Size((*shape[:-1], self._shape[-1])), self._dtype, self._device)
        if self._numbers is not None:
            found._numbers = made("_numbers")
            return found
        found._form, found._codes, found._scales = self._form, made("_codes"), made("_scales")
        found._zeros = None if self._zeros is None else made("_zeros")
        return found


class StoredWeight:
    """A quantized weight, or a stack of experts' weights.

    It has one part, or several if its rows or experts have different forms: one per run of rows, or one per form of
    experts. `finish` builds the parts once all rows are written.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._main = StoredPart(shape, dtype, device)
        """The part with the form of the first quantized rows; it has the size of the whole weight."""
        self._of_main: list[range] = []
        """The rows of a weight, or experts of a stack, that were written to `_main`."""
        self._others: dict[int, StoredPart] = {}
        """Rows or experts of other forms, by the first row or the expert."""
        self.parts: tuple[StoredPart, ...] = (self._main,)
        self.rows: tuple[slice, ...] = (slice(0, shape[-2]),)
        """The outputs of each part; in a stack, those of an expert."""
        self._mixed: MixedStack | None = None

    @property
    def kind(self) -> str | None:
        """`fp8`, `int8`, `int4`, `mxfp4`, or `mixed`; None before rows are written."""
        return self.parts[0].kind if len(self.parts) == 1 else "mixed"

    def put(self, first: int, rows: torch.Tensor, codes: Codes | None, index: int | None = None) -> None:
        """Write rows starting at `first`; in a stack, of expert `index`. # [count, inputs]

        `codes`: the codes of quantized rows; None for dense rows.
        """
        if index is None:
            if codes is not None and self._main.put(first, codes):
                self._of_main.append(range(first, first + len(rows)))
                return
            other = self._others[first] = self._new_part(len(rows))
            if codes is None or not other.put(0, codes):
                other.put_dense(0, rows if codes is None else codes.dense())
            return
        known = self._others.get(index)
        is_of_main = range(index, index + 1) in self._of_main
        if known is None and codes is not None and self._main.put(first, codes, index):
            if not is_of_main:
                self._of_main.append(range(index, index + 1))
            return
        if known is None:
            known = self._others[index] = self._new_part(self._shape[-2])
            if is_of_main:
                self._of_main.remove(range(index, index + 1))
                known.put_dense(0, self._main.dense(index))
        if codes is None or not known.put(first, codes):
            known.put_dense(first, rows if codes is None else codes.dense())

    def _new_part(self, outputs: int) -> StoredPart:
        return StoredPart(torch.Size((outputs, self._shape[-1])), self._dtype, self._device)

    def finish(self) -> bool:
        """Build the parts of a filled weight. Return False if all of it is dense."""
        if self._others and len(self._shape) == 2:
            self._finish_rows()
        elif self._others:
            self._finish_stack()
        return any(part.kind is not None for part in self.parts)

    def _finish_rows(self) -> None:
        """Join adjacent rows of one form to a part."""
        found = [(first, part, part.form) for first, part in self._others.items()]
        found += [
            (rows.start, self._main.some(slice(rows.start, rows.stop)), self._main.form) for rows in self._of_main
        ]
        found.sort(key=lambda each: each[0])
        parts: list[StoredPart] = []
        rows: list[slice] = []
        for _, of_form in itertools.groupby(found, key=lambda each: each[2]):
            run = [part for _, part, _ in of_form]
            outputs = sum(part.operand.shape[0] for part in run)
            start = rows[-1].stop if rows else 0
            parts.append(StoredPart.joined(run, torch.cat))
            rows.append(slice(start, start + outputs))
        self.parts, self.rows = tuple(parts), tuple(rows)
        self._forget()

    def _finish_stack(self) -> None:
        """Join the experts of each form to a part."""
        by_form: dict[Hashable, list[int]] = {}
        for expert, part in sorted(self._others.items()):
            by_form.setdefault(part.form, []).append(expert)
        members, parts = list(by_form.values()), []
        for experts in members:
            parts.append(StoredPart.joined([self._others.pop(expert) for expert in experts], torch.stack))
        if self._of_main:
            of_main = sorted(rows.start for rows in self._of_main)
            members.insert(0, of_main)
            parts.insert(0, self._main.some(of_main))
        homes = {expert: (n, at) for n, experts in enumerate(members) for at, expert in enumerate(experts)}
        self.parts, self.rows = tuple(parts), tuple(self.rows[0] for _ in parts)
        self._forget()
        if len(parts) > 1:
            operands = tuple(part.operand for part in parts)
            by_expert = tuple(homes[expert] for expert in range(self._shape[0]))
            self._mixed = MixedStack.of(operands, by_expert, self._device)

    def _forget(self) -> None:
        self._others, self._of_main, self._main = {}, [], self.parts[0]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, rounded: RoundedRows | None = None) -> torch.Tensor:
        """Compute `x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]

        `rounded`: `x` already rounded to FP8, or None.
        """
        if x.shape[0] == 0 or triton.is_idle():
            return x.new_zeros(x.shape[0], self._shape[0])
        if len(self.parts) == 1:
            return self.parts[0].linear(x, bias, rounded)
        each = zip(self.parts, self.rows, strict=True)
        return torch.cat([part.linear(x, None if bias is None else bias[rows], rounded) for part, rows in each], 1)

    def rounding_of(self, x: torch.Tensor) -> torch.dtype | None:
        """Return the FP8 dtype to which a product rounds `x`, or None if it does not round."""
        from models.ops.triton.configs import target_of

        return target_of(x.device).fp8_dtype if any(part.rounds_rows for part in self.parts) else None

    def fp8_blocks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`StoredPart.fp8_blocks` of a weight with one part, else None."""
        return self.parts[0].fp8_blocks() if len(self.parts) == 1 else None

    def dense(self) -> torch.Tensor:
        """Return the dequantized values; unwritten rows are undefined."""
        if len(self._shape) == 2:
            return self.parts[0].dense() if len(self.parts) == 1 else torch.cat([part.dense() for part in self.parts])
        if len(self.parts) == 1 and self.kind is None:
            return self.parts[0].dense()
        # One expert is dequantized at a time, because a whole stack in float32 may exceed the memory.
        dense = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for index in range(len(dense)):
            part, at = (0, index) if self._mixed is None else self._mixed.homes[index]
            dense[index] = self.parts[part].dense(at)
        return dense

    @property
    def operand(self) -> StackOperand:
        """Return the weight in the form that kernels read. A weight with several parts by rows has no such form."""
        if self._mixed is not None:
            return self._mixed
        assert len(self.parts) == 1, "rows of several forms are multiplied part by part"
        return self.parts[0].operand

    def rows_at(self, some: slice, expert: int | None = None) -> tuple[torch.Tensor | QuantizedWeight, Rows]:
        """Return the part that contains some rows, which must be in one part, and their index in that part."""
        if expert is not None:
            operand, at = expert_of(self.operand, expert)
            return operand, (at, some)
        for part, rows in zip(self.parts, self.rows, strict=True):
            if some.start < rows.stop:
                return part.operand, slice(some.start - rows.start, some.stop - rows.start)
        raise IndexError(f"the weight has {self._shape[0]} rows, not {some.start}")


def _in_whole_groups(rows: Codes) -> tuple[Codes, StoredForm]:
    """Pad rows with columns of zeros if the first or the last group is incomplete; return them with their form.

    4-bit codes get smaller groups, with repeated scales, if that needs fewer columns.
    """
    width, lead, inputs = rows.width, rows.lead, rows.inputs
    if not rows.cuts_groups and (rows.kind in ("fp8", "int8") or inputs % (2 * RUN) == 0):
        return rows, StoredForm(rows.kind, width, rows.scales.shape[1])
    if rows.kind == "fp8":
        codes = F.pad(rows.codes.view(torch.uint8), (lead, 0)).view(rows.codes.dtype)
        return replace(rows, codes=codes, lead=0), StoredForm("fp8", width, rows.scales.shape[1], lead)
    smaller = math.gcd(width, lead, lead + inputs)
    if smaller % (2 * RUN):
        smaller = RUN
    skipped, lead = divmod(lead, smaller)
    trail = -(lead + inputs) % (2 * RUN)
    groups = (lead + inputs + trail) // smaller

    def of_smaller(each: torch.Tensor) -> torch.Tensor:
        # Padding groups have the scale of the last group; inputs have zeros there, so the scale is irrelevant.
        some = each.repeat_interleave(width // smaller, 1)[:, skipped : skipped + groups]
        return torch.cat((some, some[:, -1:].expand(-1, groups - some.shape[1])), 1)

    rows = replace(
        rows,
        codes=F.pad(rows.codes, (lead, trail)),
        scales=of_smaller(rows.scales),
        zeros=None if rows.zeros is None else of_smaller(rows.zeros),
        width=smaller,
        lead=0,
    )
    return rows, StoredForm(rows.kind, smaller, groups, lead, trail)


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `x @ weight.T + bias` by torch's library, or by a kernel whose order of sums does not depend on the
    number of rows."""
    if triton.is_invariant() and triton.runs(x, weight, operator="linear"):
        import models.ops.triton.dense_products as kernels

        return kernels.dense_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _has_zero_points(rows: Codes) -> bool:
    return rows.zeros is not None and bool(rows.zeros.any())


def _multiply_by_aiter(
    x: torch.Tensor,
    codes: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None,
    rounded: RoundedRows | None,
) -> torch.Tensor:
    from models.ops.triton.quantized_products import quantize_groups

    out = aiter_operators.fp8_linear(*(quantize_groups(x) if rounded is None else rounded), codes, blocks, x.dtype)
    return out if bias is None else out.add_(bias)


class Feed:
    """Connects a norm or activation with the only product that reads its rows. If the product needs FP8 rows, the norm
    or activation rounds them, which saves a separate rounding kernel.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._latest: tuple[torch.Tensor, RoundedRows] | None = None

    def memory(self, rows: int, size: int, like: torch.Tensor) -> RoundedRows | None:
        """Allocate memory for rounded rows on the device of `like`; None if the product does not round its input."""
        stored = stored_of(self._weight)
        dtype = None if stored is None else stored.rounding_of(like)
        return None if dtype is None else RoundedRows.empty(rows, size, dtype, like.device)

    def give(self, x: torch.Tensor, rounded: RoundedRows | None) -> None:
        """Store the rounded rows of `x` until the product takes them."""
        self._latest = None if rounded is None else (x, rounded)

    def take(self, x: torch.Tensor) -> RoundedRows | None:
        """Return and drop the stored rounded rows, if they are those of `x`."""
        latest, self._latest = self._latest, None
        return latest[1] if latest is not None and latest[0] is x else None

    def rounds(self, device: torch.device) -> bool:
        """Whether the norm or activation rounds rows on a device."""
        return self.memory(0, FP8_GROUP, torch.empty(0, device=device)) is not None


def stored_of(parameter: nn.Parameter) -> StoredWeight | None:
    """Return the `StoredWeight` of a parameter, or None if it is dense."""
    return getattr(parameter, "stored", None)


def keep_quantized(parameter: nn.Parameter) -> None:
    """Make an unfilled weight, or stack of weights, stay quantized in a `StoredWeight`."""
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    parameter.stored = StoredWeight(shape, dtype, device)  # type: ignore[attr-defined]
    parameter.data = torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)


def make_dense(parameter: nn.Parameter) -> None:
    """Dequantize a weight, or stack of weights, so that torch multiplies by it."""
    stored = stored_of(parameter)
    if stored is not None:
        parameter.data = stored.dense()
        del parameter.stored  # type: ignore[attr-defined]


def finish_stored(parameters: Iterable[nn.Parameter]) -> None:
    """Finish the stored weights of a filled model: build their parts, and make those dense that have no codes."""
    for parameter in parameters:
        stored = stored_of(parameter)
        if stored is not None and not stored.finish():
            make_dense(parameter)


def operand_of(parameter: nn.Parameter) -> StackOperand:
    """Return a weight, or stack of weights, in the form that kernels read: dense or quantized."""
    stored = stored_of(parameter)
    return parameter if stored is None else stored.operand
