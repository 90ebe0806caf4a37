"""Torch reference and self-test case of gated delta nets."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from models.ops.gated_delta_rule import delta_rule_step
from models.ops.self_test import FLOAT32, Finding, Numbers, excess, slack, unless
from models.ops.triton.gated_delta import DeltaPlan, gated_norm, make_plan, remember

_ROUNDED = 2.0**-6
"""Of products whose operands NVIDIA's matrix units round to 10 bits, several of them one behind another."""
_ROWS = ((1, 9), (1, 30), (7, 7), (75, 90), (1, 1))
"""Tokens, and the tokens of their sequences so far: two decodes, then spans, one of more than a chunk."""
_DECODES = 2
_STEEPEST = 1.1
"""Slope of SiLU."""


class DeltaForm(NamedTuple):
    """A layer between its projections."""

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    dtype: torch.dtype
    weight_dtype: torch.dtype

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """What tokens read and what they leave: each part by what the kernels of the part before gave."""
        heads, rounded = self.key_heads * self.group, slack(self.dtype)
        parts = [self.key_dim, self.key_dim, *[self.group * self.value_dim] * 2]
        channels = self.key_heads * sum(parts[:3])
        tokens, slots = sum(count for count, _ in _ROWS), len(_ROWS) + 1
        projected = numbers.normal(tokens, self.key_heads * sum(parts), dtype=self.dtype)
        ba = numbers.normal(tokens, 2 * heads, dtype=self.dtype)
        conv = numbers.normal(channels, 1, self.taps, dtype=self.weight_dtype, scale=self.taps**-0.5)
        a_log, dt_bias = (numbers.normal(heads, dtype=self.weight_dtype, scale=0.5) for _ in range(2))
        weight = numbers.near_one(self.value_dim, dtype=self.weight_dtype)
        inputs = numbers.normal(slots, channels, self.taps - 1, dtype=self.dtype)
        states = numbers.normal(slots, heads, self.key_dim, self.value_dim, scale=0.3)
        own = numbers.order(slots)[: len(_ROWS)].to(numbers.device)
        plan = make_plan([count for count, _ in _ROWS], [length for _, length in _ROWS], own, _DECODES)
        kept_inputs, kept = inputs.clone(), states.clone()
        convolved, read = remember(
            projected, ba, conv, a_log, dt_bias, kept_inputs, kept, plan, key_heads=self.key_heads
        )
        of = f"a delta net of {heads} heads of {self.key_dim}x{self.value_dim}"

        *mixed, z = torch.split(projected.view(tokens, self.key_heads, -1), parts, -1)
        error = self._convolution(torch.cat([x.flatten(1) for x in mixed], -1), conv, inputs, own, convolved)
        yield Finding(f"the convolution of {of}", error)
        yield Finding(f"inputs that {of} keeps", unless(torch.equal(kept_inputs, inputs)))
        exact, terms = self._rule(convolved, ba, a_log, dt_bias, states, own)
        for what, some in (("decodes", slice(0, _DECODES)), ("prompts", slice(_DECODES, None))):
            bound = rounded * exact[some].abs() + _ROUNDED * terms[some]
            yield Finding(f"{what} of {of}", excess(read[some], exact[some], bound))
        largest = states.abs().amax((-2, -1), keepdim=True).expand(states.shape)
        yield Finding(f"states of {of}", excess(kept, states, _ROUNDED * largest))
        found = gated_norm(read, projected, weight, self.eps, key_dim=self.key_dim, group=self.group)
        normed = F.rms_norm(read.float(), (self.value_dim,), eps=self.eps) * weight.float()
        exact = (normed * F.silu(z.reshape(read.shape).float())).flatten(1)
        yield Finding(f"the norm of {of}", excess(found.view(exact.shape), exact, rounded * exact.abs()))

    def _convolution(
        self, mixed: torch.Tensor, conv: torch.Tensor, inputs: torch.Tensor, own: torch.Tensor, found: torch.Tensor
    ) -> float:
        """How far off it is. Leaves in `inputs` what it should leave. # [T, channels]"""
        worst, first = 0.0, 0
        for slot, (count, length) in zip(own.tolist(), _ROWS, strict=True):
            some = slice(first, first + count)
            first += count
            if count == length:
                inputs[slot] = 0
            window = torch.cat((inputs[slot], mixed[some].T), -1)
            inputs[slot] = window[:, count:]
            taps = window.float().unfold(-1, self.taps, 1) * conv.float()  # [channels, count, taps]
            exact, terms = F.silu(taps.sum(-1)).T, taps.abs().sum(-1).T
            bound = slack(self.dtype) * exact.abs() + _STEEPEST * FLOAT32 * terms
            worst = max(worst, excess(found[some], exact, bound))
        return worst

    def _rule(
        self,
        convolved: torch.Tensor,
        ba: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
        own: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What tokens read, one behind the other, and how large its terms are; `states` are brought up to date.

        # [T, value heads, value_dim] float32 each
        """
        keys, heads = self.key_heads * self.key_dim, self.key_heads * self.group
        q, k, v = torch.split(convolved.float(), [keys, keys, heads * self.value_dim], -1)
        q, k = (x.view(len(x), self.key_heads, -1).repeat_interleave(self.group, 1) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, v = q * self.key_dim**-0.5, v.view(len(v), heads, -1)
        b, a = (x.flatten(1) for x in ba.float().view(len(ba), self.key_heads, 2, self.group).unbind(2))
        decay, beta = -a_log.float().exp() * F.softplus(a + dt_bias.float()), b.sigmoid()
        exact, terms, first = torch.empty_like(v), torch.empty_like(v), 0
        for slot, (count, length) in zip(own.tolist(), _ROWS, strict=True):
            state = states[slot, None]
            if count == length:
                state.zero_()
            for token in range(first, first + count):
                at = slice(token, token + 1)
                exact[at] = delta_rule_step(q[at], k[at], v[at], decay[at], beta[at], state)
                # A state is off by a share of its largest numbers, each by itself.
                terms[at] = q[at].norm(dim=-1, keepdim=True) * state.abs().amax((-2, -1))[..., None]
            first += count
        return exact, terms


# The whole layer between its projections, one token at a time, in float32.


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
    """As the kernels' launcher."""
    _, heads, key_dim, value_dim = states.shape
    group, weight = heads // key_heads, conv[:, 0].float()
    spans = [(row, 1, False) for row in range(plan.num_decodes)]
    spans += [
        (first, count, bool(is_new))
        for first, count, _, is_new in (plan.spans.tolist() if plan.spans is not None else ())
    ]
    out = projected.new_empty(len(projected), heads, value_dim)
    sizes = [key_dim, key_dim, group * value_dim, group * value_dim]
    for slot, (first, count, is_new) in zip(plan.slots.tolist(), spans, strict=True):
        if is_new:
            inputs[slot], states[slot] = 0, 0
        for token in range(first, first + count):
            *parts, z = torch.split(projected[token].view(key_heads, -1), sizes, -1)
            window = torch.cat((inputs[slot], torch.cat([part.flatten() for part in parts])[:, None]), -1)
            inputs[slot] = window[:, 1:]
            mixed = F.silu((window.float() * weight).sum(-1)).to(projected.dtype).float()
            q, k, v = torch.split(mixed, [key_heads * key_dim, key_heads * key_dim, heads * value_dim])
            q, k = (x.view(key_heads, key_dim).repeat_interleave(group, 0) for x in (q, k))
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            b, a = torch.split(ba[token].view(key_heads, -1).float(), group, -1)
            decay = -a_log.float().exp() * F.softplus(a.flatten() + dt_bias.float())
            state = states[slot][None]
            read = delta_rule_step(
                q[None] * key_dim**-0.5, k[None], v.view(1, heads, -1), decay[None], b.flatten().sigmoid()[None], state
            )
            states[slot] = state[0]
            read = F.rms_norm(read[0].to(projected.dtype).float(), (value_dim,), eps=norm[1]).to(projected.dtype)
            gate = F.silu(z.reshape(heads, value_dim).float())
            out[token] = (norm[0].float() * read.float() * gate).to(projected.dtype)
    return out.view(len(out), -1)
