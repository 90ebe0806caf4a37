"""The CPU's operators of Mamba-2's layers and short convolutions against torch, for any division into steps."""

from typing import Any

import numpy as np
import pytest
import torch

from models.attention.backend import AttentionBatch
from models.attention.cpu_native import NativeCPUAttentionBackend
from models.layers.mamba2 import torch_gated_norm
from models.ops.cpu import gated_delta as delta_ops
from models.ops.cpu import recurrent as ops
from models.ops.scale import scale
from models.ops.triton.cases.gated_delta import Span
from models.ops.triton.cases.state_space import reference_convolution, reference_state_space
from models.ops.triton.cases.token_scans import reference_rule, reference_scan
from tests.parity.test_cpu_delta import STEPS, Spans, arrays
from tests.parity.test_cpu_operators import bf16, operators, pytestmark

__all__ = ["operators", "pytestmark"]

SLOTS = 5
LENGTHS = {4: 1, 0: 70, 2: 9}
WHOLE: Spans = [(slot, 0, n) for slot, n in LENGTHS.items()]


def run(steps: list[Spans], compute: Any, columns: int, **rows_of: torch.Tensor) -> torch.Tensor:
    """The results of `compute(step, **rows)` for all tokens, one sequence after the other. # [80, columns]"""
    starts, total = {}, 0
    for slot, n in LENGTHS.items():
        starts[slot], total = total, total + n
    out = torch.zeros(total, columns, dtype=torch.bfloat16)
    for spans in steps:
        step = NativeCPUAttentionBackend().build_metadata(AttentionBatch(**arrays(spans))).step
        ids = torch.cat([torch.arange(starts[slot] + first, starts[slot] + past) for slot, first, past in spans])
        out[ids] = compute(step, **{name: rows[ids] for name, rows in rows_of.items()})
    return out


def spans() -> list[Span]:
    pairs = zip([0, 1, 71], LENGTHS.items(), strict=True)
    return [Span(slot, first, n, is_new=True, after=slot) for first, (slot, n) in pairs]


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("channels", "taps", "has_bias", "is_gated"),
    [(64, 4, True, False), (131, 2, False, False), (40, 3, True, True), (600, 7, False, True)],
)
def test_a_short_convolution_equals_torchs_in_any_steps(
    channels: int, taps: int, has_bias: bool, is_gated: bool
) -> None:
    x, weight = bf16(80, channels), bf16(taps, channels, seed=1)
    before, after = bf16(80, channels, seed=2), bf16(80, channels, seed=3)
    bias = bf16(channels, seed=4) if has_bias else None

    def computed(steps: list[Spans]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.full(
            (SLOTS, taps - 1, channels), 3.0, dtype=torch.bfloat16
        )  # The state of an earlier sequence.

        def compute(step: Any, x: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
            gates = (before, after) if is_gated else None
            return ops.convolve(x, weight, bias, inputs, step, gates=gates, has_silu=not is_gated)

        return run(steps, compute, channels, x=x, before=before, after=after), inputs

    found, kept = computed([WHOLE])
    inputs = torch.zeros_like(kept)
    gates = (before, after) if is_gated else None
    exact, terms = reference_convolution(x, weight, bias, inputs, spans(), gates=gates, has_silu=not is_gated)
    assert ((found - exact).abs() <= 2**-8 * (exact.abs() + 2**-8 * terms) + 1e-5).all()
    assert torch.equal(kept[list(LENGTHS)], inputs[list(LENGTHS)])
    for one, other in zip((found, kept), computed(STEPS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "state", "limits"),
    [
        (4, 64, 1, 128, (0.0, float("inf"))),
        (6, 11, 3, 9, (0.1, 0.9)),
        (2, 48, 2, 16, (0.0, float("inf"))),
        (3, 20, 1, 33, (0.001, float("inf"))),
        (19, 208, 1, 5, (0.0, float("inf"))),
    ],
)
def test_a_state_space_equals_torchs_in_any_steps(
    heads: int, dim: int, groups: int, state: int, limits: tuple[float, float]
) -> None:
    x, dt = bf16(80, heads * dim + 2 * groups * state), bf16(80, heads, seed=1)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(heads, generator=generator) * 0.5 for _ in range(3)]

    def computed(steps: list[Spans]) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.full((SLOTS, heads, state, dim), 3.0)

        def compute(step: Any, x: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
            return ops.state_space(x, dt, *weights, states, step, groups=groups, limits=limits)

        return run(steps, compute, heads * dim, x=x, dt=dt), states

    found, after = computed([WHOLE])
    states = torch.zeros_like(after)
    exact = reference_state_space(x, dt, *weights, states, spans(), groups=groups, limits=limits).value.flatten(1)
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * exact.abs().max()).all()
    rows = list(LENGTHS)
    torch.testing.assert_close(after[rows], states[rows], rtol=1e-4, atol=1e-4)
    for one, other in zip((found, after), computed(STEPS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("where", ["alone", "before the norm", "after the norm"])
@pytest.mark.parametrize(("groups", "size"), [(1, 96), (3, 33)])
def test_a_gated_norm_equals_torchs(where: Any, groups: int, size: int) -> None:
    both = bf16(7, 2 * groups * size)
    x, gate = both.chunk(2, dim=1)
    weight = None if where == "alone" else bf16(groups * size, seed=1)
    found = ops.gated_norm(x, gate, weight, groups, 1e-5, is_gated_first=where == "before the norm")
    exact = torch_gated_norm(x.float(), gate.float(), weight, groups, 1e-5, where)
    torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-5)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("columns", [64, 37])
def test_rows_are_scaled_and_added(columns: int) -> None:
    x, added, by = bf16(5, columns), bf16(5, columns, seed=1), torch.rand(columns) + 0.5
    close = {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(scale(x, by).float(), x.float() * by, **close)
    torch.testing.assert_close(scale(x, 0.22).float(), x.float() * 0.22, **close)
    torch.testing.assert_close(scale(x, 0.22, added).float(), x.float() * 0.22 + added.float(), rtol=2**-7, atol=1e-3)
    assert scale(x, 1.0) is x


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dim", [32, 11])
def test_a_state_after_each_draft_is_that_of_the_tokens_one_by_one(dim: int) -> None:
    """Four tokens of which two are accepted, then the second again and three more."""
    heads, size, taps = 2, 9, 4
    wide = heads * dim + 2 * size
    x, weight, dt = bf16(8, wide), bf16(taps, wide, seed=1), bf16(8, heads, seed=2)
    weights = [torch.full((heads,), value) for value in (0.1, 0.2, 0.3)]

    def pools() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(SLOTS, taps - 1, wide, dtype=torch.bfloat16), torch.zeros(SLOTS, heads, size, dim)

    def compute(pools: tuple[torch.Tensor, torch.Tensor], first: int, past: int, slot: int, after: list[int]) -> Any:
        metadata = NativeCPUAttentionBackend().build_metadata(
            AttentionBatch(
                **arrays([(slot, first, past)]),
                states_after=np.array(after) if after else None,
                num_by_token=1 if after else 0,
            )
        )
        inputs, states = pools
        convolved = ops.convolve(x[first:past], weight, None, inputs, metadata.step, gates=None, has_silu=True)
        return ops.state_space(
            convolved, dt[first:past], *weights, states, metadata.step, groups=1, limits=(0.0, float("inf"))
        )

    plain, drafted = pools(), pools()
    expected = torch.cat([compute(plain, token, token + 1, 0, []) for token in range(6)])
    compute(drafted, 0, 1, 0, [])
    found = [compute(drafted, 1, 5, 0, [0, 1, 2, 3])[:2]]
    last = compute(drafted, 2, 6, 1, [-1, 1, 2, 3])
    assert not last[0].any()
    assert torch.equal(torch.cat([*found, last[1:]]), expected[1:])
    for one, other in zip(drafted, plain, strict=True):
        assert torch.equal(one[3], other[0])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim", "by_key", "most", "bound"),
    [
        (2, 2, 32, 32, True, 1.0, 0.0),
        (2, 4, 12, 16, False, 2.0, 0.0),
        (1, 1, 7, 48, True, 1.0, 0.0),
        (2, 2, 20, 16, True, 1.0, 5.0),
        (19, 19, 6, 144, True, 1.0, 0.0),
    ],
)
def test_a_delta_rule_equals_torchs_in_any_steps(
    key_heads: int, heads: int, key_dim: int, value_dim: int, by_key: bool, most: float, bound: float
) -> None:
    decays = key_dim if by_key else 1
    x, a = bf16(80, 2 * key_heads * key_dim + heads * value_dim), bf16(80, heads * decays, seed=1)
    b = bf16(80, heads, seed=2)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(size, generator=generator) * 0.5 for size in (heads, heads * decays)]

    def computed(steps: list[Spans]) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.full((SLOTS, heads, key_dim, value_dim), 3.0)

        def compute(step: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return delta_ops.delta_rule(x, a, b, *weights, states, step, key_heads=key_heads, most=most, bound=bound)

        return run(steps, compute, heads * value_dim, x=x, a=a, b=b), states

    found, after = computed([WHOLE])
    states = torch.zeros_like(after)
    exact, terms = reference_rule(x, a, b, *weights, states, spans(), key_heads=key_heads, most=most, bound=bound)
    assert ((found - exact.flatten(1)).abs() <= 2**-8 * exact.flatten(1).abs() + 1e-4 * terms.max()).all()
    rows = list(LENGTHS)
    torch.testing.assert_close(after[rows], states[rows], rtol=1e-4, atol=1e-4)
    for one, other in zip((found, after), computed(STEPS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("channels", "size"), [(64, 16), (131, 5), (40, 1)])
def test_a_selective_scan_equals_torchs_in_any_steps(channels: int, size: int) -> None:
    x, dt, both = bf16(80, channels), bf16(80, channels, seed=1), bf16(80, 2 * size, seed=2)
    generator = torch.Generator().manual_seed(3)
    a_log = torch.randn(size, channels, generator=generator) * 0.5
    d, dt_bias = (torch.randn(channels, generator=generator) * 0.5 for _ in range(2))

    def computed(steps: list[Spans]) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.full((SLOTS, size, channels), 3.0)

        def compute(step: Any, x: torch.Tensor, dt: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
            b, c = both.chunk(2, dim=1)
            return ops.selective_scan(x, dt, b, c, a_log, d, dt_bias, states, step)

        return run(steps, compute, channels, x=x, dt=dt, both=both), states

    found, after = computed([WHOLE])
    states, (b, c) = torch.zeros_like(after), both.chunk(2, dim=1)
    exact, terms = reference_scan(x, dt, b, c, a_log, d, dt_bias, states, spans())
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * terms.max()).all()
    rows = list(LENGTHS)
    torch.testing.assert_close(after[rows], states[rows], rtol=1e-4, atol=1e-4)
    for one, other in zip((found, after), computed(STEPS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("operators")
def test_whole_heads_are_gated() -> None:
    x, gate = bf16(5, 3 * 40).view(5, 3, 40), bf16(5, 3, seed=1)
    exact = x.float() * gate.float().sigmoid()[..., None]
    torch.testing.assert_close(delta_ops.gate_heads(x, gate).float(), exact, rtol=2**-7, atol=1e-5)
