"""Torch reference and self-test case of gated delta nets."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from models.ops.gated_delta_rule import delta_rule_step
from models.ops.self_test import FLOAT32, Case, Exact, Finding, Problems, exact_match, relative_error, rounding_bound
from models.ops.triton.gated_delta import ByToken, DeltaPlan, gated_norm, make_plan, remember


class Span(NamedTuple):
    """Consecutive tokens of one sequence."""

    slot: int
    """The slot of its state."""
    first: int
    num_tokens: int
    is_new: bool
    """Whether they are the first of the sequence, whose state is then zero."""
    after: int
    """The slot of the state after them."""


def spans_of(plan: DeltaPlan) -> list[Span]:
    """The rows of a step: decodes, token by token where they verify drafts, then spans."""
    slots, spans = plan.slots.tolist(), []
    for row, slot in enumerate(slots[: plan.num_decodes]):
        if plan.by_token is None:
            spans.append(Span(slot, row, 1, False, slot))
            continue
        first, past = plan.by_token.starts[row : row + 2].tolist()
        for token, after in zip(range(first, past), plan.by_token.after[first:past].tolist(), strict=True):
            if after >= 0:
                spans.append(Span(slot, token, 1, False, after))
                slot = after
    rows = () if plan.spans is None else zip(slots[plan.num_decodes :], plan.spans.tolist(), strict=True)
    return spans + [Span(slot, first, count, bool(is_new), slot) for slot, (first, count, _, is_new) in rows]


def reference_convolution(mixed: torch.Tensor, conv: torch.Tensor, inputs: torch.Tensor, spans: list[Span]) -> Exact:
    """The convolution and SiLU; the magnitude is of the sums before SiLU. Updates `inputs`.

    # [T, channels], [channels, 1, taps], [slots, channels, taps - 1] -> [T, channels]
    """
    value = mixed.new_zeros(mixed.shape, dtype=torch.float32)
    magnitude = torch.zeros_like(value)
    for slot, first, count, is_new, after in spans:
        if is_new:
            inputs[slot] = 0
        window = torch.cat((inputs[slot], mixed[first : first + count].T), -1)
        inputs[after] = window[:, count:]
        terms = window.float().unfold(-1, conv.shape[-1], 1) * conv.float()  # [channels, count, taps]
        value[first : first + count] = F.silu(terms.sum(-1)).T
        magnitude[first : first + count] = terms.abs().sum(-1).T
    return Exact(value, magnitude)


def reference_delta_rule(
    convolved: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    spans: list[Span],
    *,
    key_heads: int,
) -> Exact:
    """What tokens read, one after the other. Updates `states`.

    # [T, channels], [T, 2 * heads], [heads], [heads], [slots, heads, K, V] -> [T, heads, V]
    """
    _, heads, key_dim, value_dim = states.shape
    keys, group = key_heads * key_dim, heads // key_heads
    q, k, v = torch.split(convolved.float(), [keys, keys, heads * value_dim], -1)
    q, k = (x.view(len(x), key_heads, -1).repeat_interleave(group, 1) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, v = q * key_dim**-0.5, v.view(len(v), heads, -1)
    b, a = (x.flatten(1) for x in ba.float().view(len(ba), key_heads, 2, group).unbind(2))
    decay, beta = -a_log.float().exp() * F.softplus(a + dt_bias.float()), b.sigmoid()
    value, magnitude = torch.zeros_like(v), torch.zeros_like(v)
    for slot, first, count, is_new, after in spans:
        state = states[after, None]
        state.copy_(torch.zeros_like(state) if is_new else states[slot, None])
        for token in range(first, first + count):
            at = slice(token, token + 1)
            value[at] = delta_rule_step(q[at], k[at], v[at], decay[at], beta[at], state)
            # A state is off by a share of its largest numbers, each by itself.
            magnitude[at] = q[at].norm(dim=-1, keepdim=True) * state.abs().amax((-2, -1))[..., None]
    return Exact(value, magnitude)


def reference_gated_norm(read: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of what heads read, gated by SiLU of `z`. # [T, heads, V] each -> [T, heads * V] float32"""
    normed = F.rms_norm(read.float(), (read.shape[-1],), eps=eps) * weight.float()
    return (normed * F.silu(z.float())).flatten(1)


def reference_delta_net(
    projected: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    inputs: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
) -> torch.Tensor:
    """As the kernels' launcher: the three parts, each rounded to the type of `projected`."""
    spans, dtype = spans_of(plan), projected.dtype
    mixed, z = split_projection(projected, states, key_heads=key_heads)
    convolved = reference_convolution(mixed, conv, inputs, spans).value.to(dtype)
    read = reference_delta_rule(convolved, ba, a_log, dt_bias, states, spans, key_heads=key_heads).value.to(dtype)
    return reference_gated_norm(read, z, *norm).to(dtype)


def split_projection(
    projected: torch.Tensor, states: torch.Tensor, *, key_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the convolution, in the order of its weight, and gates. # -> [T, channels], [T, heads, V]"""
    _, heads, key_dim, value_dim = states.shape
    wide = heads // key_heads * value_dim
    by_head = projected.view(len(projected), key_heads, -1)
    *mixed, z = torch.split(by_head, [key_dim, key_dim, wide, wide], -1)
    return torch.cat([x.flatten(1) for x in mixed], -1), z.reshape(len(projected), heads, value_dim)


_ROUNDED = 2.0**-6
"""Of products whose operands NVIDIA's matrix units round to 10 bits, several products in sequence."""
_ROWS = ((1, 9), (1, 30), (7, 7), (75, 90), (1, 1))
"""Tokens, and the tokens of their sequences so far: two decodes, then spans, one of more than a chunk."""
_DECODES = 2
_DRAFTS = ((3, 9), (4, 30), (1, 8), (5, 20))
"""The same with two decodes that verify drafts, the second of which computes its first token again."""
_STEEPEST = 1.1
"""The largest slope of SiLU."""


@dataclass(frozen=True, slots=True)
class DeltaCase(Case):
    """A layer between its projections."""

    operator: ClassVar[str] = "recurrent"
    has_pool: ClassVar[bool] = True
    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    dtype: torch.dtype
    weight_dtype: torch.dtype
    verifies_drafts: bool = True
    """Whether steps verify drafts as well, whose states have slots of their own."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: each part is computed from what the kernels of the part before gave."""
        yield from self._of_rows(problems, _ROWS, _DECODES, "")
        if self.verifies_drafts:
            yield from self._of_rows(problems, _DRAFTS, 3, " that verifies drafts")

    def _of_rows(
        self, problems: Problems, rows: tuple[tuple[int, int], ...], num_decodes: int, suffix: str
    ) -> Iterator[Finding]:
        heads, share = self.key_heads * self.group, rounding_bound(self.dtype)
        channels = self.key_heads * (2 * self.key_dim + self.group * self.value_dim)
        by_token = suffix != ""
        counts = [count for count, _ in rows]
        # States after drafts have slots of their own.
        tokens = sum(counts)
        slots = len(rows) + 1 + by_token * tokens
        projected = problems.normal(tokens, channels + heads * self.value_dim, dtype=self.dtype)
        ba = problems.normal(tokens, 2 * heads, dtype=self.dtype)
        conv = problems.normal(channels, 1, self.taps, dtype=self.weight_dtype, scale=self.taps**-0.5)
        a_log, dt_bias = (problems.normal(heads, dtype=self.weight_dtype, scale=0.5) for _ in range(2))
        weight = problems.near_one(self.value_dim, dtype=self.weight_dtype)
        inputs = problems.normal(slots, channels, self.taps - 1, dtype=self.dtype)
        states = problems.normal(slots, heads, self.key_dim, self.value_dim, scale=0.3)
        shuffled = problems.permutation(slots).to(problems.device)
        own = shuffled[: len(rows)]
        where = None
        if by_token:
            after = shuffled[len(rows) + 1 :].clone()
            after[0], after[counts[0]], after[counts[0] + 1] = own[0], -1, own[1]
            starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=problems.device)
            where = ByToken(starts, after)
        first = problems.first_slot(states[0].numel())
        kept, held = (each.new_empty(first + slots, *each.shape[1:]) for each in (inputs, states))
        new_inputs, new_states = kept[first:], held[first:]
        new_inputs.copy_(inputs)
        new_states.copy_(states)
        lengths = [length for _, length in rows]
        moved = None
        if where is not None:
            moved = where._replace(after=torch.where(where.after < 0, where.after, where.after + first))
        plan = make_plan(counts, lengths, own + first, num_decodes, moved)
        convolved, read = remember(projected, ba, conv, a_log, dt_bias, kept, held, plan, key_heads=self.key_heads)
        plan = make_plan(counts, lengths, own, num_decodes, where)
        name, spans = f"a delta net of {heads} heads of {self.key_dim}x{self.value_dim}{suffix}", spans_of(plan)

        mixed, z = split_projection(projected, states, key_heads=self.key_heads)
        exact, terms = reference_convolution(mixed, conv, inputs, spans)
        bound = share * exact.abs() + _STEEPEST * FLOAT32 * terms
        yield Finding(f"the convolution of {name}", relative_error(convolved, exact, bound))
        yield Finding(f"the inputs kept by {name}", exact_match(torch.equal(new_inputs, inputs)))
        exact, terms = reference_delta_rule(convolved, ba, a_log, dt_bias, states, spans, key_heads=self.key_heads)
        bound = share * exact.abs() + _ROUNDED * terms
        first = sum(counts[:num_decodes])
        for what, some in (("decodes", slice(0, first)), ("prompts", slice(first, None))):
            yield Finding(f"{what} of {name}", relative_error(read[some], exact[some], bound[some]))
        largest = states.abs().amax((-2, -1), keepdim=True).expand(states.shape)
        yield Finding(f"states of {name}", relative_error(new_states, states, _ROUNDED * largest))
        found = gated_norm(read, projected, weight, self.eps, key_dim=self.key_dim, group=self.group)
        exact = reference_gated_norm(read, z, weight, self.eps)
        yield Finding(f"the norm of {name}", relative_error(found.view(exact.shape), exact, share * exact.abs()))


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Sixteen key heads of 128."""
    del device
    return (DeltaCase(16, 2, 128, 128, 4, 1e-6, torch.bfloat16, torch.bfloat16),)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    del device
    return {
        "delta net in bf16": DeltaCase(1, 2, 12, 16, 4, 1e-6, torch.bfloat16, torch.bfloat16),
        "delta net in fp16": DeltaCase(2, 1, 16, 8, 3, 1e-6, torch.float16, torch.float32),
    }
