"""The recurrent layer: token by token, chunk by chunk, sharded, and in batches with other sequences."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from models.attention.backend import AttentionBatch, select_backend
from models.attention.context import Context, forward_context, get_forward_context
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.parameter import weight_loader_of
from models.ops.gated_delta_rule import delta_rule_span, delta_rule_step
from models.ops.state_space import state_space_span
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.paged_model import CPU
from tests.parity.test_model_sharding import ranks
from tests.parity.tolerance import assert_within, with_bound

HIDDEN = 20


@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_tokens_one_by_one_and_in_chunks_leave_the_state_that_transformers_leaves(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.nn.functional.normalize(torch.randn(3, length, 16, generator=generator), dim=-1) for _ in range(2))
    v, state = torch.randn(3, length, 24, generator=generator), torch.randn(3, 16, 24, generator=generator)
    decay, beta = -2 * torch.rand(3, length, generator=generator), torch.rand(3, length, generator=generator)
    inputs = nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in (q * 4, k, v, decay, beta, state))

    def of_transformers() -> torch.Tensor:  # The outputs, and the state. # [3, length + 16, 24]
        *given, first = inputs
        given = [x.transpose(0, 1)[None] for x in given]
        read, last = torch_chunk_gated_delta_rule(*given, initial_state=first[None], output_final_state=True)
        return torch.cat((read[0].transpose(0, 1), last[0]), 1)

    expected, bound = with_bound(inputs, of_transformers, terms=length, draws=16)

    in_chunks = state.clone()
    read = delta_rule_span(q, k, v, decay, beta, in_chunks)
    assert_within(torch.cat((read, in_chunks), 1), expected, bound)

    one_by_one = state.clone()[None]
    steps = [delta_rule_step(*(x[None, :, t] for x in (q, k, v, decay, beta)), one_by_one)[0] for t in range(length)]
    assert_within(torch.cat((torch.stack(steps, 1), one_by_one[0]), 1), expected, bound)


@pytest.mark.parametrize("kind", ["delta rule", "delta rule by key", "state space"])
def test_strong_decays_lose_no_digits_in_chunks(kind: str) -> None:
    """A chunk of such tokens decays by exp(-1600): its tokens' sums of logarithms may not be subtracted."""
    generator = torch.Generator().manual_seed(0)
    q, k = (nn.functional.normalize(torch.randn(3, 64, 16, generator=generator), dim=-1) for _ in range(2))
    v, beta = torch.randn(3, 64, 24, generator=generator), torch.rand(3, 64, generator=generator)
    decay = -25 * (1 + 0.1 * torch.rand(3, 64, 16, generator=generator))
    decay[:, ::2] *= 1e-3
    if kind != "delta rule by key":
        decay = decay[..., 0]

    def read(dtype: torch.dtype) -> torch.Tensor:
        qs, ks, vs, decays, betas = (each.to(dtype) for each in (q, k, v, decay, beta))
        state = torch.zeros(3, 16, 24, dtype=dtype)
        if kind != "state space":
            return delta_rule_span(qs, ks, vs, decays, betas, state)
        ones = torch.ones(3, dtype=dtype)
        by_token = (each.transpose(0, 1) for each in (vs, ks, qs, -decays))
        return state_space_span(*by_token, -ones, ones, state).transpose(0, 1)

    exact = read(torch.float64)
    assert (read(torch.float32) - exact).abs().max() < 1e-6 * exact.abs().max()


def layer(parallel: TensorParallel) -> GatedDeltaNet:
    made = GatedDeltaNet(
        "layer",
        HIDDEN,
        num_key_heads=4,
        num_value_heads=8,
        key_dim=6,
        value_dim=5,
        kernel_size=4,
        eps=1e-6,
        parallel=parallel,
    )
    wide, heads = 8 * 5, 8
    whole = {
        "in_proj_qkvz.weight": (2 * 4 * 6 + 2 * wide, HIDDEN),
        "in_proj_ba.weight": (2 * heads, HIDDEN),
        "out_proj.weight": (HIDDEN, wide),
        "norm.weight": (5,),
        "conv1d.weight": (2 * 4 * 6 + wide, 1, 4),
        "dt_bias": (heads,),
        "A_log": (heads,),
    }
    for number, (name, parameter) in enumerate(sorted(made.named_parameters())):
        loaded = torch.randn(whole[name], generator=torch.Generator().manual_seed(number)) * 0.5
        weight_loader_of(parameter)(parameter, loaded, None)
    return made


def run(
    made: GatedDeltaNet, state: StateCache, slots: list[int], counts: list[int], lengths: list[int]
) -> torch.Tensor:
    """One step of rows of random inputs; rows of one token are decodes."""
    tables = np.zeros((len(slots), 1), dtype=np.int32)
    metadata = select_backend(CPU).build_metadata(
        AttentionBatch(
            query_lens=np.array(counts),
            seq_lens=np.array(lengths),
            block_tables=tables,
            slot_mapping=np.zeros(sum(counts), dtype=np.int64),
            num_decodes=sum(count == 1 for count in counts),
            states=np.array(slots),
        )
    )
    rows = [inputs(slot)[length - count : length] for slot, count, length in zip(slots, counts, lengths, strict=True)]
    context = Context(positions=torch.empty(0), is_prefill=True, batch_size=len(slots))
    with torch.inference_mode(), forward_context(metadata, context):
        get_forward_context().kv_cache_data = {"layer": state}
        return made(torch.cat(rows))


def inputs(slot: int) -> torch.Tensor:
    return torch.randn(90, HIDDEN, generator=torch.Generator().manual_seed(slot))


def fresh(made: GatedDeltaNet) -> StateCache:
    """Values that an earlier sequence may have left."""
    return StateCache(tuple(torch.full((3, *shape), torch.nan) for shape in made.cache_spec.shapes))


def test_a_sequence_reads_what_it_reads_alone_whatever_the_steps() -> None:
    made = layer(ranks(1)[0])
    whole, bound = with_bound(made, lambda: run(made, fresh(made), [2], [90], [90]), terms=90, draws=16)
    state = fresh(made)
    run(made, state, [0], [7], [7])
    pieces = [
        run(made, state, [2], [30], [30]),
        run(made, state, [0, 2], [1, 40], [8, 70])[1:],
        *(run(made, state, [0, 2], [1, 1], [length - 62, length])[1:] for length in range(71, 91)),
    ]
    assert_within(torch.cat(pieces), whole, bound)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_add_up(size: int) -> None:
    parts = [layer(parallel) for parallel in ranks(size)]
    assert_within(added(parts), *whole_and_bound())


def test_shards_with_one_wrong_weight_do_not_add_up() -> None:
    """For any weight, with an error of a hundredth."""
    whole, bound = whole_and_bound()
    for name, _ in layer(ranks(1)[0]).named_parameters():
        parts = [layer(parallel) for parallel in ranks(2)]
        with torch.no_grad():
            parts[1].get_parameter(name).view(-1)[3] *= 1.01
        with pytest.raises(AssertionError, match="outside their bounds"):
            assert_within(added(parts), whole, bound)


def whole_and_bound() -> tuple[torch.Tensor, torch.Tensor]:
    """50 tokens by the whole layer, with bounds of the rounding errors: the state sums over as many tokens."""
    made = layer(ranks(1)[0])

    def compute() -> torch.Tensor:
        return run(made, fresh(made), [1], [50], [50])

    return with_bound(made, compute, terms=50, draws=16)


def added(parts: list[GatedDeltaNet]) -> torch.Tensor:
    """The sum of the shards' results for the same 50 tokens."""
    return torch.stack([run(part, fresh(part), [1], [50], [50]) for part in parts]).sum(0)
