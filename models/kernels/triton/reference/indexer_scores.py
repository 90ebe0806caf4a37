"""What `models.kernels.triton.indexer_scores` computes, in torch: a token at a time."""

import torch


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """As the kernel's launcher."""
    scores = torch.full((len(q), width), -torch.inf, device=q.device)
    for token, (row, length) in enumerate(zip(token_rows.tolist(), token_lens.tolist(), strict=True)):
        places = torch.arange(length, device=q.device)
        keys = vectors[block_tables[row].long()[places // vectors.shape[1]], places % vectors.shape[1]]
        scores[token, :length] = weights[token] @ (q[token].float() @ keys.float().T).relu()
    return scores
