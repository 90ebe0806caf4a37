"""The CPU's operators of latent attention against references, for every instruction set of this processor."""

import itertools

import pytest
import torch

from models.ops.cpu import attention as attention_ops
from models.ops.cpu import latent_attention as latent_ops
from models.ops.cpu import runtime, structures
from models.ops.torch_ops import deinterleave, rotate
from tests.parity.test_cpu_operators import Cache, bf16, operators, pytestmark

__all__ = ["operators", "pytestmark"]

Spans = list[tuple[int, int, int]]


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("rows", "heads", "nope", "v", "rank"), [(1, 1, 16, 16, 32), (7, 4, 100, 33, 64), (600, 3, 64, 96, 32)]
)
def test_heads_go_into_the_latents_space_and_come_back(rows: int, heads: int, nope: int, v: int, rank: int) -> None:
    kv_b, q = bf16(heads, nope + v, rank), bf16(rows, heads, nope + 32, seed=1)
    packed = latent_ops.PackedHeads(kv_b, nope)
    there = latent_ops.latent_queries(q, packed, rank + 32)[..., :rank]
    expected = torch.einsum("thn,hnr->thr", q[..., :nope].double(), kv_b[:, :nope].double())
    assert (there - expected).abs().max() <= 1e-2 * expected.abs().max()
    attended = there.contiguous()
    back = latent_ops.latent_values(attended, packed)
    expected = torch.einsum("thr,hvr->thv", attended.double(), kv_b[:, nope:].double())
    assert (back - expected).abs().max() <= 1e-2 * expected.abs().max()
    alone = torch.cat([latent_ops.latent_values(some, packed) for some in attended.split(5)])
    assert torch.equal(alone, back)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_latents_are_normalised_rotated_and_stored(is_interleaved: bool) -> None:
    tokens, heads, nope, rank, rope = 5, 3, 24, 40, 8
    q, latent = bf16(tokens, heads, nope + rope), bf16(tokens, rank + rope, seed=1)
    norm, latent_q = bf16(rank, seed=2), bf16(tokens, heads, rank + rope, seed=3)
    before = latent_q.clone()
    cos, sin = (
        each[:, None] for each in attention_ops.rope_table(torch.arange(tokens) * 7, torch.rand(rope // 2), 1.0)
    )
    cache = torch.full((2, 16, rank + rope), torch.nan, dtype=torch.bfloat16)
    step = attention_ops.make_step(
        slots=torch.arange(16, 16 + tokens),
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
    )
    latent_ops.latent_store(
        q, latent, latent_q, cache, step, norm=(norm, 1e-6), rotation=(cos, sin), is_interleaved=is_interleaved
    )

    def rotated(x: torch.Tensor) -> torch.Tensor:
        last = x[..., -rope:].float()
        return rotate(deinterleave(last) if is_interleaved else last, cos, sin)

    assert torch.equal(latent_q[..., :rank], before[..., :rank])
    torch.testing.assert_close(latent_q[..., rank:].float(), rotated(q), rtol=2**-7, atol=1e-5)
    stored = cache[1, :tokens].float()
    normed = torch.nn.functional.rms_norm(latent[:, :rank].float(), (rank,), norm.float(), 1e-6)
    torch.testing.assert_close(stored[:, :rank], normed, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(stored[:, rank:], rotated(latent[:, None])[:, 0], rtol=2**-7, atol=1e-5)
    assert cache[0].isnan().all()
    assert not cache[1, tokens:].any(), "what an earlier owner left is gone"


def attend(
    q: list[torch.Tensor], latents: list[torch.Tensor], steps: list[Spans], rank: int, block_size: int
) -> list[torch.Tensor]:
    """Attention of all sequences, computed in these steps. # each [n, heads, rank]"""
    heads, dim = q[0].shape[1:]
    size = latent_ops.stored_size(dim)
    cache = Cache(1, size, block_size, max(map(len, q)), len(q))
    vectors = cache.k[:, 0, :, :dim]
    out = [each.new_empty(len(each), heads, rank) for each in q]
    norm, rope = torch.ones(rank).bfloat16(), dim - rank
    for spans in steps:
        step, kept = cache.step(spans)
        queries, new = (torch.cat([of[s][first:past] for s, first, past in spans]) for of in (q, latents))
        in_latents = torch.nn.functional.pad(queries, (0, size - dim), value=torch.nan)
        unrotated = torch.ones(len(new), 1, rope), torch.zeros(len(new), 1, rope)
        latent_ops.latent_store(
            queries[..., rank:].contiguous(),
            new,
            in_latents,
            vectors,
            step,
            norm=(norm, 0.0),
            rotation=unrotated,
            is_interleaved=False,
        )
        found = latent_ops.latent_attention(in_latents, vectors, step, rank, 0.3)
        parts = found.split([past - first for _, first, past in spans])
        for (sequence, first, past), part in zip(spans, parts, strict=True):
            out[sequence][first:past] = part
        del kept
    return out


def unit_latents(n: int, rank: int, rope: int, *, seed: int) -> torch.Tensor:
    """Latents that their norm leaves unchanged up to rounding. # [n, rank + rope]"""
    values = bf16(n, rank + rope, seed=seed).float()
    values[:, :rank] = torch.nn.functional.rms_norm(values[:, :rank], (rank,))
    return values.bfloat16()


def reference(q: torch.Tensor, latents: torch.Tensor, rank: int) -> torch.Tensor:
    """Attention in float64. # [n, heads, dim], [n, dim] -> [n, heads, rank]"""
    scores = torch.einsum("qhd,kd->hqk", q.double(), latents.double()) * 0.3
    weights = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, latents[:, :rank].double())


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block_size"),
    [(1, 32, 32, 16), (16, 64, 32, 16), (5, 512, 64, 32), (40, 96, 32, 48), (3, 20, 12, 16), (7, 36, 8, 16)],
)
def test_attention_equals_the_reference_in_any_steps(heads: int, rank: int, rope: int, block_size: int) -> None:
    lengths = (70, 5, 133)
    q = [bf16(n, heads, rank + rope, seed=n) for n in lengths]
    latents = [unit_latents(n, rank, rope, seed=n + 1) for n in lengths]
    whole = attend(q, latents, [[(0, 0, 70), (1, 0, 5), (2, 0, 133)]], rank, block_size)
    for found, *own in zip(whole, q, latents, strict=True):
        expected = reference(*own, rank)
        assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
    steps: list[Spans] = [
        [(2, 0, 64), (1, 0, 2)],
        [(2, 64, 65), (1, 2, 5), (0, 0, 3)],
        [(2, 65, 132), (0, 3, 69)],
        [(0, 69, 70), (2, 132, 133)],
    ]
    for found, in_chunks in zip(whole, attend(q, latents, steps, rank, block_size), strict=True):
        assert torch.equal(found, in_chunks)


@pytest.mark.usefixtures("operators")
def test_a_long_context_equals_the_reference() -> None:
    """Longer than one pass of the softmax."""
    n, rank, rope = 1400, 64, 32
    q, latents = bf16(n, 2, rank + rope), unit_latents(n, rank, rope, seed=1)
    bounds = (0, 1000, 1399, 1400)
    (found,) = attend([q], [latents], [[(0, *span)] for span in itertools.pairwise(bounds)], rank, 16)
    expected = reference(q, latents, rank)
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
    (whole,) = attend([q], [latents], [[(0, 0, n)]], rank, 16)
    assert torch.equal(found, whole)


def test_latents_of_other_shapes_are_left_to_torch() -> None:
    runtime.start(1)
    q = bf16(1, 2, 64)
    assert latent_ops.supports(q, bf16(2, 16, 96), 64)
    assert latent_ops.supports(q, bf16(2, 16, structures.MAX_LATENT_RANK + 64), structures.MAX_LATENT_RANK)
    assert latent_ops.supports(q, bf16(2, 16, 96)[..., :80], 40)
    assert not latent_ops.supports(q, bf16(2, 16, 100), 64)
    assert not latent_ops.supports(q, bf16(2, 1, 96), 64)
    assert not latent_ops.supports(q, bf16(2, 16, 96).float(), 64)
    assert not latent_ops.supports(q, bf16(2, 16, 672), 512)
    assert not latent_ops.supports(q, bf16(2, 16, 576), 544)
