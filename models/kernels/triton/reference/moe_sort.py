"""What `models.kernels.triton.moe_sort` computes, in torch: of each block its expert and its pairs, in their order."""

import torch


def moe_sort(ids: torch.Tensor, num_experts: int, block: int) -> list[tuple[int, list[int]]]:
    """Blocks of up to `block` pairs, as they follow each other. # ids [tokens, top_k] int64"""
    experts = ids.flatten()
    blocks = []
    for expert in range(num_experts):
        pairs = (experts == expert).nonzero()[:, 0].tolist()
        blocks += [(expert, pairs[first : first + block]) for first in range(0, len(pairs), block)]
    return blocks
