"""Torch references and self-test cases of the delta rule by key and of Mamba's selective scan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from models.ops.gated_delta_rule import delta_rule_step
from models.ops.selective_scan import selective_scan_step
from models.ops.self_test import FLOAT32, Case, Exact, Finding, Problems, relative_error, rounding_bound
from models.ops.triton.cases.gated_delta import Span, spans_of
from models.ops.triton.cases.state_space import Rows
from models.ops.triton.token_scans import delta_rule, selective_scan

_ROUNDED = 2.0**-12
"""Relative error of float32 sums over the tokens of a state."""


def reference_rule(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    spans: list[Span],
    *,
    key_heads: int,
    most: float,
    bound: float = 0.0,
) -> Exact:
    """As `delta_rule`, token by token. Updates `states`. # -> [T, heads, value_dim]

    `bound`: of the logarithms of decays, see `models.ops.cpu.gated_delta.delta_rule`.
    """
    _, heads, key_dim, value_dim = states.shape
    keys, group = key_heads * key_dim, heads // key_heads
    q, k, v = torch.split(x.float(), [keys, keys, heads * value_dim], 1)
    q, k = (
        part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)
        for part in (each.view(len(x), key_heads, key_dim).repeat_interleave(group, 1) for each in (q, k))
    )
    q, v = q * key_dim**-0.5, v.view(len(x), heads, value_dim)
    raw, rates = (a.float() + dt_bias).view(len(x), heads, -1), a_log.exp()[:, None]
    decay = -bound * (rates * raw).sigmoid() if bound else (-rates * F.softplus(raw)).expand(-1, -1, key_dim)
    beta = most * b.float().sigmoid()
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


def reference_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    spans: list[Span],
) -> Exact:
    """As `selective_scan`. Updates `states`. # -> [T, channels]"""
    x, b, c = (part.float() for part in (x, b, c))
    steps, rates = F.softplus(dt.float() + dt_bias), -a_log.exp()
    value, magnitude = torch.zeros_like(x), torch.zeros_like(x)
    for slot, first, count, is_new, after in spans:
        state = states[after, None]
        state.copy_(torch.zeros_like(state) if is_new else states[slot, None])
        for token in range(first, first + count):
            at = slice(token, token + 1)
            value[at] = selective_scan_step(x[at], b[at], c[at], steps[at], rates, d, state)
            magnitude[at] = (c[at][..., None] * state).abs().sum(1) + (d * x[at]).abs()
    return Exact(value, magnitude)


@dataclass(frozen=True, slots=True)
class DeltaRuleCase(Case):
    """A delta rule after its convolution."""

    operator: ClassVar[str] = "recurrent"
    has_pool: ClassVar[bool] = True
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decays: int
    most: float
    dtype: torch.dtype
    verifies_drafts: bool = True
    """Whether steps verify drafts as well, whose states have slots of their own."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`."""
        size = self.heads * self.key_dim * self.value_dim
        for with_drafts in (False, True)[: 1 + self.verifies_drafts]:
            rows = Rows.made(problems, size, with_drafts=with_drafts)
            suffix = " that verifies drafts" if with_drafts else ""
            name = f"a delta rule of {self.heads} heads of {self.key_dim}x{self.value_dim}{suffix}"
            wide = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
            x = problems.normal(rows.num_tokens, wide, dtype=self.dtype)
            a = problems.normal(rows.num_tokens, self.heads * self.decays, dtype=self.dtype)
            b = problems.normal(rows.num_tokens, self.heads, dtype=self.dtype)
            weights = problems.normal(self.heads, scale=0.5), problems.normal(self.heads * self.decays, scale=0.5)
            states = problems.normal(rows.num_slots, self.heads, self.key_dim, self.value_dim, scale=0.3)
            pool, after = rows.pool(states)
            options = {"key_heads": self.key_heads, "most": self.most}
            found = delta_rule(x, a, b, *weights, pool, rows.large, **options)  # type: ignore[arg-type]
            exact, terms = reference_rule(
                x, a, b, *weights, states, spans_of(rows.small), key_heads=self.key_heads, most=self.most
            )
            yield from _findings(name, rows, found.view(exact.shape), exact, terms, after, states)


@dataclass(frozen=True, slots=True)
class SelectiveScanCase(Case):
    """A selective scan after its convolution."""

    operator: ClassVar[str] = "recurrent"
    has_pool: ClassVar[bool] = True
    channels: int
    state: int
    dtype: torch.dtype
    verifies_drafts: bool = True
    """Whether steps verify drafts as well, whose states have slots of their own."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`."""
        for with_drafts in (False, True)[: 1 + self.verifies_drafts]:
            rows = Rows.made(problems, self.channels * self.state, with_drafts=with_drafts)
            suffix = " that verifies drafts" if with_drafts else ""
            name = f"a selective scan of {self.channels} channels{suffix}"
            x = problems.normal(rows.num_tokens, self.channels, dtype=self.dtype)
            dt = problems.normal(rows.num_tokens, self.channels, dtype=self.dtype)
            both = problems.normal(rows.num_tokens, 2 * self.state, dtype=self.dtype)
            b, c = both.chunk(2, dim=1)
            a_log = problems.normal(self.state, self.channels, scale=0.5)
            d, dt_bias = (problems.normal(self.channels, scale=0.5) for _ in range(2))
            states = problems.normal(rows.num_slots, self.state, self.channels, scale=0.3)
            pool, after = rows.pool(states)
            found = selective_scan(x, dt, b, c, a_log, d, dt_bias, pool, rows.large)
            exact, terms = reference_scan(x, dt, b, c, a_log, d, dt_bias, states, spans_of(rows.small))
            yield from _findings(name, rows, found, exact, terms, after, states)


def _findings(
    name: str,
    rows: Rows,
    found: torch.Tensor,
    exact: torch.Tensor,
    terms: torch.Tensor,
    after: torch.Tensor,
    states: torch.Tensor,
) -> Iterator[Finding]:
    bound = (rounding_bound(found.dtype) + FLOAT32) * exact.abs() + _ROUNDED * terms
    for what, some in (("decodes", slice(0, rows.num_decoded)), ("prompts", slice(rows.num_decoded, None))):
        yield Finding(f"{what} of {name}", relative_error(found[some], exact[some], bound[some]))
    largest = states.abs().amax((-2, -1), keepdim=True).expand(states.shape)
    yield Finding(f"states of {name}", relative_error(after, states, _ROUNDED * largest))


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Kimi Linear's layer, and Falcon Mamba's."""
    del device
    return DeltaRuleCase(32, 32, 128, 128, 128, 1.0, torch.bfloat16), SelectiveScanCase(8192, 16, torch.bfloat16)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    del device
    return {
        "delta rule by key in bf16": DeltaRuleCase(2, 2, 12, 20, 12, 1.0, torch.bfloat16),
        "delta rule in fp16": DeltaRuleCase(1, 2, 16, 8, 1, 2.0, torch.float16),
        "selective scan in bf16": SelectiveScanCase(40, 5, torch.bfloat16),
        "selective scan in fp16": SelectiveScanCase(24, 16, torch.float16),
    }
