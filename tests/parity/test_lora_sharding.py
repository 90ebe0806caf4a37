"""Adapters' products, sharded as their layers are, add the same as the whole products."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.attention.context import LoRATokens
from models.errors import CheckpointError
from models.layers import lora as lora_layer
from models.layers import moe
from models.layers.linear import MergedColumnParallelLinear, ParallelLinear, QKVParallelLinear, RowParallelLinear
from models.loading.loader import load_model
from models.lora.adapters import Adapter, attach, detach, load_adapters
from tests.parity.adapters import make_adapter, read_weights
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import CPU
from tests.parity.test_model_sharding import fill, random, ranks
from tests.sweeps import sweep


@pytest.fixture
def two_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of six tokens: the first without an adapter, two with the first, the rest in turn."""
    groups = (LoRATokens(1, slice(1, 3)), LoRATokens(2, torch.tensor([3, 5])))
    step = SimpleNamespace(lora=groups, context=SimpleNamespace(positions=torch.arange(6)))
    monkeypatch.setattr(lora_layer, "get_forward_context", lambda: step)


def expected_rows(x: torch.Tensor, weight: torch.Tensor, deltas: dict[int, torch.Tensor]) -> torch.Tensor:
    """The step of `two_adapters`, token by token. # [6, in] -> [6, out]"""
    return torch.stack(
        [
            row @ (weight + deltas.get(number, torch.zeros_like(weight))).T
            for row, number in zip(x, (0, 1, 1, 2, 0, 2), strict=True)
        ]
    )


@pytest.mark.usefixtures("two_adapters")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_of_column_layers_stand_side_by_side_in_each_part(size: int) -> None:
    weights, x = [random(8, 10), random(12, 10)], random(6, 10)
    products = {(1, 0): (3, 0.5), (1, 1): (2, 2.0), (2, 1): (4, 1.0)}
    halves = {
        key: (random(rank, 10), random(8 + 4 * key[1], rank), rank, scale) for key, (rank, scale) in products.items()
    }
    found = []
    for parallel in ranks(size):
        layer = MergedColumnParallelLinear(10, [8, 12], parallel=parallel)
        for shard, weight in enumerate(weights):
            fill(layer.weight, weight, shard)
        for (number, shard), (a, b, rank, scale) in halves.items():
            layer.make_lora(torch.float32).add(number, shard, a, b, scale, rank)
        found.append(layer(x).split([8 // size, 12 // size], -1))
    for shard, weight in enumerate(weights):
        deltas = {number: b @ a * scale for (number, part), (a, b, _, scale) in halves.items() if part == shard}
        torch.testing.assert_close(
            torch.cat([part[shard] for part in found], -1), expected_rows(x, weight, deltas), atol=1e-4, rtol=1e-4
        )


@pytest.mark.usefixtures("two_adapters")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_of_row_layers_add_up(size: int) -> None:
    weight, bias, x = random(10, 24), random(10), random(6, 24)
    halves = {1: (random(3, 24), random(10, 3), 3, 0.5), 2: (random(5, 24), random(10, 5), 5, 2.0)}
    total = torch.zeros(6, 10)
    for parallel, part in zip(ranks(size), x.chunk(size, -1), strict=True):
        layer = RowParallelLinear(24, 10, bias=True, parallel=parallel)
        fill(layer.weight, weight)
        fill(layer.bias, bias)
        for number, (a, b, rank, scale) in halves.items():
            layer.make_lora(torch.float32).add(number, None, a, b, scale, rank)
        total += layer(part)
    deltas = {number: b @ a * scale for number, (a, b, _, scale) in halves.items()}
    torch.testing.assert_close(total, expected_rows(x, weight, deltas) + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("two_adapters")
@pytest.mark.parametrize("size", [2, 4])
def test_products_of_experts_add_up(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "get_forward_context", vars(lora_layer)["get_forward_context"])
    stacks, x = (random(3, 16, 10), random(3, 10, 8)), random(6, 10)
    halves = ((random(6, 10), random(16, 6)), (random(6, 8), random(10, 6)))
    ids = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0], [2, 1]])

    def total(size: int) -> torch.Tensor:
        found = torch.zeros(6, 10)
        for parallel in ranks(size):
            layer = moe.FusedMoE(10, 8, 3, parallel=parallel)
            layer.reduces = False
            for weight, stack in zip((layer.w13, layer.w2), stacks, strict=True):
                fill(weight, stack, "stacked")
            for a, b in halves:
                product = layer.stack_of(a, b)
                assert product is not None
                layer.add_adapter(1, product, (a, b), 0.5, 2)
            found += layer(x, torch.full((6, 2), 0.5), ids)
        return found

    torch.testing.assert_close(total(size), total(1), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("two_adapters")
@sweep(2, size=[1, 2, 4], num_kv_heads=[2, 4], is_fused=[False, True])
def test_products_of_query_key_and_value_follow_their_heads(size: int, num_kv_heads: int, is_fused: bool) -> None:
    """With fewer KV heads than ranks, several ranks hold the same head and its products. A fused product's parts share
    A."""
    heads, dim, x = 8, 6, random(6, 10)
    features = {"q": heads * dim, "k": num_kv_heads * dim, "v": num_kv_heads * dim}
    halves = {
        shard: (random(3, 10), random(out, 3) + len(shard) * i) for i, (shard, out) in enumerate(features.items())
    }
    if is_fused:
        halves = {shard: (halves["q"][0], b) for shard, (_, b) in halves.items()}
    for parallel in ranks(size):
        layer = QKVParallelLinear(10, num_heads=heads, num_kv_heads=num_kv_heads, head_dim=dim, parallel=parallel)
        nn.init.zeros_(layer.weight)
        if is_fused:
            joined = torch.cat([b for _, b in halves.values()])
            layer.make_lora(torch.float32).add(1, None, halves["q"][0], joined, 0.5, 3)
        else:
            for shard, (a, b) in halves.items():
                layer.make_lora(torch.float32).add(1, shard, a, b, 0.5, 3)
        found = layer(x)
        assert found[[0, 3, 4, 5]].abs().max() == 0.0
        counts = [layer.num_heads * dim, layer.num_kv_heads * dim, layer.num_kv_heads * dim]
        for part, (shard, (a, b)) in zip(found[1:3].split(counts, -1), halves.items(), strict=True):
            first = layer.parts[shard].spans[0].first
            torch.testing.assert_close(part, (x[1:3] @ a.T @ b.T * 0.5)[:, first : first + part.shape[-1]])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_adapter_loads_into_each_rank(tmp_path: Path, size: int) -> None:
    path = make_checkpoint(tmp_path / "base", "qwen3")
    make_adapter(tmp_path / "mine", read_weights(path), rank=3, alpha=3)
    for parallel in ranks(size):
        config = ModelConfig.from_checkpoint(path)
        model = load_model(path, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)
        load_adapters(model, {"mine": tmp_path / "mine"}, dtype=torch.float32, device=CPU)
        for module in cast(nn.Module, model).modules():
            if isinstance(module, ParallelLinear):
                assert module.lora is not None
                assert cast(torch.Tensor, module.lora.delta(1)).shape == module.weight.shape


@pytest.mark.parametrize("size", [1, 2])
def test_an_adapter_comes_and_goes_as_a_whole(tmp_path: Path, size: int) -> None:
    path = make_checkpoint(tmp_path / "base", "qwen3")
    make_adapter(tmp_path / "mine", read_weights(path), rank=3, alpha=3)
    make_adapter(
        tmp_path / "foreign",
        read_weights(make_checkpoint(tmp_path / "other", "qwen3", hidden_size=128)),
        rank=3,
        alpha=3,
    )
    for parallel in ranks(size):
        config = ModelConfig.from_checkpoint(path)
        model = load_model(path, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)
        layers = [module for module in cast(nn.Module, model).modules() if isinstance(module, ParallelLinear)]
        for number in (5, 9):
            attach(model, number, Adapter.read(model, tmp_path / "mine"), dtype=torch.float32, device=CPU)
        with pytest.raises(CheckpointError, match="by its rank and config"):
            attach(model, 10, Adapter.read(model, tmp_path / "foreign"), dtype=torch.float32, device=CPU)
        assert all(layer.lora is not None and layer.lora.num_ranks % 6 == 0 for layer in layers)
        assert all(layer.lora is not None and layer.lora.delta(10) is None for layer in layers)
        detach(model, 5)
        assert all(layer.lora is not None and layer.lora.delta(5) is None for layer in layers)
        assert all(layer.lora is not None and layer.lora.delta(9) is not None for layer in layers)
        detach(model, 9)
        assert all(layer.lora is None for layer in layers)
