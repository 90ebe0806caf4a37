"""What `models.kernels.triton.gated_delta_net` computes, in torch: a token at a time, in float32."""

import torch
import torch.nn.functional as F

from models.kernels.triton.gated_delta_net import DeltaPlan
from models.layers.gated_delta_rule import delta_rule_step


def delta_net(
    projected: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    inputs: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
) -> torch.Tensor:
    """As the kernels' launcher."""
    _, heads, key_dim, value_dim = states.shape
    group, weight = heads // key_heads, conv[:, 0].float()
    spans = [(row, 1, False) for row in range(plan.num_decodes)]
    spans += [
        (first, count, bool(is_new))
        for first, count, _, is_new in (plan.spans.tolist() if plan.spans is not None else ())
    ]
    out = projected.new_empty(len(projected), heads, value_dim)
    sizes = [key_dim, key_dim, group * value_dim, group * value_dim]
    for slot, (first, count, is_new) in zip(plan.slots.tolist(), spans, strict=True):
        if is_new:
            inputs[slot], states[slot] = 0, 0
        for token in range(first, first + count):
            *parts, z = torch.split(projected[token].view(key_heads, -1), sizes, -1)
            window = torch.cat((inputs[slot], torch.cat([part.flatten() for part in parts])[:, None]), -1)
            inputs[slot] = window[:, 1:]
            mixed = F.silu((window.float() * weight).sum(-1)).to(projected.dtype).float()
            q, k, v = torch.split(mixed, [key_heads * key_dim, key_heads * key_dim, heads * value_dim])
            q, k = (x.view(key_heads, key_dim).repeat_interleave(group, 0) for x in (q, k))
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            b, a = torch.split(ba[token].view(key_heads, -1).float(), group, -1)
            decay = -a_log.float().exp() * F.softplus(a.flatten() + dt_bias.float())
            state = states[slot][None]
            read = delta_rule_step(
                q[None] * key_dim**-0.5, k[None], v.view(1, heads, -1), decay[None], b.flatten().sigmoid()[None], state
            )
            states[slot] = state[0]
            read = F.rms_norm(read[0].to(projected.dtype).float(), (value_dim,), eps=norm[1]).to(projected.dtype)
            gate = F.silu(z.reshape(heads, value_dim).float())
            out[token] = (norm[0].float() * read.float() * gate).to(projected.dtype)
    return out.view(len(out), -1)
