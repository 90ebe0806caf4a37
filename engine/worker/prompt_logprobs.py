"""`read_prompt_logprobs`: log probabilities of prompt tokens, from a prefill's hidden states. Called by the runner."""

from collections.abc import Callable, Iterator

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
    read: dict[int, list[TokenLogprobs]] = {span.seq_id: [] for span in spans}
    for span, start, rows in _pieces(hidden, spans, vocab_size):
        logits = compute_logits(rows)
        tokens = torch.tensor(span.token_ids[start : start + len(rows)], device=logits.device)
        read[span.seq_id] += token_logprobs(logits, tokens, [span.num_alternatives] * len(rows))
    return read


def compute_prompt_logits(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    spans: list[PromptSpan],
    vocab_size: int,
) -> None:
    """Take part, as another rank, in what `read_prompt_logprobs` computes on the first. # hidden [T, H]"""
    for _, _, rows in _pieces(hidden, spans, vocab_size):
        compute_logits(rows)


def _pieces(
    hidden: torch.Tensor, spans: list[PromptSpan], vocab_size: int
) -> Iterator[tuple[PromptSpan, int, torch.Tensor]]:
    """Of each span its parts: from which of its tokens on, and the rows that tell of them."""
    piece = max(1, _LOGITS_AT_A_TIME // vocab_size)
    for span in spans:
        for start in range(0, len(span.token_ids), piece):
            count = min(piece, len(span.token_ids) - start)
            yield span, start, hidden[span.first + start :][:count]
