"""A layer's shards at any tensor-parallel size add up to the whole layer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from models.layers.parameter import WeightPart, weight_loader_of
from models.loading.loader import load_model
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import CPU


class PartialResults:
    """Collectives that leave each rank's part unchanged, to be joined by the test."""

    are_captured = True

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: object) -> None:
        pass

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def ranks(size: int) -> list[TensorParallel]:
    collectives = None if size == 1 else PartialResults()
    return [TensorParallel(rank, size, collectives) for rank in range(size)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fill(parameter: nn.Parameter | None, value: torch.Tensor, shard: WeightPart = None) -> None:
    assert parameter is not None
    weight_loader_of(parameter)(parameter, value, shard)


pytestmark = pytest.mark.parametrize("size", [1, 2, 4])


def test_column_shards_stand_side_by_side(size: int) -> None:
    weight, bias, x = random(24, 10), random(24), random(3, 10)
    parts = []
    for parallel in ranks(size):
        layer = ColumnParallelLinear(10, 24, bias=True, parallel=parallel)
        fill(layer.weight, weight)
        fill(layer.bias, bias)
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, -1), x @ weight.T + bias)


def test_merged_column_shards_stand_side_by_side_in_each_part(size: int) -> None:
    weights, x = [random(8, 10), random(12, 10)], random(3, 10)
    parts = []
    for parallel in ranks(size):
        layer = MergedColumnParallelLinear(10, [8, 12], parallel=parallel)
        for shard, weight in enumerate(weights):
            fill(layer.weight, weight, shard)
        parts.append(layer(x).split([8 // size, 12 // size], -1))
    for shard, weight in enumerate(weights):
        torch.testing.assert_close(torch.cat([part[shard] for part in parts], -1), x @ weight.T)


def test_row_shards_add_up_with_the_bias_once(size: int) -> None:
    weight, bias, x = random(10, 24), random(10), random(3, 24)
    total = torch.zeros(3, 10)
    for parallel, part in zip(ranks(size), x.chunk(size, -1), strict=True):
        layer = RowParallelLinear(24, 10, bias=True, parallel=parallel)
        fill(layer.weight, weight)
        fill(layer.bias, bias)
        total += layer(part)
    torch.testing.assert_close(total, x @ weight.T + bias)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_query_heads_find_their_kv_head_on_their_own_rank(size: int, num_kv_heads: int) -> None:
    """With fewer KV heads than ranks, several ranks hold the same head."""
    heads, dim, x = 8, 6, random(3, 10)
    q, k, v = random(heads * dim, 10), random(num_kv_heads * dim, 10), random(num_kv_heads * dim, 10) + 1
    group = heads // num_kv_heads
    whole = [(x @ w.T).view(3, -1, dim) for w in (q, k, v)]
    for parallel in ranks(size):
        layer = QKVParallelLinear(10, num_heads=heads, num_kv_heads=num_kv_heads, head_dim=dim, parallel=parallel)
        for shard, weight in (("q", q), ("k", k), ("v", v)):
            fill(layer.weight, weight, shard)
        counts = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        found_q, found_k, found_v = layer(x).view(3, -1, dim).split(counts, 1)
        for head in range(layer.num_heads):
            everywhere = parallel.rank * layer.num_heads + head
            mine = head // (layer.num_heads // layer.num_kv_heads)
            torch.testing.assert_close(found_q[:, head], whole[0][:, everywhere])
            torch.testing.assert_close(found_k[:, mine], whole[1][:, everywhere // group])
            torch.testing.assert_close(found_v[:, mine], whole[2][:, everywhere // group])


def test_vocabulary_shards_add_up_and_stand_side_by_side(size: int) -> None:
    """Also a vocabulary that no size divides."""
    weight, ids = random(37, 10), torch.tensor([0, 36, 9, 10, 18, 19, 36])
    embedded, logits = torch.zeros(7, 10), []
    for parallel in ranks(size):
        embedding = VocabParallelEmbedding(37, 10, parallel=parallel)
        head = ParallelLMHead(37, 10, parallel=parallel)
        fill(embedding.weight, weight)
        fill(head.weight, weight)
        embedded += embedding(ids)
        logits.append(head(weight[:3]))
    torch.testing.assert_close(embedded, weight[ids])
    torch.testing.assert_close(torch.cat(logits, -1)[:, :37], weight[:3] @ weight.T)


def test_a_checkpoint_loads_into_each_rank(tmp_path: Path, size: int) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    config = ModelConfig.from_checkpoint(path)
    for parallel in ranks(size):
        model = load_model(path, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)
        assert [layer.num_kv_heads for layer in model.kv_cache_layers()] == [max(1, 2 // size)] * 2
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_sizes_that_do_not_divide_a_layer_are_refused(size: int) -> None:
    parallel = ranks(size)[0]
    three = replace(parallel, size=3, collectives=PartialResults())
    with pytest.raises(ValueError, match="tensor_parallel_size is 3, which does not divide num_attention_heads, 8"):
        QKVParallelLinear(10, num_heads=8, num_kv_heads=4, head_dim=6, parallel=three)
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 3, which neither divides num_key_value_heads, 2, nor is a multiple"
    ):
        QKVParallelLinear(10, num_heads=6, num_kv_heads=2, head_dim=6, parallel=three)
    with pytest.raises(ValueError, match="rank is 4; it must be between 0 and 3"):
        TensorParallel(4, 4, PartialResults())
    with pytest.raises(ValueError, match="no collectives"):
        TensorParallel(0, 2)
