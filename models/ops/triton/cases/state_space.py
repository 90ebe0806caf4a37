"""Torch references and self-test cases of short convolutions, Mamba-2's state space and its norm."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from models.ops.self_test import FLOAT32, Case, Exact, Finding, Problems, exact_match, relative_error, rounding_bound
from models.ops.state_space import state_space_step
from models.ops.triton.cases.gated_delta import Span, spans_of
from models.ops.triton.gated_delta import ByToken, DeltaPlan, make_plan
from models.ops.triton.state_space import convolve, group_norm, state_space

_ROUNDED = 2.0**-6
"""Of products whose operands NVIDIA's matrix units round to 10 bits, several products in sequence."""
_ROWS = ((1, 9), (1, 30), (7, 7), (75, 90), (1, 1))
"""Tokens, and the tokens of their sequences so far: two decodes, then spans, one of more than a chunk."""
_DRAFTS = ((3, 9), (4, 30), (1, 8), (5, 20))
"""The same with three decodes that verify drafts, the second of which computes its first token again."""
_STEEPEST = 1.1
"""The largest slope of SiLU."""


def reference_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    spans: list[Span],
    *,
    gates: tuple[torch.Tensor, torch.Tensor] | None,
    has_silu: bool,
) -> Exact:
    """As `convolve`; the magnitude is of the sums before SiLU. Updates `inputs`."""
    x = x if gates is None else (x.float() * gates[0].float()).to(x.dtype)
    value = x.new_zeros(x.shape, dtype=torch.float32)
    magnitude = torch.zeros_like(value)
    for slot, first, count, is_new, after in spans:
        if is_new:
            inputs[slot] = 0
        window = torch.cat((inputs[slot], x[first : first + count]))  # [taps - 1 + count, channels]
        inputs[after] = window[count:]
        terms = window.float().unfold(0, len(weight), 1) * weight.float().T  # [count, channels, taps]
        summed, size = terms.sum(-1), terms.abs().sum(-1)
        if bias is not None:
            summed, size = summed + bias.float(), size + bias.float().abs()
        value[first : first + count] = F.silu(summed) if has_silu else summed
        magnitude[first : first + count] = size
    if gates is not None:
        value, magnitude = value * gates[1].float(), magnitude * gates[1].float().abs()
    return Exact(value, magnitude)


def reference_state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    spans: list[Span],
    *,
    groups: int,
    limits: tuple[float, float],
) -> Exact:
    """As `state_space`, token by token. Updates `states`. # -> [T, heads, dim]"""
    _, heads, key_dim, dim = states.shape
    values, b, c = torch.split(x.float(), [heads * dim, groups * key_dim, groups * key_dim], -1)
    values = values.view(len(x), heads, dim)
    b, c = (part.reshape(len(x), groups, key_dim) for part in (b, c))
    steps, a = F.softplus(dt.float() + dt_bias).clamp(*limits), -a_log.exp()
    value, magnitude = torch.zeros_like(values), torch.zeros_like(values)
    for slot, first, count, is_new, after in spans:
        state = states[after, None]
        state.copy_(torch.zeros_like(state) if is_new else states[slot, None])
        for token in range(first, first + count):
            at = slice(token, token + 1)
            value[at] = state_space_step(values[at], b[at], c[at], steps[at], a, d, state)
            # A state is off by a share of its largest numbers, each by itself.
            lengths = c[at].norm(dim=-1).repeat_interleave(heads // groups, 1)
            magnitude[at] = (lengths * state.abs().amax((-2, -1)))[..., None] + (d[:, None] * values[at]).abs()
    return Exact(value, magnitude)


def reference_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float, *, is_gated_first: bool
) -> torch.Tensor:
    """As `group_norm`, in float32."""
    exact, open_gate = x.float(), F.silu(gate.float())
    if weight is None:
        return exact * open_gate
    if is_gated_first:
        exact = exact * open_gate
    by_group = exact.view(len(x), groups, -1)
    normed = F.rms_norm(by_group, by_group.shape[-1:], eps=eps).view(x.shape) * weight.float()
    return normed if is_gated_first else normed * open_gate


class Rows(NamedTuple):
    """Rows of a step: their plan over a small pool of slots, and over the slots of a pool that may be large."""

    num_tokens: int
    num_slots: int
    """Of the small pool."""
    first_slot: int
    """Of the large pool, in which the small one follows."""
    num_decoded: int
    """Tokens of the rows that go token by token."""
    small: DeltaPlan
    large: DeltaPlan

    @classmethod
    def made(cls, problems: Problems, size: int, *, with_drafts: bool) -> "Rows":
        """`size`: elements of a slot."""
        rows, num_decodes = (_DRAFTS, 3) if with_drafts else (_ROWS, 2)
        counts, lengths = [count for count, _ in rows], [length for _, length in rows]
        tokens = sum(counts)
        # States after drafts have slots of their own.
        slots = len(rows) + 1 + with_drafts * tokens
        shuffled, first = problems.permutation(slots).to(problems.device), problems.first_slot(size)
        own = shuffled[: len(rows)]
        where = moved = None
        if with_drafts:
            after = shuffled[len(rows) + 1 :].clone()
            after[0], after[counts[0]], after[counts[0] + 1] = own[0], -1, own[1]
            starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=problems.device)
            where = ByToken(starts, after)
            moved = where._replace(after=torch.where(after < 0, after, after + first))
        small = make_plan(counts, lengths, own, num_decodes, where)
        large = make_plan(counts, lengths, own + first, num_decodes, moved)
        return cls(tokens, slots, first, sum(counts[:num_decodes]), small, large)

    def pool(self, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The large pool with a copy of the small one, and the view of that copy."""
        pool = small.new_empty(self.first_slot + self.num_slots, *small.shape[1:])
        view = pool[self.first_slot :]
        view.copy_(small)
        return pool, view


@dataclass(frozen=True, slots=True)
class ShortConvCase(Case):
    """A short convolution, with gates, with SiLU, or with neither."""

    operator: ClassVar[str] = "recurrent"
    has_pool: ClassVar[bool] = True
    channels: int
    taps: int
    has_bias: bool
    dtype: torch.dtype
    is_gated: bool = True
    has_silu: bool = False
    row: int = 0
    """Features of the product of which the channels are a part; 0: gates and inputs, as many of each."""
    first: int = 0
    """The first channel among them."""
    verifies_drafts: bool = True
    """Whether steps verify drafts as well, whose states have slots of their own."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`."""
        size = (self.taps - 1) * self.channels
        for with_drafts in (False, True)[: 1 + self.verifies_drafts]:
            rows = Rows.made(problems, size, with_drafts=with_drafts)
            suffix = " that verifies drafts" if with_drafts else ""
            yield from self._of_rows(problems, rows, f"a short convolution of {self.channels} channels{suffix}")

    def _of_rows(self, problems: Problems, rows: Rows, name: str) -> Iterator[Finding]:
        # The parts of one product.
        product = problems.normal(rows.num_tokens, self.row or 3 * self.channels, dtype=self.dtype)
        x, gates = product[:, self.first : self.first + self.channels], None
        if self.is_gated:
            before, after, x = product.chunk(3, dim=1)
            gates = before, after
        weight = problems.normal(self.taps, self.channels, dtype=self.dtype, scale=self.taps**-0.5)
        bias = problems.normal(self.channels, dtype=self.dtype) if self.has_bias else None
        inputs = problems.normal(rows.num_slots, self.taps - 1, self.channels, dtype=self.dtype)
        pool, kept = rows.pool(inputs)
        found = convolve(x, weight, bias, pool, rows.large, gates=gates, has_silu=self.has_silu)
        exact, terms = reference_convolution(
            x, weight, bias, inputs, spans_of(rows.small), gates=gates, has_silu=self.has_silu
        )
        share = rounding_bound(self.dtype)
        # Gated inputs are rounded before they are convolved and kept.
        bound = share * exact.abs() + _STEEPEST * (share if self.is_gated else FLOAT32) * terms
        yield Finding(name, relative_error(found, exact, bound))
        error = (
            relative_error(kept, inputs, share * inputs.abs())
            if self.is_gated
            else exact_match(torch.equal(kept, inputs))
        )
        yield Finding(f"the inputs kept by {name}", error)


@dataclass(frozen=True, slots=True)
class Mamba2Case(Case):
    """A Mamba-2 layer between its projections: convolution, state space and norm, each from random inputs."""

    operator: ClassVar[str] = "recurrent"
    has_pool: ClassVar[bool] = True
    heads: int
    dim: int
    groups: int
    state: int
    taps: int
    """Taps of the convolution; 0: there is none."""
    has_bias: bool
    has_silu: bool
    """Whether SiLU follows the convolution."""
    gate: str
    """Where gates are, as `models.layers.mamba2.Gate` says; "none": there are neither gates nor a norm."""
    eps: float
    limits: tuple[float, float]
    dtype: torch.dtype
    verifies_drafts: bool = True
    """Whether steps verify drafts as well, whose states have slots of their own."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`."""
        inner, wide = self.heads * self.dim, self.heads * self.dim + 2 * self.groups * self.state
        row = inner + wide + self.heads
        convolution = ShortConvCase(
            wide,
            self.taps,
            self.has_bias,
            self.dtype,
            is_gated=False,
            has_silu=self.has_silu,
            row=row,
            first=inner,
            verifies_drafts=self.verifies_drafts,
        )
        if self.taps:
            yield from convolution.compare(problems)
        size = self.heads * self.state * self.dim
        for with_drafts in (False, True)[: 1 + self.verifies_drafts]:
            rows = Rows.made(problems, size, with_drafts=with_drafts)
            suffix = " that verifies drafts" if with_drafts else ""
            name = f"a state space of {self.heads} heads of {self.state}x{self.dim}{suffix}"
            yield from self._of_rows(problems, rows, name)
        if self.gate != "none":
            yield from GatedNormCase(inner, self.groups, self.gate, self.eps, self.dtype, row).compare(problems)

    def _of_rows(self, problems: Problems, rows: Rows, name: str) -> Iterator[Finding]:
        inner, wide = self.heads * self.dim, self.heads * self.dim + 2 * self.groups * self.state
        share = rounding_bound(self.dtype)
        x = problems.normal(rows.num_tokens, wide, dtype=self.dtype, scale=0.5)
        product = problems.normal(rows.num_tokens, inner + wide + self.heads, dtype=self.dtype)
        dt = product[:, inner + wide :]
        if self.gate == "none":
            # What MiniMax passes, whose time steps are all 1.
            dt = x[:, : self.heads]
        a_log, d, dt_bias = (problems.normal(self.heads, scale=0.5) for _ in range(3))
        states = problems.normal(rows.num_slots, self.heads, self.state, self.dim, scale=0.3)
        pool, after = rows.pool(states)
        groups, limits = self.groups, self.limits
        read = state_space(x, dt, a_log, d, dt_bias, pool, rows.large, groups=groups, limits=limits)
        exact, terms = reference_state_space(
            x, dt, a_log, d, dt_bias, states, spans_of(rows.small), groups=groups, limits=limits
        )
        bound, found, first = share * exact.abs() + _ROUNDED * terms, read.view(exact.shape), rows.num_decoded
        for what, some in (("decodes", slice(0, first)), ("prompts", slice(first, None))):
            yield Finding(f"{what} of {name}", relative_error(found[some], exact[some], bound[some]))
        largest = states.abs().amax((-2, -1), keepdim=True).expand(states.shape)
        yield Finding(f"states of {name}", relative_error(after, states, _ROUNDED * largest))


@dataclass(frozen=True, slots=True)
class GatedNormCase(Case):
    """A gate of what a layer reads from its states, with a norm or alone."""

    operator: ClassVar[str] = "recurrent"
    features: int
    groups: int
    gate: str
    """As in `Mamba2Case`, but not "none"."""
    eps: float
    dtype: torch.dtype
    row: int
    """Features of the product of which the gates are a part."""
    first: int = 0
    """The first gate among them."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`."""
        tokens = sum(count for count, _ in _ROWS)
        gate = problems.normal(tokens, self.row, dtype=self.dtype)[:, self.first : self.first + self.features]
        read = problems.normal(tokens, self.features, dtype=self.dtype)
        weight = None if self.gate == "alone" else problems.near_one(self.features, dtype=self.dtype)
        groups, eps, is_first = self.groups, self.eps, self.gate == "before the norm"
        normed = group_norm(read, gate, weight, groups, eps, is_gated_first=is_first)
        exact = reference_norm(read, gate, weight, groups, eps, is_gated_first=is_first)
        error = relative_error(normed, exact, (rounding_bound(self.dtype) + FLOAT32) * exact.abs())
        yield Finding(f"a gated norm of {self.features}", error)


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Granite 4's layer, and LFM2's."""
    del device
    mamba = Mamba2Case(48, 64, 1, 128, 4, True, True, "before the norm", 1e-5, (0.0, float("inf")), torch.bfloat16)
    return mamba, ShortConvCase(2048, 3, has_bias=False, dtype=torch.bfloat16)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    del device
    sizes = {"taps": 4, "has_bias": True, "eps": 1e-5}
    return {
        "Mamba-2 in bf16": Mamba2Case(
            heads=4,
            dim=20,
            groups=2,
            state=24,
            has_silu=True,
            gate="before the norm",
            limits=(0.0, float("inf")),
            dtype=torch.bfloat16,
            **sizes,  # type: ignore[arg-type]
        ),
        "Mamba-2 in fp16": Mamba2Case(
            heads=2,
            dim=16,
            groups=1,
            state=16,
            has_silu=False,
            gate="after the norm",
            limits=(0.2, 1.0),
            dtype=torch.float16,
            **sizes,  # type: ignore[arg-type]
        ),
        "short convolution in bf16": ShortConvCase(40, 3, has_bias=True, dtype=torch.bfloat16),
        "a gate alone in fp16": GatedNormCase(40, 1, "alone", 0.0, torch.float16, row=80, first=40),
    }
