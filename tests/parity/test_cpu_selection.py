"""The CPU's operators of indexers and of attention to selected keys, for every instruction set of this processor.

Scores of small integers are exact, so that the selection must equal the reference's, including ties.
"""

import itertools

import pytest
import torch

from models.ops.block_selection import BlockChoice, select_blocks
from models.ops.compression import rotate_last_pairs, tokens_of_pools
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import latent_attention as latent_ops
from models.ops.cpu import runtime, structures
from models.ops.cpu import selection as ops
from models.ops.cpu.structures import Step
from models.ops.torch_ops import moved, top_k_lower_first
from models.ops.types import AttentionOptions, NormWeight
from tests.parity.test_cpu_operators import bf16, operators, pytestmark

__all__ = ["operators", "pytestmark"]

Spans = list[tuple[int, int, int]]
"""For each row: the sequence, its first token and the one after the last."""


class Pages:
    """Block tables of some sequences, in random order."""

    def __init__(self, lengths: list[int], block_size: int) -> None:
        self.block_size = block_size
        blocks = -(-max(lengths) // block_size)
        self.num_blocks = blocks * len(lengths)
        generator = torch.Generator().manual_seed(3)
        self.tables = torch.randperm(self.num_blocks, generator=generator).view(len(lengths), blocks).int()

    def filled(self, vectors: list[torch.Tensor], rate: int = 1) -> torch.Tensor:
        """A cache of these vectors, of which a sequence has one for every `rate` tokens. # each [n, dim] -> [blocks,
        most, dim]"""
        per_block = -(-self.block_size // rate)
        cache = torch.full((self.num_blocks, per_block, vectors[0].shape[1]), torch.nan).bfloat16()
        for table, own in zip(self.tables, vectors, strict=True):
            for number, vector in enumerate(own):
                block = ((number + 1) * rate - 1) // self.block_size
                cache[table[block], number - block * self.block_size // rate] = vector
        return cache

    def step(self, spans: Spans) -> Step:
        slots = [
            int(self.tables[s, at // self.block_size]) * self.block_size + at % self.block_size
            for s, first, past in spans
            for at in range(first, past)
        ]
        return attention_ops.make_step(
            slots=torch.tensor(slots),
            query_starts=torch.tensor([0, *itertools.accumulate(past - first for _, first, past in spans)]).int(),
            seq_lens=torch.tensor([past for *_, past in spans]).int(),
            block_tables=self.tables[[s for s, *_ in spans]].contiguous(),
        )


def small(*shape: int, seed: int) -> torch.Tensor:
    """Integers from -2 to 2."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def of_spans(parts: list[torch.Tensor], spans: Spans) -> torch.Tensor:
    return torch.cat([parts[s][first:past] for s, first, past in spans])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("heads", "dim", "rate", "top_k"),
    [(3, 32, 1, 7), (64, 128, 4, 20), (40, 40, 3, 64), (20, 6, 2, 9), (3, 51, 1, 30)],
)
def test_the_best_keys_are_the_references_in_any_company(heads: int, dim: int, rate: int, top_k: int) -> None:
    lengths = [330, 9, 1290]
    pages = Pages(lengths, 16)
    keys = [small(n // rate, dim, seed=n) for n in lengths]
    q, weights = ([small(n, heads, *size, seed=n + 1) for n in lengths] for size in ((dim,), ()))
    cache = pages.filled(keys, rate)

    def select(spans: Spans) -> torch.Tensor:
        return ops.select_keys(
            of_spans(q, spans),
            of_spans(weights, spans),
            0.5,
            cache,
            pages.step(spans),
            top_k,
            block_size=16,
            rate=rate,
        )

    whole: Spans = [(0, 300, 330), (1, 0, 9), (2, 1270, 1290)]
    found = select(whole)
    tokens = [(s, at) for s, first, past in whole for at in range(first, past)]
    for own, (s, at) in zip(found.long(), tokens, strict=True):
        count = (at + 1) // rate
        expected = torch.arange(count)
        if count > top_k:
            scores = (weights[s][at].float() * 0.5) @ (q[s][at].float() @ keys[s][:count].float().T).relu()
            expected = top_k_lower_first(scores[None], top_k)[1][0].sort().values
        assert torch.equal(own[: len(expected)], expected)
        assert (own[len(expected) :] == -1).all()
    alone = torch.cat([select([(s, at, at + 1)]) for s, at in tokens])
    assert torch.equal(alone, found)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("heads", "dim", "choice"),
    [
        (4, 128, BlockChoice(128, 3, 1)),
        (2, 40, BlockChoice(16, 5, 0)),
        (2, 20, BlockChoice(16, 5, 0)),
        (20, 32, BlockChoice(16, 2, 1)),  # more heads than keys in a block
    ],
)
def test_the_best_blocks_are_the_references(heads: int, dim: int, choice: BlockChoice) -> None:
    lengths = [700, 40, 513]
    pages = Pages(lengths, 32)
    keys, q = ([small(n, *size, seed=n) for n in lengths] for size in ((dim,), (heads, dim)))
    spans: Spans = [(0, 690, 700), (1, 0, 40), (2, 512, 513)]
    size, top_k, num_local = choice
    found = ops.select_blocks(
        of_spans(q, spans), pages.filled(keys), pages.step(spans), block=size, top_k=top_k, num_local=num_local
    )
    start = 0
    for s, first, past in spans:
        for at in range(first, past):
            chosen = select_blocks(q[s][at : at + 1], keys[s][: at + 1], at, choice)
            own = found[start : start + heads].long()
            start += heads
            for head in range(heads):
                blocks = torch.arange(-(-(at + 1) // size)) if chosen is None else chosen[0, head].nonzero()[:, 0]
                assert torch.equal(own[head][own[head] >= 0], blocks)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(8, 4, 64, 16), (40, 2, 40, 32), (3, 3, 128, 48)])
def test_attention_to_selected_blocks_equals_the_reference(heads: int, kv_heads: int, dim: int, block: int) -> None:
    length, block_size = 300, 16
    pages = Pages([length], block_size)
    k_cache, v_cache = (torch.full((pages.num_blocks, kv_heads, block_size, dim), torch.nan).bfloat16() for _ in "kv")
    q, k, v = bf16(length, heads, dim), bf16(length, kv_heads, dim, seed=1), bf16(length, kv_heads, dim, seed=2)
    step, last = pages.step([(0, 0, length)]), pages.step([(0, length - 1, length)])
    attention_ops.rope_store(q, k, v, k_cache, v_cache, step)
    generator = torch.Generator().manual_seed(5)
    selected = torch.full((length * kv_heads, 4), -1, dtype=torch.int32)
    hidden = torch.ones(length, kv_heads, length).bool()
    for row in range(length * kv_heads):
        at, head = divmod(row, kv_heads)
        count = at // block + 1
        blocks = torch.randperm(count, generator=generator)[:4].sort().values
        selected[row, : len(blocks)] = blocks
        hidden[at, head] = ~torch.isin(torch.arange(length) // block, blocks) | (torch.arange(length) > at)
    options = AttentionOptions(0.3)
    found = attention_ops.attention(q, k_cache, v_cache, step, options, selected=selected, block=block)
    group = heads // kv_heads
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double().repeat_interleave(group, 1)) * 0.3
    shares = scores.masked_fill(hidden.repeat_interleave(group, 1), -torch.inf).softmax(-1)
    expected = torch.einsum("qhk,khd->qhd", shares, v.double().repeat_interleave(group, 1))
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
    alone = attention_ops.attention(
        q[-1:], k_cache, v_cache, last, options, selected=selected[-kv_heads:], block=block
    )
    assert torch.equal(alone, found[-1:])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "window", "rate", "selects"),
    [(5, 64, 0, 9, 4, True), (64, 512, 0, 128, 3, False), (20, 32, 32, 0, 1, True), (3, 32, 0, 20, 0, False)],
)
def test_attention_to_a_window_and_entries_equals_the_reference(
    heads: int, rank: int, rope: int, window: int, rate: int, selects: bool
) -> None:
    length, dim, top_k = 330, rank + rope, 12
    pages = Pages([length, 50], 16)
    q, vectors = bf16(length, heads, dim), bf16(length, dim, seed=1)
    sinks = torch.linspace(-2, 3, heads) if window else None
    entries, selected = bf16(length // rate if rate else 0, dim, seed=2), None
    hidden_entries = torch.ones(length, len(entries)).bool()
    choice = torch.full((length, top_k), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    for at in range(length if rate else 0):
        chosen = torch.arange((at + 1) // rate)
        if selects:
            chosen = chosen[torch.randperm(len(chosen), generator=generator)[:top_k]].sort().values
            choice[at, : len(chosen)] = chosen
        hidden_entries[at, chosen] = False
    if selects:
        selected = choice
    other = bf16(50, dim, seed=4)
    made = None
    if rate:
        made = latent_ops.Entries(pages.filled([entries, other[: 50 // rate]], rate), 16, rate, selected)
    cache = pages.filled([vectors, other]) if window else None

    def attend(spans: Spans, q: torch.Tensor) -> torch.Tensor:
        some = made
        if made is not None and selected is not None:
            some = made._replace(selected=selected[spans[0][1] : spans[0][2]])
        step = pages.step(spans)
        return latent_ops.latent_attention(q, cache, step, rank, 0.2, window=window, entries=some, sinks=sinks)

    found = attend([(0, 0, length)], q)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= window)
    keys = torch.cat((vectors, entries)).double()
    scores = torch.einsum("qhd,kd->qhk", q.double(), keys) * 0.2
    scores.masked_fill_(torch.cat((hidden, hidden_entries), 1)[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None].expand(length, -1, 1)), -1)
    expected = scores.softmax(-1)[..., : len(keys)] @ keys[:, :rank]
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
    alone = torch.cat([attend([(0, each, each + 1)], q[each : each + 1]) for each in (40, 329)])
    assert torch.equal(alone, found[[40, 329]])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("is_back", [True, False])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(40, 8), (512, 64), (32, 32)])
def test_the_last_dimensions_are_rotated_by_pairs(dim: int, rotary_dim: int, is_back: bool) -> None:
    x, frequencies = bf16(7, 3, dim), torch.rand(rotary_dim // 2)
    cos, sin = (each[:, None] for each in attention_ops.rope_table(torch.arange(7) * 5, frequencies, 1.0))
    found = ops.rotate_heads(x, (cos, sin), eps=1e-5, is_last=True, is_interleaved=True, is_back=is_back)
    normed = torch.nn.functional.rms_norm(x.float(), (dim,), eps=1e-5)
    expected = rotate_last_pairs(normed, cos, sin, back=is_back)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.usefixtures("operators")
def test_rotated_keys_go_to_their_slots() -> None:
    pages, x, weight = Pages([20], 16), bf16(20, 1, 40), bf16(40, seed=1)
    cos, sin = (each[:, None] for each in attention_ops.rope_table(torch.arange(20), torch.rand(8), 1.0))
    norm = NormWeight(weight, 1e-5, 1.0)
    cache = pages.filled([torch.zeros(20, 40).bfloat16()])
    ops.rotate_heads(x, (cos, sin), pages.step([(0, 0, 20)]), norm=norm, pages=cache)
    expected = moved(x.float(), norm, (cos, sin))[:, 0]
    torch.testing.assert_close(
        cache[pages.tables[0].long()].flatten(0, 1)[:20].float(), expected, rtol=2**-7, atol=1e-5
    )
    assert cache[pages.tables[0].long()].flatten(0, 1)[20:].isnan().all()


def test_other_shapes_are_left_to_torch() -> None:
    runtime.start(1)
    q = bf16(1, 4, 64)
    keys = bf16(2, 16, 64)
    most = structures.MAX_INDEXED
    assert ops.selects(q, keys, 5, most)
    assert not ops.selects(q, keys, 5, most + 1)
    assert not ops.selects(q.float(), keys.float(), 5, 32)
    assert not ops.selects(bf16(1, 4, 264), bf16(2, 16, 264), 5, 32)
    assert not ops.selects(bf16(1, structures.INDEX_HEADS + 1, 64), keys, 5, 32)
    assert ops.selects_blocks(q, keys, 32, 5, most * 32 // 4)
    assert not ops.selects_blocks(q, keys, 32, 5, most * 32 // 4 + 1)
    assert not ops.selects_blocks(q, keys, 20, 5, 32)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("rate", "dim", "rotary_dim", "overlaps", "is_finished"),
    [(4, 64, 16, True, True), (5, 40, 40, False, True), (16, 24, 0, False, False), (3, 12, 8, True, True)],
)
def test_entries_equal_the_reference_however_a_row_is_divided(
    rate: int, dim: int, rotary_dim: int, overlaps: bool, is_finished: bool
) -> None:
    lengths, block_size, eps = [70, 9, 41], 16, 1e-5
    pages = Pages(lengths, block_size)
    series = 2 * dim if overlaps else dim
    vectors = [bf16(n, 2 * series, seed=n) for n in lengths]
    bias = torch.randn(rate, series, generator=torch.Generator().manual_seed(1))
    norm, frequencies = bf16(dim, seed=2), torch.linspace(0.01, 0.7, rotary_dim // 2)
    finish = ops.EntryFinish(norm, eps, frequencies, 1.25) if is_finished else None

    def made(steps: list[Spans]) -> torch.Tensor:
        cache = torch.full((pages.num_blocks, block_size, 2 * series), torch.nan).bfloat16()
        entries = torch.zeros(pages.num_blocks, -(-block_size // rate), dim).bfloat16()
        for spans in steps:
            ops.store(of_spans(vectors, spans), cache, pages.step(spans))
            ops.compress(cache, entries, bias, pages.step(spans), overlaps=overlaps, finish=finish)
        return entries

    found = made([[(s, 0, n) for s, n in enumerate(lengths)]])
    expected = []
    for own in vectors:
        values, gates = own.float().split(series, 1)
        count = len(own) // rate
        windows = torch.arange(count * rate).view(count, rate)
        v, g = values[windows], gates[windows] + bias
        if overlaps:
            before = windows - rate
            v_before, g_before = values[before.clamp(min=0)], gates[before.clamp(min=0)] + bias
            g_before[0] = -torch.inf
            v = torch.cat((v_before[..., :dim], v[..., dim:]), 1)
            g = torch.cat((g_before[..., :dim], g[..., dim:]), 1)
        entry = (g.softmax(1) * v).sum(1)
        if is_finished:
            entry = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + eps) * norm.float()
            angles = (torch.arange(count) * rate)[:, None] * frequencies
            halves = (torch.cat((part(angles),) * 2, 1)[:, None] * 1.25 for part in (torch.cos, torch.sin))
            entry = rotate_last_pairs(entry[:, None], *halves)[:, 0]
        expected.append(entry)
    wanted = pages.filled(expected, rate).nan_to_num(0)
    assert (found.float() - wanted.float()).abs().max() <= 2e-2 * wanted.float().abs().max()
    assert torch.equal(found == 0, wanted == 0)
    cut = [[(0, 0, 33), (1, 0, 2)], [(2, 0, 41), (0, 33, 34)], [(0, 34, 70), (1, 2, 9)]]
    assert torch.equal(made(cut), found)


@pytest.mark.usefixtures("operators")
def test_tokens_of_pools_are_the_references() -> None:
    pages = Pages([50, 7], 16)
    spans: Spans = [(0, 45, 50), (1, 0, 7)]
    rate, top_k = 4, 3
    pools = torch.full((12, top_k), -1, dtype=torch.int32)
    seen = torch.tensor([*range(46, 51), *range(1, 8)])
    for row, count in enumerate((seen // rate).tolist()):
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(row))[:top_k].sort().values
        pools[row, : len(chosen)] = chosen
    found = ops.tokens_of_pools(pools, pages.step(spans), rate)
    assert torch.equal(found, tokens_of_pools(pools, seen, rate))
