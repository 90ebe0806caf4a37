"""What `models.kernels.triton.latent_attention` and `latent_prefill` compute, in torch: a token at a time."""

from collections.abc import Iterable

import torch

from models.kernels.triton.latent_prefill import Piece


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    *,
    scale: float,
    cache_scale: float = 1.0,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the kernel's launcher."""
    block_size = vectors.shape[1]
    out, rank = torch.empty_like(q), q.shape[2]
    for token, (row, length) in enumerate(zip(token_rows.tolist(), token_lens.tolist(), strict=True)):
        places = torch.arange(length, device=q.device)
        if selected is not None:
            places = selected[token][selected[token] >= 0]
        blocks = block_tables[row].long()[places // block_size]
        latents = vectors[blocks, places % block_size].float() * cache_scale
        shares = (torch.cat((q[token], q_rope[token]), -1).float() @ latents.T * scale).softmax(-1)
        out[token] = (shares @ latents[:, :rank]).to(q.dtype)
    return out


def latent_prefill(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    pieces: Iterable[Piece],
    scale: float,
) -> torch.Tensor:
    """As the kernel's launcher over all of every row's pieces. # -> [T, H, v], zero for tokens of no row"""
    nope = q.shape[2]
    whole = torch.cat((q, q_rope), -1).float()
    out = q.new_zeros(*q.shape[:2], expanded.shape[2] - nope)
    of_row: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_row.setdefault(piece.first_query, []).append(piece)
    for parts in of_row.values():
        places = torch.cat([torch.arange(one.first_key, one.first_key + one.num_keys) for one in parts])
        keys = expanded[places].float()
        rotated = shared[places].float()[:, None].expand(-1, q.shape[1], -1)
        k, v = torch.cat((keys[..., :nope], rotated), -1), keys[..., nope:]
        first, count = parts[0].first_query, parts[0].num_queries
        scores = torch.einsum("qhd,khd->hqk", whole[first : first + count], k) * scale
        hidden = torch.arange(len(places)) > parts[0].offset + torch.arange(count)[:, None]
        shares = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        out[first : first + count] = torch.einsum("hqk,khv->qhv", shares, v).to(q.dtype)
    return out
