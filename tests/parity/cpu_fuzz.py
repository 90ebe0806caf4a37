"""Random shapes through the CPU operators of a library: `python -m tests.parity.cpu_fuzz LIBRARY ROUNDS [ISA ...]`.

Without instruction sets, each round chooses one that the processor has, and processes exchange experts' inputs too.

test_cpu_sanitized.py runs it over a build that ends at the first access out of bounds.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.layers.hyper_connection import HyperConnection, mean_of, repeated
from models.ops.activation import clamped_swiglu
from models.ops.compression import tokens_of_pools
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import gated_delta as delta_ops
from models.ops.cpu import latent_attention as latent_ops
from models.ops.cpu import recurrent as recurrent_ops
from models.ops.cpu import runtime, structures
from models.ops.cpu import runtime as library
from models.ops.cpu import sampling as sampling_ops
from models.ops.cpu import selection as selection_ops
from models.ops.cpu.packed_weight import CodedWeight, PackedWeight, QuantizedWeight, padded
from models.ops.types import CLAMPED_SILU, SILU, AttentionOptions
from models.ops.weight_formats import Codes, nibbles
from tests.parity.exchange_fuzz import exchange_in_processes
from tests.parity.random_codes import KINDS, assert_same_products, random_codes
from tests.parity.test_cpu_delta import STEPS, Spans, layer, random_inputs, read
from tests.parity.test_cpu_latents import attend, unit_latents
from tests.parity.test_cpu_latents import reference as latent_reference
from tests.parity.test_cpu_operators import bf16, greedy_head, packed, reference, run_steps
from tests.parity.test_cpu_recurrent import SLOTS, WHOLE, run
from tests.parity.test_cpu_sampling import FILTERS, WIDE, in_order, is_best, noise_of, random_rows, rows_of
from tests.parity.test_cpu_sampling import draw as draw_tokens
from tests.parity.test_cpu_selection import Pages, of_spans


def fuzz(rounds: int, paths: Sequence[int]) -> None:
    """Raises `AssertionError` if a result is wrong."""
    draw = random.Random(0)
    for number in range(rounds):
        runtime.start(draw.choice((1, 2, 3)), draw.choice(paths))
        _products(draw, number)
        _quantized_products(draw, number)
        _coded_products(draw, number)
        _rows(draw, number)
        _attention(draw, number)
        _experts(draw, number)
        _latents(draw, number)
        _delta_nets(draw, number)
        _state_spaces(draw, number)
        _choices(draw, number)
        _streams(draw, number)
        _entries(draw, number)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max() + 1e-3


def _products(draw: random.Random, seed: int) -> None:
    rows, inputs, outputs = draw.choice((1, 2, 15, 33, 70, 530)), draw.randint(1, 150), draw.randint(1, 100)
    if rows == 70:
        inputs += draw.choice((0, 1281))
    x, weight, bias = bf16(rows, inputs, seed=seed), bf16(outputs, inputs, seed=seed + 1), bf16(outputs, seed=seed + 2)
    _close(ops.linear(x, packed(weight), bias, dtype=torch.float32), x.float() @ weight.float().T + bias.float())
    assert ops.linear(x[:0], packed(weight)).shape == (0, outputs)
    tokens, _ = greedy_head(packed(weight), bias, rows).choose(x)
    assert tokens.tolist() == ops.linear(x, packed(weight), bias, dtype=torch.float32).argmax(-1).tolist()
    halves = packed(bf16(64 * draw.randint(1, 3), inputs, seed=seed))
    assert torch.equal(
        ops.gated_linear(x, halves, None, SILU),
        ops.gated(ops.linear(x, halves), SILU),
    )
    ids = torch.randint(outputs, (5,))
    assert torch.equal(ops.embed(ids, packed(weight)), weight[ids])
    assert torch.equal(ops.embed(ids, packed(weight), 3.7), weight[ids] * 3.7)
    counts = [*(draw.choice((0, 1, 3, 40)) for _ in range(draw.randint(0, 4))), draw.choice((1, 3))]
    stack, apart = bf16(len(counts), outputs, inputs, seed=seed), padded(outputs)
    pairs, weights = bf16(sum(counts), inputs, seed=seed), PackedWeight(len(counts) * apart, inputs)
    for number, one in enumerate(stack):
        weights.put(number * apart, one)
    found = ops.grouped_linear(pairs, weights, None, torch.tensor(counts), out_features=outputs)
    parts = [rows.float() @ one.float().T for rows, one in zip(pairs.split(counts), stack, strict=True)]
    _close(found, torch.cat(parts))
    by_group = bf16(rows, len(counts), inputs, seed=seed)
    _close(
        ops.linear_by_group(by_group, weights, outputs),
        torch.einsum("tgi,goi->tgo", by_group.float(), stack.float()).flatten(1),
    )


def _quantized_products(draw: random.Random, seed: int) -> None:
    rows, inputs, outputs = draw.choice((1, 3, 4, 5, 8, 9, 17, 70)), draw.randint(1, 300), draw.randint(1, 100)
    x, weight, bias = bf16(rows, inputs, seed=seed), bf16(outputs, inputs, seed=seed + 1), bf16(outputs, seed=seed + 2)
    made = QuantizedWeight(outputs, inputs, draw.choice((4, 8)))
    cut = draw.randint(0, outputs)
    made.put(0, weight[:cut])
    made.put(cut, weight[cut:])
    held = ops.embed(torch.arange(outputs), made)
    assert (held - weight).abs().max() <= 0.15 * weight.abs().max()
    found = ops.linear(x, made, bias, dtype=torch.float32)
    # Products of a single output may cancel, but the rounding of their inputs does not.
    expected = x.float() @ held.float().T + bias.float()
    usual = x.float().norm() * held.float().norm() / (rows * inputs * outputs) ** 0.5
    assert (found - expected).abs().max() <= 2e-2 * max(expected.abs().max(), usual) + 1e-3
    assert torch.equal(ops.linear(x, made, bias), found.bfloat16())
    tokens, _ = greedy_head(made, bias, rows).choose(x)
    assert tokens.tolist() == found.argmax(-1).tolist()
    spoiled = x.clone()
    spoiled[-1, draw.randrange(inputs)] = draw.choice((float("inf"), -float("inf"), float("nan")))
    assert ops.linear(spoiled, made)[-1].isnan().all()
    halves = QuantizedWeight(64 * (1 + outputs // 40), inputs, made.bits)
    halves.put(0, bf16(halves.out_features, inputs, seed=seed + 1))
    assert torch.equal(ops.gated_linear(x, halves, None, 0), ops.gated(ops.linear(x, halves), 0))
    counts = [draw.choice((0, 1, 3, 40)) for _ in range(draw.randint(1, 3))]
    pairs, stack = bf16(sum(counts), inputs, seed=seed), QuantizedWeight(len(counts) * 32, inputs, 4)
    stack.put(0, bf16(len(counts) * 32, inputs, seed=seed))
    ops.grouped_linear(pairs, stack, None, torch.tensor(counts))


def _coded_products(draw: random.Random, seed: int) -> None:
    rows, inputs, outputs = draw.choice((1, 3, 8, 9, 17, 49, 70)), 64 * draw.randint(1, 5), draw.randint(1, 100)
    torch.manual_seed(seed)
    x, first = bf16(rows, inputs, seed=seed), draw.randint(0, outputs - 1)
    pairs = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    exponents = torch.randint(122, 130, (outputs, inputs // 32), dtype=torch.uint8)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[nibbles(pairs).long()]
    meant = numbers * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    floats = Codes("mxfp4", pairs, exponents, None, 32, lambda: meant, is_paired=True)
    values, zeros = (torch.randint(-128, 128, (outputs, n), dtype=torch.int8) for n in (inputs, inputs // 32))
    scales = torch.rand(outputs, inputs // 32).add(0.1)
    shifted = (values.float() - zeros.float().repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    integers = Codes("int8", values, scales, zeros, 32, lambda: shifted)
    for codes, dense in ((floats, meant), (integers, shifted)):
        weight = CodedWeight(outputs, inputs)
        for begin, end in ((0, first), (first, outputs)):
            part = codes.part(0, begin, end)
            assert part is not None
            assert weight.accepts(part)
            weight.put_codes(begin, part)
        _close(ops.linear(x, weight, dtype=torch.float32), x.float() @ dense.bfloat16().float().T)
    codes, meant = random_codes(*draw.choice(KINDS), outputs, inputs)
    coded = CodedWeight(outputs, inputs)
    coded.put_codes(0, codes)
    assert_same_products(ops.linear(x, coded), ops.linear(x, packed(meant)), x, meant)
    found = ops.linear(x, coded, dtype=torch.float32)
    assert torch.equal(ops.linear(x[:1], coded, dtype=torch.float32), found[:1]), "a row does not depend on others"


def _rows(draw: random.Random, seed: int) -> None:
    rows, size = draw.randint(1, 20), draw.randint(1, 70)
    x, weight = bf16(rows, size, seed=seed), bf16(size, seed=seed + 1)
    normed = torch.nn.functional.rms_norm(x.float(), (size,), weight.float(), 1e-5)
    _close(ops.rms_norm(x, weight, 1e-5), normed)
    residual = bf16(rows, size, seed=seed + 2)
    expected = residual.float() + normed
    _close(ops.add_rms_norm(residual, x, weight, 1e-5), expected)
    gate_up = bf16(rows, 2 * size, seed=seed)
    gate, up = gate_up.float().chunk(2, dim=-1)
    _close(ops.gated(gate_up, SILU), torch.nn.functional.silu(gate) * up)


def _experts(draw: random.Random, seed: int) -> None:
    tokens, hidden, inner = draw.choice((1, 2, 9, 40)), 32 * draw.randint(1, 4), 16 * draw.randint(1, 5)
    groups = draw.randint(1, 4)
    experts = groups * draw.randint(1, 9)
    top_k, open_groups = draw.randint(1, experts // groups), draw.randint(1, groups)
    x, router = bf16(tokens, hidden, seed=seed), torch.randn(experts, hidden)
    logits = expert_ops.float_linear(x, router)
    _close(logits, x.float() @ router.T)
    correction, is_sigmoid = draw.choice((None, torch.randn(experts))), draw.choice((True, False))
    weights, ids = expert_ops.route(
        logits,
        top_k,
        scoring=structures.SIGMOID if is_sigmoid else structures.SOFTMAX,
        renormalize=draw.choice((True, False)),
        correction=correction,
        num_groups=groups,
        top_groups=open_groups,
    )
    assert all(len(set(row)) == top_k and 0 <= min(row) <= max(row) < experts for row in ids.tolist())
    table, tokens_of_text = torch.randint(experts, (7, top_k)), torch.randint(7, (tokens,))
    _, hashed = expert_ops.route(
        logits,
        top_k,
        scoring=structures.SQRT_SOFTPLUS,
        renormalize=True,
        table=(table, tokens_of_text),
    )
    assert torch.equal(hashed, table[tokens_of_text])
    counts, of_token, places = expert_ops.sort_pairs(ids, experts)
    w13, w2 = bf16(experts, 2 * inner, hidden, seed=seed, scale=0.2), bf16(experts, hidden, inner, seed=seed)
    rows = ops.grouped_linear(x, packed(w13.flatten(0, 1)), None, counts, tokens=of_token)
    rows = ops.gated(rows, CLAMPED_SILU, alpha=1.7, limit=2.0)
    found = expert_ops.combine(ops.grouped_linear(rows, packed(w2.flatten(0, 1)), None, counts), weights, places, x)
    expected = x.float()
    for token, (row, chosen) in enumerate(zip(weights, ids, strict=True)):
        for weight, expert in zip(row, chosen.tolist(), strict=True):
            inside = clamped_swiglu((x[token].float() @ w13[expert].float().T)[None], alpha=1.7, limit=2.0)
            expected[token] += weight * (inside[0] @ w2[expert].float().T)
    _close(found, expected)


def _attention(draw: random.Random, seed: int) -> None:
    kv_heads, dim = draw.choice((1, 2)), draw.choice((10, 20, 32, 36, 40, 64, 72, 80, 96, 112, 256))
    value_dim = draw.choice((dim, dim, 20, 32, 40, 96, 256))
    heads, block_size = kv_heads * draw.choice((1, 2, 5, 17)), draw.choice((16, 32))
    lengths = [draw.choice((1, 16, 63, 90)), draw.randint(1, 140)]
    q, k, v = (
        [bf16(n, count, size, seed=seed + n + part) for n in lengths]
        for part, (count, size) in enumerate(((heads, dim), (kv_heads, dim), (kv_heads, value_dim)))
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


def _latents(draw: random.Random, seed: int) -> None:
    wide = 32 * draw.choice((1, 2, 3, draw.randint(4, 16)))
    rank, rope = draw.choice((wide, draw.randint(1, 100))), draw.choice((8, 32))
    block_size = draw.choice((16, 32))
    # Products are slow in a sanitized build: with wide latents there are few heads, or few tokens.
    heads = draw.randint(1, 20)
    longest = 140 if rank < 128 or heads <= 4 else 24
    lengths = [min(draw.choice((1, 16, 63, 90)), longest), draw.randint(1, longest)]
    q = [bf16(n, heads, rank + rope, seed=seed + n) for n in lengths]
    latents = [unit_latents(n, rank, rope, seed=seed + n + 1) for n in lengths]
    middle = [n // 2 for n in lengths]
    steps = [[(i, 0, middle[i]) for i in (0, 1)], [(i, middle[i], lengths[i]) for i in (0, 1)]]
    for found, *own in zip(attend(q, latents, steps, rank, block_size), q, latents, strict=True):
        _close(found, latent_reference(*own, rank))
    nope, values = draw.randint(1, 70), draw.randint(1, 70)
    kv_b = bf16(heads, nope + values, rank, seed=seed)
    packed_heads, x = latent_ops.PackedHeads(kv_b, nope), bf16(lengths[1], heads, nope + rope)
    there = latent_ops.latent_queries(x, packed_heads, rank + rope)[..., :rank]
    _close(there, torch.einsum("thn,hnr->thr", x[..., :nope].float(), kv_b[:, :nope].float()))
    there = there.contiguous()
    expected = torch.einsum("thr,hvr->thv", there.float(), kv_b[:, nope:].float())
    _close(latent_ops.latent_values(there, packed_heads), expected)


def _delta_nets(draw: random.Random, seed: int) -> None:
    made = layer(
        draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 40), 16 * draw.randint(1, 10), draw.randint(2, 6)
    )
    lengths = {draw.randint(0, 1): draw.randint(1, 20), draw.randint(2, 4): draw.randint(1, 20)}
    inputs = random_inputs(made, lengths)
    whole = read(made, [[(slot, 0, n) for slot, n in lengths.items()]], inputs)
    cuts = [(0, 0.5), (0.5, 0.9), (0.9, 1)]
    steps = [[(slot, int(a * n), int(b * n)) for slot, n in lengths.items()] for a, b in cuts]
    for found, in_parts in zip(whole, read(made, steps, inputs), strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, in_parts)
    x, gate = bf16(lengths[min(lengths)], 3, 2 * 17, seed=seed).chunk(2, dim=-1)
    _close(delta_ops.gate_heads(x, gate), x.float() * gate.float().sigmoid())


def _state_spaces(draw: random.Random, seed: int) -> None:
    heads, dim, size = draw.randint(1, 20), draw.randint(1, 150), draw.randint(1, 9)
    x, dt = bf16(80, heads * dim + 2 * size, seed=seed), bf16(80, heads, seed=seed + 1)
    weights = [torch.randn(heads) for _ in range(3)]
    channels, taps = draw.randint(1, 1100), draw.randint(2, 6)
    wide, conv = bf16(80, channels, seed=seed + 2), bf16(taps, channels, seed=seed + 3)

    def computed(steps: list[Spans]) -> tuple[torch.Tensor, torch.Tensor]:
        states, inputs = torch.zeros(SLOTS, heads, size, dim), torch.zeros(SLOTS, taps - 1, channels).bfloat16()

        def scan(step: structures.Step, x: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
            return recurrent_ops.state_space(x, dt, *weights, states, step, groups=1, limits=(0.0, float("inf")))

        def convolve(step: structures.Step, x: torch.Tensor) -> torch.Tensor:
            return recurrent_ops.convolve(x, conv, None, inputs, step, gates=None, has_silu=True)

        return run(steps, scan, heads * dim, x=x, dt=dt), run(steps, convolve, channels, x=wide)

    for found, in_parts in zip(computed([WHOLE]), computed(STEPS), strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, in_parts)


def _choices(draw: random.Random, seed: int) -> None:
    width = draw.choice((draw.randint(1, 300), draw.randint(1, 3000), WIDE))
    logits = rows_of(width, seed)[: draw.choice((1, 2, 11))]
    k = draw.randint(1, min(width, draw.choice((5, 300, structures.MAX_LARGEST))))
    for row, ids in zip(logits.numpy(), sampling_ops.largest(logits, k).tolist(), strict=True):
        assert ids == in_order(row, k)
    filters: dict[str, Any] = {"temperature": draw.choice((0.3, 2.0)), **draw.choice(FILTERS)}
    chosen = random_rows(len(logits), width, seed % 16, **filters)
    for row, token in zip(logits.numpy(), draw_tokens(logits, chosen), strict=True):
        assert is_best(token, row, chosen, noise_of(seed % 16)[:width])


def _streams(draw: random.Random, seed: int) -> None:
    count, size, tokens = draw.randint(1, structures.MOST_STREAMS), draw.randint(1, 2100), draw.randint(1, 5)
    connection = HyperConnection(size, count, draw.randint(1, 20), 1e-6, 1e-5)
    for parameter in connection.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.1
    streams, output = (
        bf16(tokens, count * size, seed=seed).view(tokens, count, size),
        bf16(tokens, size, seed=seed + 1),
    )
    hidden, post, mix = connection(streams)
    found = connection.spread(output, streams, post, mix)
    _close(found, post[..., None] * output[:, None] + mix.mT @ streams.float())
    assert hidden.isfinite().all()
    _close(mean_of(streams), streams.float().mean(1))
    assert torch.equal(repeated(output, count), output[:, None].expand(-1, count, -1))


def _entries(draw: random.Random, seed: int) -> None:
    rate, dim, block_size, overlaps = draw.randint(1, 40), draw.randint(16, 100), 16, draw.random() < 0.5
    series = 2 * dim if overlaps else dim
    lengths = [draw.randint(1, 100), draw.randint(1, 30)]
    pages = Pages(lengths, block_size)
    vectors, bias = [bf16(n, 2 * series, seed=seed + n) for n in lengths], torch.randn(rate, series)
    norm = selection_ops.EntryFinish(bf16(dim, seed=seed), 1e-5, torch.rand(draw.randint(0, dim // 2)), 1.0)
    finish, count = draw.choice((norm, None)), draw.randint(1, 3)

    def made(steps: list[Spans]) -> torch.Tensor:
        cache = torch.zeros(pages.num_blocks, block_size, 2 * series).bfloat16()
        entries = torch.zeros(pages.num_blocks, -(-block_size // rate), dim).bfloat16()
        for spans in steps:
            step = pages.step(spans)
            selection_ops.store(of_spans(vectors, spans), cache, step)
            selection_ops.compress(cache, entries, bias, step, overlaps=overlaps, finish=finish)
            seen = torch.cat([torch.arange(first, past) for _, first, past in spans]) + 1
            pools = torch.full((len(seen), count), -1, dtype=torch.int32)
            for own, complete in zip(pools, (seen // rate).tolist(), strict=True):
                chosen = sorted(draw.sample(range(complete), draw.randint(0, min(count, complete))))
                own[: len(chosen)] = torch.tensor(chosen)
            assert torch.equal(selection_ops.tokens_of_pools(pools, step, rate), tokens_of_pools(pools, seen, rate))
        return entries

    whole = made([[(s, 0, n) for s, n in enumerate(lengths)]])
    cuts = [n // 2 for n in lengths]
    assert whole.isfinite().all()
    assert torch.equal(
        made([[(0, 0, cuts[0]), (1, 0, cuts[1])], [(0, cuts[0], lengths[0]), (1, cuts[1], lengths[1])]]), whole
    )


if __name__ == "__main__":
    given = library.Library(Path(sys.argv[1]))
    library.load_library = lambda: given  # type: ignore[assignment]
    named: list[tuple[int, ...]] = [(library.INSTRUCTION_SETS.index(name),) for name in sys.argv[3:]]
    for paths in named or [given.available]:
        fuzz(int(sys.argv[2]), paths)
    if not named and not exchange_in_processes(int(sys.argv[2])):
        sys.exit(1)
