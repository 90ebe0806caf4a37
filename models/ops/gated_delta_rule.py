"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2025), token by token and chunk by chunk.

A head has a state S [key_dim, value_dim]. For each token, with key k, value v and query q:

    S = exp(decay) * S;  S = S + k (beta * (v - k S));  output = q S

Each key dimension may have its own decay (Kimi Linear, 2025). Both functions compute in float32 and update S in place.
"""

import torch

from models.ops.torch_ops import decays_between

_CHUNK = 64
_CHUNK_BY_KEY = 16
"""Chunk length if each dimension of a key has its own decay, which needs a factor for each pair of its tokens."""


def delta_rule_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Process one token of each of B sequences; update `state`, and return the outputs.

    # q, k [B, H, K], v [B, H, V], decay and beta [B, H], state [B, H, K, V] float32 -> [B, H, V] float32

    `decay` may be [B, H, K].
    """
    state *= (decay[..., None] if decay.dim() == beta.dim() else decay).exp()[..., None]
    held = (k[..., None, :] @ state)[..., 0, :]
    state += k[..., None] * ((v - held) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :]


def delta_rule_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Process consecutive tokens of one sequence; update `state`, and return the outputs.

    # q, k [H, T, K], v [H, T, V], decay and beta [H, T], state [H, K, V] float32 -> [H, T, V] float32

    `decay` may be [H, T, K].
    """
    read = torch.empty_like(v)
    by_key = decay.dim() > beta.dim()
    size, chunk = (_CHUNK_BY_KEY, _chunk_by_key) if by_key else (_CHUNK, _chunk)
    for first in range(0, v.shape[1], size):
        part = slice(first, first + size)
        read[:, part] = chunk(q[:, part], k[:, part], v[:, part], decay[:, part], beta[:, part], state)
    return read


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Process the tokens of a chunk at once.

    The corrections u_t, which token t adds to the state under its key, solve a triangular system (I + L) u = w:
    w_t = beta_t (v_t - k_t S_t), where S_t is the initial state decayed to t, and L_tj = beta_t (k_t . k_j) times the
    decay from j to t, for j < t.
    """
    since_start = decay.cumsum(-1).exp()[..., None]  # [H, T, 1], from before the chunk to each token, inclusive
    between = decays_between(decay)  # [H, T, T]
    wanted = beta[..., None] * (v - since_start * (k @ state))
    overlap = (beta[..., None] * (k @ k.transpose(1, 2)) * between).tril(-1)
    corrections = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read: torch.Tensor = since_start * (q @ state) + ((q @ k.transpose(1, 2)) * between) @ corrections
    state *= since_start[:, -1:]
    state += (k * between[:, -1, :, None]).transpose(1, 2) @ corrections
    return read


def _chunk_by_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """`_chunk` with a decay per key dimension. # decay [H, T, K]"""
    since_start = decay.cumsum(1).exp()
    between = decays_between(decay)  # [H, T, T, K]
    wanted = beta[..., None] * (v - (k * since_start) @ state)
    overlap = (beta[..., None] * torch.einsum("htk,hjk,htjk->htj", k, k, between)).tril(-1)
    corrections = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read: torch.Tensor = (q * since_start) @ state + torch.einsum("htk,hjk,htjk->htj", q, k, between) @ corrections
    state *= since_start[:, -1, :, None]
    state += (k * between[:, -1]).transpose(1, 2) @ corrections
    return read
