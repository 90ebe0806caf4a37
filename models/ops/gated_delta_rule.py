"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2025), token by token and chunk by chunk.

A head's state S, keys by values, first decays by `exp(decay)`, then moves what it holds under the key k towards the
value v by the share beta; the query reads it afterwards. Both functions compute in float32 and leave S in place.
"""

import torch

_CHUNK = 64


def delta_rule_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token of each of B sequences; `state` is brought up to date. Returns what the queries read.

    # q, k [B, H, K], v [B, H, V], decay and beta [B, H], state [B, H, K, V] float32 -> [B, H, V] float32
    """
    state *= decay.exp()[..., None, None]
    held = (k[..., None, :] @ state)[..., 0, :]
    state += k[..., None] * ((v - held) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :]


def delta_rule_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Consecutive tokens of one sequence; `state` is brought up to date. Returns what the queries read.

    # q, k [H, T, K], v [H, T, V], decay and beta [H, T], state [H, K, V] float32 -> [H, T, V] float32
    """
    read = torch.empty_like(v)
    for first in range(0, v.shape[1], _CHUNK):
        part = slice(first, first + _CHUNK)
        read[:, part] = _chunk(q[:, part], k[:, part], v[:, part], decay[:, part], beta[:, part], state)
    return read


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """A chunk at once: every token's correction u solves (I + L) u = beta (v - what the first state holds under k).

    L is what the corrections before a token left under its key: beta_t (k_t . k_j) times the decay from j to t.
    """
    since_start = decay.cumsum(-1)  # [H, T], log of the decay from before the chunk to behind each token
    between = (since_start[:, :, None] - since_start[:, None, :]).tril().exp().tril()  # [H, T, T]
    shrunk = since_start.exp()[..., None]
    wanted = beta[..., None] * (v - shrunk * (k @ state))
    overlap = (beta[..., None] * (k @ k.transpose(1, 2)) * between).tril(-1)
    corrections = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read: torch.Tensor = shrunk * (q @ state) + ((q @ k.transpose(1, 2)) * between) @ corrections
    to_end = (since_start[:, -1:] - since_start).exp()[..., None]
    state *= since_start[:, -1].exp()[:, None, None]
    state += (k * to_end).transpose(1, 2) @ corrections
    return read
