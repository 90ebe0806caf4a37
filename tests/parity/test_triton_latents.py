"""The kernels of latent attention and its indexer against their torch references."""

import pytest
import torch

from models.attention.cpu import normalize_and_rotate
from models.layers.norm import RMSNorm
from models.ops.triton import cache_store as latent_store
from models.ops.triton import latent_attention
from models.ops.triton import latent_attention as indexer_scores
from models.ops.triton import latent_attention as latent_prefill
from models.ops.triton.cases import latent_attention as reference
from models.ops.triton.latent_attention import Piece
from models.ops.types import LatentInputs
from tests.parity.triton_interpreter import DEVICE, rdna  # noqa: F401, a fixture

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BLOCK_SIZE = 16


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def pages(lengths: list[int], dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of rows with blocks in random order, not finite after a row's end; and the rows' tables."""
    width = -(-max(lengths) // BLOCK_SIZE)
    num_blocks = len(lengths) * width
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).int()
    tables = order.view(len(lengths), width).to(DEVICE)
    vectors = torch.full((num_blocks, BLOCK_SIZE, dim), torch.nan, device=DEVICE).to(dtype)
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        vectors[tables[row].long().cpu()[at // BLOCK_SIZE].to(DEVICE), (at % BLOCK_SIZE).to(DEVICE)] = random(
            length, dim, seed=row
        ).to(dtype)
    return vectors, tables


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@DTYPES
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 32, 16), (5, 32, 8), (18, 24, 8)])
def test_latent_decode(heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    lengths = [1, 17, 48, 130]
    vectors, tables = pages(lengths, rank + rope, dtype)
    q, q_rope = random(5, heads, rank, dtype=dtype), random(5, heads, rope, dtype=dtype)
    rows, lens = ints(3, 0, 1, 2, 3), ints(130, 1, 17, 48, 96)
    found = latent_attention.latent_attention(q, q_rope, vectors, tables, rows, lens, longest=130, scale=0.2)
    expected = reference.reference_latent_attention(q, q_rope, vectors, tables, rows, lens, scale=0.2).value.to(
        found.dtype
    )
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.usefixtures("rdna")
@DTYPES
@pytest.mark.parametrize("is_sparse", [False, True])
def test_latents_that_are_multiplied_in_parts(is_sparse: bool, dtype: torch.dtype) -> None:
    heads, rank, rope = 5, 300, 24
    lengths = [1, 70]
    vectors, tables = pages(lengths, rank + rope, dtype)
    q, q_rope = random(2, heads, rank, dtype=dtype), random(2, heads, rope, dtype=dtype)
    rows, lens = ints(1, 0), ints(70, 1)
    selected = torch.tensor([[69, -1, 3, 44], [0, -1, -1, -1]], device=DEVICE)
    options = {"scale": 0.05, "selected": selected if is_sparse else None}
    found = latent_attention.latent_attention(q, q_rope, vectors, tables, rows, lens, longest=70, **options)
    expected = reference.reference_latent_attention(q, q_rope, vectors, tables, rows, lens, **options).value.to(
        found.dtype
    )
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_runs_of_a_token_are_shorter_where_it_sees_few_latents() -> None:
    """At the lengths where the run length changes, in a step whose longest token has fewer runs than another."""
    lengths = [256, 257, 512, 513, 1100]
    vectors, tables = pages(lengths, 24, torch.float32)
    q, q_rope = random(5, 2, 16), random(5, 2, 8)
    rows, lens = ints(0, 1, 2, 3, 4), ints(*lengths)
    found = latent_attention.latent_attention(q, q_rope, vectors, tables, rows, lens, longest=1100, scale=0.2)
    expected = reference.reference_latent_attention(q, q_rope, vectors, tables, rows, lens, scale=0.2).value
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("run", [64, 512, 1024])
def test_there_is_memory_for_the_runs_of_all_shorter_tokens(run: int) -> None:
    def runs(length: int) -> int:
        part = run // 4 if length <= 16 * (run // 4) else run // 2
        long = run * max(-(-length // (run * 64)), 1)
        return -(-length // (part if length <= 16 * (run // 2) else long))

    ends = sorted({near + off for near in (run, 4 * run, 8 * run, 16 * run, 64 * run, 65 * run) for off in (-1, 0, 1)})
    for longest in (1, *ends):
        assert max(runs(length) for length in (1, *ends) if length <= longest) <= latent_attention.most_runs(
            longest, run
        )


def test_a_token_attends_to_the_same_bits_whatever_is_beside_it() -> None:
    vectors, tables = pages([130, 40], 40, torch.float32)
    q = random(2, 4, 40).split([32, 8], -1)
    both = latent_attention.latent_attention(*q, vectors, tables, ints(1, 0), ints(40, 130), longest=130, scale=0.2)
    first = [part[:1] for part in q]
    alone = latent_attention.latent_attention(*first, vectors, tables, ints(1), ints(40), longest=40, scale=0.2)
    assert torch.equal(both[:1], alone)


def test_latent_decode_of_an_8_bit_cache() -> None:
    vectors, tables = pages([70], 40, torch.float32)
    stored = vectors.nan_to_num(0.0).to(torch.float8_e4m3fn)
    q = random(1, 4, 40).split([32, 8], -1)
    options = {"scale": 0.2, "cache_scale": 0.5}
    found = latent_attention.latent_attention(*q, stored, tables, ints(0), ints(70), longest=70, **options)
    expected = reference.reference_latent_attention(*q, stored, tables, ints(0), ints(70), **options).value.to(
        found.dtype
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@DTYPES
def test_tokens_attend_to_what_they_select(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "MAX_PARTIAL_ELEMENTS", 1)
    lengths = [90, 70]
    vectors, tables = pages(lengths, 40, dtype)
    q, rows, lens = random(3, 5, 40, dtype=dtype).split([32, 8], -1), ints(0, 1, 1), ints(90, 69, 70)
    selected = torch.full((3, 60), -1, device=DEVICE)
    for token, (seen, count) in enumerate(((90, 60), (69, 55), (70, 3))):
        at = torch.randperm(seen, generator=torch.Generator().manual_seed(token))[:count]
        selected[token, torch.randperm(60)[:count].to(DEVICE)] = at.to(DEVICE)
    options = {"scale": 0.2, "selected": selected}
    found = latent_attention.latent_attention(*q, vectors, tables, rows, lens, longest=90, **options)
    expected = reference.reference_latent_attention(*q, vectors, tables, rows, lens, **options).value.to(found.dtype)
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize(("nope", "rope", "value"), [(16, 16, 16), (24, 8, 20)])
def test_prompts_attend_to_expanded_latents_in_pieces(nope: int, rope: int, value: int, dtype: torch.dtype) -> None:
    """A prompt without context; one of 21 tokens after 30 in pieces of 20, 20 and 11; one that a piece covers."""
    heads = 3
    q = random(19 + 21 + 1, heads, nope + rope, dtype=dtype).split([nope, rope], -1)
    expanded, latents = random(19 + 51 + 40, heads, nope + value, dtype=dtype), random(110, 9 + rope, dtype=dtype)
    first = [Piece(0, 19, 0, 19, 0, True, True), Piece(19, 21, 19, 20, 30, True, False)]
    first.append(Piece(40, 1, 70, 40, 39, True, True))
    then = [[Piece(19, 21, 39, 20, 10, False, False)], [Piece(19, 21, 59, 11, -10, False, True)]]
    out = torch.empty(41, heads, value, device=DEVICE, dtype=dtype)
    carried = torch.empty(41, heads, value, device=DEVICE), torch.empty(41, heads, 2, device=DEVICE)
    for pieces in (first, *then):
        table = torch.tensor(pieces, dtype=torch.int32, device=DEVICE)
        latent_prefill.latent_prefill(*q, expanded, latents[:, 9:], table, out, carried, longest=21, scale=0.2)
    every = [piece for pieces in (first, *then) for piece in pieces]
    expected = reference.reference_latent_prefill(*q, expanded, latents[:, 9:], every, 0.2).value.to(out.dtype)
    torch.testing.assert_close(out, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(16, 32), (3, 24)])
def test_indexer_scores(heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths = [50, 7]
    vectors, tables = pages(lengths, dim, dtype)
    q, weights = random(3, heads, dim, dtype=dtype), random(3, heads)
    rows, lens = ints(0, 0, 1), ints(49, 50, 7)
    found = indexer_scores.indexer_scores(q, weights, vectors, tables, rows, lens, 53)
    expected = reference.reference_indexer_scores(q, weights, vectors, tables, rows, lens, 53).value
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@DTYPES
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("is_8_bit", [True, False])
def test_latents_are_stored_normalised_and_rotated(is_interleaved: bool, is_8_bit: bool, dtype: torch.dtype) -> None:
    """The second of three tokens is not stored."""
    heads, nope, rank, rope, scale = 5, 10, 24, 8, 0.5
    q = random(3, heads, nope + rope + 3, dtype=dtype)[..., 3:]
    latent = random(3, rank + rope + 1, dtype=dtype)[:, :-1]
    norm = RMSNorm(rank, 1e-6)
    norm.weight.data = random(rank, dtype=dtype)
    rotation = random(3, 1, rope).cos(), random(3, 1, rope).sin()
    vectors = torch.full((4, BLOCK_SIZE, rank + rope), 7.0, device=DEVICE).to(
        torch.float8_e4m3fn if is_8_bit else dtype
    )
    slots = torch.tensor([37, -1, 3], device=DEVICE)
    found = latent_store.latent_store(
        q,
        latent,
        vectors,
        slots,
        norm=(norm.weight, norm.eps),
        rotation=rotation,
        is_interleaved=is_interleaved,
        scale=scale,
    )
    queries, expected = normalize_and_rotate(q, latent, LatentInputs(norm.operand, rotation, is_interleaved, None))
    torch.testing.assert_close(found, queries[..., nope:], atol=CLOSE[dtype], rtol=CLOSE[dtype])
    stored = vectors.view(-1, rank + rope).float()
    kept = stored[[37, 3]] * (scale if is_8_bit else 1.0)
    close = 0.07 if is_8_bit else CLOSE[dtype]
    torch.testing.assert_close(kept, expected[[0, 2]].float(), atol=close, rtol=close)
    others = torch.ones(len(stored), dtype=torch.bool)
    others[[37, 3]] = False
    assert (stored[others.to(DEVICE)] == 7.0).all()


def test_vectors_are_stored_as_they_are() -> None:
    vectors, rows = torch.zeros(2, BLOCK_SIZE, 24, device=DEVICE), random(3, 24)
    latent_store.vector_store(rows, vectors, torch.tensor([20, -1, 0], device=DEVICE))
    stored = vectors.view(-1, 24)
    assert torch.equal(stored[[20, 0]], rows[[0, 2]])
    assert torch.count_nonzero(stored.abs().sum(-1)) == 2
