"""The kernels of gated delta nets against their torch reference."""

from typing import NamedTuple

import pytest
import torch

from models.ops.triton import gated_delta as gated_delta_net
from models.ops.triton.cases import gated_delta as reference
from tests.parity.triton_interpreter import DEVICE, rdna  # noqa: F401, a fixture
from tests.sweeps import sweep

# The norm after it amplifies rounding errors of values near zero: the sum of squares shows where.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SLOTS, TAPS = 5, 4


class Rows(NamedTuple):
    """Rows of a step; the first `decodes` of them have one token each."""

    counts: list[int]
    lengths: list[int]
    decodes: int


class Heads(NamedTuple):
    """Sizes of a layer; `group` value heads share a key head."""

    key_heads: int
    group: int
    key_dim: int
    value_dim: int


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


@sweep(
    2,
    rows={
        "decodes": Rows([1, 1, 1], [9, 2, 30], 3),
        "prompts": Rows([35, 2], [35, 40], 0),
        "both": Rows([1, 1, 3, 16], [5, 8, 3, 20], 2),
        "a prompt of one token": Rows([1, 17], [1, 50], 0),
    },
    heads={"grouped": Heads(2, 2, 16, 16), "odd": Heads(3, 1, 6, 20)},
    dtype={"float32": torch.float32, "bfloat16": torch.bfloat16},
)
def test_each_rows_tokens_pass_its_state(rows: Rows, heads: Heads, dtype: torch.dtype) -> None:
    assert_as_the_reference(rows, heads, dtype)


@pytest.mark.usefixtures("rdna")
def test_keys_that_are_multiplied_in_parts() -> None:
    assert_as_the_reference(Rows([19], [40], 0), Heads(1, 1, 40, 20), torch.bfloat16)


def assert_as_the_reference(rows: Rows, sizes: Heads, dtype: torch.dtype) -> None:
    (counts, lengths, decodes), (key_heads, group, key_dim, value_dim) = rows, sizes
    tokens, heads = sum(counts), key_heads * group
    channels = 2 * key_heads * key_dim + heads * value_dim
    # Rows of both have a stride, as parts of a wider product do.
    projected = random(tokens, key_heads * 2 * (key_dim + group * value_dim) + 4, dtype=dtype)[:, :-4]
    ba = random(tokens, key_heads * 2 * group + 2, dtype=dtype)[:, :-2]
    weights = random(channels, 1, TAPS, dtype=dtype), random(heads, dtype=dtype), random(heads, dtype=dtype, seed=1)
    inputs, states = random(SLOTS, channels, TAPS - 1, dtype=dtype), random(SLOTS, heads, key_dim, value_dim) * 0.3
    slots = torch.tensor([3, 0, 4, 1][: len(counts)], device=DEVICE)
    plan = gated_delta_net.make_plan(counts, lengths, slots, decodes)
    norm = random(value_dim, dtype=dtype), 1e-6
    results = []
    for compute in (gated_delta_net.delta_net, reference.reference_delta_net):
        mine = inputs.clone(), states.clone()
        out = compute(projected, ba, *weights, norm, *mine, plan, key_heads=key_heads)
        results.append((out, *mine))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).float().norm() <= CLOSE[dtype] * expected.float().norm()


def test_chunks_of_a_prompt_leave_what_the_whole_leaves() -> None:
    key_heads, dim, length = 1, 16, 50
    projected, ba = random(length, 4 * dim), random(length, 2)
    weights, norm = (random(3 * dim, 1, TAPS), random(1), random(1)), (random(dim), 1e-6)
    slots = torch.tensor([0], device=DEVICE)

    def run(ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, states = random(1, 3 * dim, TAPS - 1), random(1, 1, dim, dim)
        parts, start = [], 0
        for end in ends:
            plan = gated_delta_net.make_plan([end - start], [end], slots, int(start > 0 and end - start == 1))
            some = projected[start:end], ba[start:end]
            parts.append(gated_delta_net.delta_net(*some, *weights, norm, inputs, states, plan, key_heads=key_heads))
            start = end
        return torch.cat(parts), states

    for found, expected in zip(run([20, 21, 22, 49, 50]), run([50]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
