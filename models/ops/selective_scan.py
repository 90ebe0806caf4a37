"""The selective state space of Mamba (Gu and Dao, 2023), token by token.

Each channel has a state h of N numbers. For each token, with key B [N] and query C [N]:

    h = exp(dt * a) * h + dt * x * B;  output = C . h + d * x

Both functions compute in float32 and update the state in place.
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
    """Process one token of each of B sequences; update `state`, and return the outputs.

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
    """Process consecutive tokens of one sequence; update `state`, and return the outputs.

    # x and dt [T, channels], b and c [T, N], a [N, channels], d [channels], state [N, channels] -> [T, channels]
    """
    read = torch.empty_like(x)
    for token in range(len(x)):
        at = slice(token, token + 1)
        read[at] = selective_scan_step(x[at], b[at], c[at], dt[at], a, d, state[None])
    return read
