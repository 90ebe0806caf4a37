"""The CPU's operators of Qwen3-Next's layers against torch, for every instruction set of this processor."""

from typing import Any

import numpy as np
import pytest
import torch

from models.attention.backend import AttentionBatch
from models.attention.cpu import CPUAttentionBackend
from models.attention.cpu_native import NativeCPUAttentionBackend
from models.layers.gated_delta_net import GatedDeltaNet
from models.ops.cpu import gated_delta as delta_ops
from models.ops.types import StateCache
from models.parallel.tensor_parallel import SINGLE_RANK
from tests.parity.test_cpu_operators import bf16, operators, pytestmark

__all__ = ["operators", "pytestmark"]

Spans = list[tuple[int, int, int]]
Inputs = dict[int, tuple[torch.Tensor, torch.Tensor]]
_SLOTS = 5
STEPS: list[Spans] = [
    [(0, 0, 1), (2, 0, 4)],
    [(2, 4, 5), (4, 0, 1), (0, 1, 64)],
    [(0, 64, 69), (2, 5, 8)],
    [(0, 69, 70), (2, 8, 9)],
]
"""Sequences of 1, 70 and 9 tokens in prompts, chunks and, last, a decode, in which a task has several heads."""


def layer(key_heads: int, group: int, key_dim: int, value_dim: int, kernel: int) -> GatedDeltaNet:
    made = GatedDeltaNet(
        "layer",
        32,
        num_key_heads=key_heads,
        num_value_heads=key_heads * group,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel_size=kernel,
        eps=1e-6,
        parallel=SINGLE_RANK,
    ).bfloat16()
    for seed, parameter in enumerate(made.parameters()):
        parameter.data.copy_(bf16(*parameter.shape, seed=seed, scale=0.7))
    return made


def arrays(spans: Spans) -> dict[str, Any]:
    """A step of `(slot, first, past)` rows, for layers without a cache of keys and values."""
    return {
        "query_lens": np.array([past - first for _, first, past in spans]),
        "seq_lens": np.array([past for _, _, past in spans]),
        "block_tables": np.zeros((len(spans), 1), np.int32),
        "slot_mapping": np.zeros(sum(past - first for _, first, past in spans), np.int64),
        "states": np.array([slot for slot, _, _ in spans]),
        "num_decodes": 0,
    }


def cache_of(made: GatedDeltaNet, dtype: torch.dtype) -> StateCache:
    """The slots contain the state of an earlier sequence."""
    return StateCache(
        tuple(
            torch.full((_SLOTS, *shape), 3.0, dtype=of or dtype)
            for shape, of in zip(made.cache_spec.shapes, made.cache_spec.dtypes, strict=True)
        )
    )


def read(made: GatedDeltaNet, steps: list[Spans], inputs: Inputs) -> list[torch.Tensor]:
    """By sequence, the operators' results for its tokens in these steps."""
    cache = cache_of(made, torch.bfloat16)
    out: dict[int, list[torch.Tensor]] = {slot: [] for slot in inputs}
    for spans in steps:
        metadata = NativeCPUAttentionBackend().build_metadata(AttentionBatch(**arrays(spans)))
        x, ba = (torch.cat([inputs[slot][side][first:past] for slot, first, past in spans]) for side in range(2))
        found = delta_ops.delta_net(
            x,
            ba,
            made.conv1d.weight,
            made.A_log,
            made.dt_bias,
            (made.norm.weight, made.norm.eps),
            *cache.tensors,
            metadata.step,
            key_heads=made.num_key_heads,
        )
        for (slot, _, _), part in zip(spans, found.split([past - first for _, first, past in spans]), strict=True):
            out[slot].append(part)
    return [torch.cat(parts) for parts in out.values()]


def random_inputs(made: GatedDeltaNet, lengths: dict[int, int]) -> Inputs:
    return {
        slot: (bf16(n, len(made.in_proj_qkvz.weight), seed=slot), bf16(n, len(made.in_proj_ba.weight), seed=slot + 9))
        for slot, n in lengths.items()
    }


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("key_heads", "group", "key_dim", "value_dim", "kernel"),
    [(2, 2, 12, 16, 4), (1, 1, 128, 128, 4), (3, 4, 5, 80, 6), (4, 1, 33, 48, 2), (19, 1, 6, 144, 4)],
)
def test_a_delta_net_equals_torchs_in_any_steps(
    key_heads: int, group: int, key_dim: int, value_dim: int, kernel: int
) -> None:
    made = layer(key_heads, group, key_dim, value_dim, kernel)
    lengths = {4: 1, 0: 70, 2: 9}
    inputs = random_inputs(made, lengths)
    whole: Spans = [(slot, 0, n) for slot, n in lengths.items()]
    with torch.inference_mode():
        found = read(made, [whole], inputs)
        metadata = CPUAttentionBackend().build_metadata(AttentionBatch(**arrays(whole)))
        both = [torch.cat([inputs[slot][side] for slot in lengths]).float() for side in range(2)]
        expected = made.float()._forward_torch(*both, cache_of(made, torch.float32), metadata)
        assert (torch.cat(found) - expected).abs().max() <= 1e-2 * expected.abs().max()
        made.bfloat16()
        for one, other in zip(found, read(made, STEPS, inputs), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dim", [16, 40])
def test_heads_are_gated_and_put_behind_each_other(dim: int) -> None:
    both = bf16(7, 3, 2 * dim)
    x, gate = both.chunk(2, dim=-1)
    assert torch.equal(delta_ops.gate_heads(x, None), x.contiguous())
    expected = x.float() * gate.float().sigmoid()
    torch.testing.assert_close(delta_ops.gate_heads(x, gate).float(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("operators")
def test_states_of_other_shapes_are_left_to_torch() -> None:
    x, conv, inputs, states = bf16(3, 8), bf16(8, 1, 4), bf16(2, 8, 3), torch.zeros(2, 1, 8, 16)
    assert delta_ops.supports(x, conv, inputs, states, key_heads=2)
    assert not delta_ops.supports(x, conv, inputs, states[..., :8], key_heads=2)
    assert not delta_ops.supports(x, conv, inputs, states.bfloat16(), key_heads=2)
    assert not delta_ops.supports(x.float(), conv, inputs, states, key_heads=2)
    assert not delta_ops.supports(x, bf16(1 << 15, 1, 4), inputs, states, key_heads=2)
