"""The selective state space of Mamba (Gu and Dao, 2023), token by token.

Each channel has a state of a few numbers. For each token, every number first decays by its own `exp(dt * a)` and then
gains `dt * x` times its key B; the output is their product with the query C, plus `d * x`. Computed in float32; the
state is left in place.
"""

import torch


def selective_scan_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token of each of B sequences; `state` is updated in place. Returns each token's output.

    # x and dt [B, channels], b and c [B, N], a [N, channels], d [channels], state [B, N, channels] -> [B, channels]
    """
    state *= (dt[:, None] * a).exp()
    state += b[..., None] * (dt * x)[:, None]
    return (c[..., None] * state).sum(1) + d * x


def selective_scan_span(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Consecutive tokens of one sequence; `state` is updated in place. Returns each token's output.

    # x and dt [T, channels], b and c [T, N], a [N, channels], d [channels], state [N, channels] -> [T, channels]
    """
    read = torch.empty_like(x)
    for token in range(len(x)):
        at = slice(token, token + 1)
        read[at] = selective_scan_step(x[at], b[at], c[at], dt[at], a, d, state[None])
    return read
