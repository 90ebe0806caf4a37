"""Random shapes through the CPU operators of a given library: `python -m tests.parity.cpu_fuzz LIBRARY ROUNDS`.

Run by test_cpu_sanitized.py over a build that ends at the first access out of bounds.
"""

import random
import sys
from pathlib import Path

import torch

from models.attention.base import AttentionOptions
from models.kernels.cpu import library, ops
from models.kernels.cpu.quantized import QuantizedWeight
from tests.parity.test_cpu_operators import bf16, greedy_head, packed, reference, run_steps


def fuzz(rounds: int) -> None:
    """Raises `AssertionError` where a result is wrong."""
    draw = random.Random(0)
    for number in range(rounds):
        ops.start(draw.choice((1, 2, 3)), draw.choice(range(library.AMX + 1)))
        _products(draw, number)
        _quantized_products(draw, number)
        _rows(draw, number)
        _attention(draw, number)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max() + 1e-3


def _products(draw: random.Random, seed: int) -> None:
    rows, inputs, outputs = draw.choice((1, 2, 15, 33, 70, 530)), draw.randint(1, 150), draw.randint(1, 100)
    x, weight, bias = bf16(rows, inputs, seed=seed), bf16(outputs, inputs, seed=seed + 1), bf16(outputs, seed=seed + 2)
    _close(ops.linear(x, packed(weight), bias, dtype=torch.float32), x.float() @ weight.float().T + bias.float())
    likeliest, _ = greedy_head(packed(weight), bias, rows).choose(x)
    assert likeliest.tolist() == ops.linear(x, packed(weight), bias, dtype=torch.float32).argmax(-1).tolist()
    ids = torch.randint(outputs, (5,))
    assert torch.equal(ops.embed(ids, packed(weight)), weight[ids])
    counts = [draw.choice((0, 1, 3, 40)) for _ in range(draw.randint(1, 5))]
    stack = bf16(len(counts), 32, inputs, seed=seed)
    pairs, weights = bf16(sum(counts), inputs, seed=seed), ops.PackedWeight(len(counts) * 32, inputs)
    weights.put(0, stack.view(-1, inputs))
    found = ops.grouped_linear(pairs, weights, None, torch.tensor(counts))
    parts = [rows.float() @ one.float().T for rows, one in zip(pairs.split(counts), stack, strict=True)]
    if sum(counts):
        _close(found, torch.cat(parts))


def _quantized_products(draw: random.Random, seed: int) -> None:
    rows, inputs, outputs = draw.choice((1, 3, 4, 5, 17, 70)), draw.randint(1, 300), draw.randint(1, 100)
    x, weight, bias = bf16(rows, inputs, seed=seed), bf16(outputs, inputs, seed=seed + 1), bf16(outputs, seed=seed + 2)
    made = QuantizedWeight(outputs, inputs, draw.choice((4, 8)))
    cut = draw.randint(0, outputs)
    made.put(0, weight[:cut])
    made.put(cut, weight[cut:])
    held = ops.embed(torch.arange(outputs), made)
    assert (held - weight).abs().max() <= 0.15 * weight.abs().max()
    found = ops.linear(x, made, bias, dtype=torch.float32)
    _close(found, x.float() @ held.float().T + bias.float())
    assert torch.equal(ops.linear(x, made, bias), found.bfloat16())
    counts = [draw.choice((0, 1, 3, 40)) for _ in range(draw.randint(1, 3))]
    pairs, stack = bf16(sum(counts), inputs, seed=seed), QuantizedWeight(len(counts) * 32, inputs, 4)
    stack.put(0, bf16(len(counts) * 32, inputs, seed=seed))
    ops.grouped_linear(pairs, stack, None, torch.tensor(counts))


def _rows(draw: random.Random, seed: int) -> None:
    rows, size = draw.randint(1, 20), draw.randint(1, 70)
    x, weight = bf16(rows, size, seed=seed), bf16(size, seed=seed + 1)
    _close(ops.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x.float(), (size,), weight.float(), 1e-5))
    gate_up = bf16(rows, 2 * size, seed=seed)
    gate, up = gate_up.float().chunk(2, dim=-1)
    _close(ops.gated(gate_up, library.SILU), torch.nn.functional.silu(gate) * up)


def _attention(draw: random.Random, seed: int) -> None:
    kv_heads, dim = draw.choice((1, 2)), draw.choice((32, 64, 96, 256))
    heads, block_size = kv_heads * draw.choice((1, 2, 5, 17)), draw.choice((16, 32))
    lengths = [draw.choice((1, 16, 63, 90)), draw.randint(1, 140)]
    q, k, v = (
        [bf16(n, count, dim, seed=seed + n + part) for n in lengths]
        for part, count in enumerate((heads, kv_heads, kv_heads))
    )
    options = AttentionOptions(dim**-0.5, draw.choice((None, 1, 20, 64)), draw.choice((None, 3.0)))
    sinks = draw.choice((None, torch.linspace(-1, 3, heads)))
    steps = []
    done = [0, 0]
    while left := [i for i in (0, 1) if done[i] < lengths[i]]:
        spans = []
        for i in left:
            past = min(lengths[i], done[i] + draw.choice((1, 1, 7, 64)))
            spans.append((i, done[i], past))
            done[i] = past
        steps.append(spans)
    for found, *qkv in zip(run_steps(q, k, v, steps, options, block_size, sinks), q, k, v, strict=True):
        _close(found, reference(*qkv, options, sinks))


if __name__ == "__main__":
    given = library.Library(Path(sys.argv[1]))
    library.load_library = lambda: given  # type: ignore[assignment]
    fuzz(int(sys.argv[2]))
