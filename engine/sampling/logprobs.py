"""`token_logprobs`: what logits say of given tokens and of the likeliest ones. Used for sampled and prompt tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from engine.batch import PromptSpan
from engine.messages import TokenLogprobs
from engine.sampling.top_k import likeliest
from models.ops import triton

if TYPE_CHECKING:
    from models.ops.triton.logits import Logprobs


_Columns: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log probability and rank of each row's token, and the `counts` likeliest ones. # logits [R, V], token_ids [R]

    Of equally likely tokens the one with the lower id ranks first, as in the order of the likeliest.
    """
    most = min(max(counts), logits.shape[-1])
    columns = by_kernels(logits, token_ids, most) or _by_torch(logits, token_ids, most)
    return as_messages(token_ids.tolist(), counts, columns)


def by_kernels(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> "Logprobs | None":
    """What the kernels find, without waiting for it; None where none run, or not for as many of the likeliest."""
    if not triton.runs(logits, operator="sampling"):
        return None
    from models.ops.triton.logits import MAX_LIKELIEST, logprobs

    return logprobs(logits, token_ids, most) if most <= MAX_LIKELIEST else None


def as_messages(
    token_ids: Sequence[int], counts: Sequence[int], columns: "Logprobs | _Columns"
) -> list[TokenLogprobs]:
    """A message a row, from R rows of log probabilities, ranks, and the likeliest ids and their log probabilities."""
    lists = (column.tolist() for column in columns)
    return [
        TokenLogprobs(token, logprob, likeliest_ids[:count], likeliest_logprobs[:count], rank)
        for token, count, logprob, rank, likeliest_ids, likeliest_logprobs in zip(
            token_ids, counts, *lists, strict=True
        )
    ]


def _by_torch(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> _Columns:
    chosen = token_ids[:, None]
    values = logits.gather(-1, chosen)  # [R, 1]
    normaliser = logits.logsumexp(-1, keepdim=True)
    top_values, top_ids = likeliest(logits, most) if most else (logits[:, :0], chosen[:, :0])
    return (values - normaliser)[:, 0], _ranks(logits, token_ids, values), top_ids, top_values - normaliser


def _ranks(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each token's place in its row, from 1. On CPU NumPy counts ten times faster. # values [R, 1] -> [R] int64"""
    if logits.device.type == "cpu":
        rows, own = logits.numpy(), values[:, 0].numpy()
        ranks = [
            1 + int(np.count_nonzero(row[:token] >= value)) + int(np.count_nonzero(row[token + 1 :] > value))
            for row, token, value in zip(rows, token_ids.tolist(), own, strict=True)
        ]
        return torch.tensor(ranks)
    return _ranks_on_device(logits, token_ids, values)


def _ranks_on_device(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """# -> [R] int64"""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    better = (logits > values) | ((logits == values) & (ids < token_ids[:, None]))
    return 1 + better.sum(-1)


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> torch.Tensor:
    """What `token_logprobs` tells, as words, without waiting for the device. # [R, V], [R] -> [R, 3 + 2 * most] int64

    Of each row: the token, its log probability, its rank, and the `most` likeliest tokens and their log probabilities.
    """
    most = min(most, logits.shape[-1])
    columns = by_kernels(logits, token_ids, most)
    if columns is not None:
        return pack_columns(token_ids, columns)
    chosen = token_ids[:, None]
    values = logits.gather(-1, chosen)
    normaliser = logits.logsumexp(-1, keepdim=True)
    top_values, top_ids = likeliest(logits, most) if most else (logits[:, :0], chosen[:, :0])
    ranks = _ranks_on_device(logits, token_ids, values)
    return pack_columns(token_ids, ((values - normaliser)[:, 0], ranks, top_ids, top_values - normaliser))


def pack_columns(token_ids: torch.Tensor, columns: "Logprobs | _Columns") -> torch.Tensor:
    """The words of `pack_logprobs`, of tokens, log probabilities, ranks, the likeliest ids and theirs."""
    logprobs, ranks, top_ids, top_logprobs = columns
    bits = torch.cat((logprobs[:, None], top_logprobs), -1).view(torch.int32).long()
    return torch.cat((token_ids[:, None], bits[:, :1], ranks[:, None], top_ids, bits[:, 1:]), -1)


def unpack_logprobs(words: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """What `pack_logprobs` packed, on the host; `counts` are the likeliest ones that each row asked for."""
    most = (words.shape[1] - 3) // 2
    floats = words.int().view(torch.float32)
    return [
        TokenLogprobs(row[0], values[1], row[3 : 3 + count], values[3 + most : 3 + most + count], row[2])
        for count, row, values in zip(
            (min(count, most) for count in counts), words.tolist(), floats.tolist(), strict=True
        )
    ]


# [prompt_logprobs] `read_prompt_logprobs`: log probabilities of prompt tokens, from a prefill's hidden states.
# Called by the runner.

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
