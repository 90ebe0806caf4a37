"""The selective state space of Mamba-2 (Dao and Gu, 2024), token by token and chunk by chunk.

A head has a state S [state_size, head_dim]. For each token, with key B and query C:

    S = exp(dt * a) * S + B (dt * x);  output = C S + d * x

Groups of consecutive heads share B and C. Both functions compute in float32 and update S in place.
"""

import torch

from models.ops.torch_ops import decays_between

_CHUNK = 64


def state_space_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Process one token of each of B sequences; update `state`, and return the outputs.

    # x [B, H, P], b and c [B, G, N], dt [B, H], a and d [H], state [B, H, N, P] float32 -> [B, H, P] float32
    """
    group = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(group, 1) for part in (b, c))
    state *= (dt * a).exp()[..., None, None]
    state += b[..., None] * (dt[..., None] * x)[..., None, :]
    return (c[..., None, :] @ state)[..., 0, :] + d[:, None] * x


def state_space_span(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Process consecutive tokens of one sequence; update `state`, and return the outputs.

    # x [T, H, P], b and c [T, G, N], dt [T, H], a and d [H], state [H, N, P] float32 -> [T, H, P] float32
    """
    read = torch.empty_like(x)
    for first in range(0, len(x), _CHUNK):
        part = slice(first, first + _CHUNK)
        read[part] = _chunk(x[part], b[part], c[part], dt[part], a, state)
    return read + d[:, None] * x


def _chunk(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Process the tokens of a chunk at once: contributions of earlier tokens of the chunk, and of the initial
    state."""
    group = x.shape[1] // b.shape[1]
    decay = (dt * a).T  # [H, T], logarithms
    since_start = decay.cumsum(-1).exp()[..., None]  # [H, T, 1], from before the chunk to each token
    between = decays_between(decay)  # [H, T, T]
    overlap = (c.transpose(0, 1) @ b.permute(1, 2, 0)).repeat_interleave(group, 0)  # [H, T, T]
    added = (dt[..., None] * x).transpose(0, 1)  # [H, T, P]
    by_head_b, by_head_c = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (b, c))  # [H, T, N]
    read: torch.Tensor = (overlap * between) @ added + since_start * (by_head_c @ state)
    state *= since_start[:, -1:]
    state += (by_head_b * between[:, -1, :, None]).transpose(1, 2) @ added
    return read.transpose(0, 1)
