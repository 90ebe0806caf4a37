"""The CPU's operators of hyper-connections against torch, for every instruction set of this processor."""

from collections.abc import Callable

import pytest
import torch

from models.layers.hyper_connection import HyperConnection, HyperHead, mean_of, repeated
from models.ops.cpu import dense, runtime
from models.ops.cpu import streams as ops
from models.ops.cpu.packed_weight import CodedWeight, PackedWeight, QuantizedWeight
from tests.parity.test_cpu_operators import bf16, operators, pytestmark

__all__ = ["operators", "pytestmark"]


def _filled(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5


def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_runtime", None)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("count", "size", "tokens", "iterations"), [(4, 96, 3, 20), (3, 1042, 9, 1), (8, 7, 1, 2)])
def test_operators_equal_torch(
    count: int, size: int, tokens: int, iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = HyperConnection(size, count, iterations, 1e-6, 1e-5)
    head = HyperHead(size, count, 1e-6, 1e-5)
    _filled(connection, 1)
    _filled(head, 2)
    streams, output = bf16(tokens, count * size, seed=3).view(tokens, count, size), bf16(tokens, size, seed=4)

    def run() -> list[torch.Tensor]:
        hidden, post, mix = connection(streams)
        next_streams = connection.spread(output, streams, post, mix)
        return [hidden, post, mix, next_streams, head(streams), mean_of(streams), repeated(output, count)]

    found = run()
    alone = [torch.cat([connection(streams[[token]])[part] for token in range(tokens)]) for part in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(found[:3], alone, strict=True))
    _by_torch(monkeypatch)
    for ours, expected in zip(found, run(), strict=True):
        _close(ours, expected)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    "make",
    [
        PackedWeight,
        lambda *sizes: QuantizedWeight(*sizes, 8),
        lambda *sizes: QuantizedWeight(*sizes, 4),
        lambda *sizes: CodedWeight(*sizes, bits=4, rounds=True),
    ],
    ids=["bfloat16", "int8", "int4", "mxfp4"],
)
def test_a_weight_multiplies_each_stream_as_it_does_rows(make: Callable[[int, int], PackedWeight]) -> None:
    tokens, count, inputs, outputs = 5, 3, 96, 70
    weight, streams = make(outputs, inputs), bf16(tokens, count * inputs, seed=1).view(tokens, count, inputs)
    weight.put(0, bf16(outputs, inputs, seed=2))
    found = ops.linear(streams, weight)
    assert found.shape == (tokens, count, outputs)
    assert torch.equal(found.view(-1, outputs), dense.linear(streams.view(-1, inputs), weight))
