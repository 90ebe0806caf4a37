"""Attention that the functions share. Not of the library."""

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> None:
    """# q and out [T, Hq, D], k and v [blocks, block, Hkv, D]"""
    places = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        tokens = slice(places[row], places[row + 1])
        count = tokens.stop - tokens.start
        blocks = tables[row, : -(-length // k.shape[1])].long()
        keys, values = (
            pages.float()[blocks].flatten(0, 1)[:length] * (1.0 if scales is None else scales)
            for pages, scales in ((k, k_scale), (v, v_scale))
        )
        group = q.shape[1] // k.shape[2]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at = torch.arange(length)
        hidden = at > at[length - count :, None]
        if window:
            hidden |= at <= at[length - count :, None] - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
