"""`read_prompt_logprobs`: log probabilities of prompt tokens, from a prefill's hidden states. Called by the runner."""

from collections.abc import Callable

import torch

from engine.batch import PromptSpan
from engine.messages import TokenLogprobs
from engine.worker.token_logprobs import token_logprobs

_LOGITS_AT_A_TIME = 1 << 22
"""A prompt's logits may be gigabytes; no more than this many (16 MiB) exist at a time."""


def read_prompt_logprobs(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    spans: list[PromptSpan],
    vocab_size: int,
) -> dict[int, list[TokenLogprobs]]:
    """By sequence, one entry a token of its span. # hidden [T, H]"""
    read: dict[int, list[TokenLogprobs]] = {}
    piece = max(1, _LOGITS_AT_A_TIME // vocab_size)
    for span in spans:
        entries: list[TokenLogprobs] = []
        for start in range(0, len(span.token_ids), piece):
            token_ids = span.token_ids[start : start + piece]
            first = span.first + start
            logits = compute_logits(hidden[first : first + len(token_ids)])
            tokens = torch.tensor(token_ids, device=logits.device)
            entries += token_logprobs(logits, tokens, [span.num_alternatives] * len(token_ids))
        read[span.seq_id] = entries
    return read
