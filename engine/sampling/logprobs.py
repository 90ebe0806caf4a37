"""Log probabilities of sampled and of prompt tokens, with the top alternatives at each position.

On the device they are columns (`torch_ops.LogprobColumns`). `pack_logprobs` packs them into one tensor, which is
copied to the host at once.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from engine.batch import PromptSpan
from engine.messages import TokenLogprobs
from engine.sampling.ops import ops_for
from engine.sampling.torch_ops import LogprobColumns

_LOGITS_AT_A_TIME = 1 << 22
"""Most logits of prompt tokens in memory at a time (16 MiB): those of a whole prompt may be gigabytes."""
_TOKENS_AT_A_TIME = 128
"""Most prompt tokens at a time: a CPU takes 3 ms for them, after which short prompts of other requests may be due."""


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Compute log probability and rank of each row's token, and its top `counts` tokens. # logits [R, V], token_ids
    [R]

    Of equal logits the token with the lower id ranks first.
    """
    columns = ops_for(logits).logprobs(logits, token_ids, min(max(counts), logits.shape[-1]))
    return unpack_logprobs(pack_logprobs(token_ids, columns).cpu(), counts)


def pack_logprobs(token_ids: torch.Tensor, columns: LogprobColumns) -> torch.Tensor:
    """Pack tokens and columns of `count` alternatives into words. # [R], columns -> [R, 3 + 2 * count] int64

    The words of a row are: the token, its log probability, its rank, the top tokens, and their log probabilities.
    """
    logprobs, ranks, top_ids, top_logprobs = columns
    bits = torch.cat((logprobs[:, None], top_logprobs), -1).view(torch.int32).long()
    return torch.cat((token_ids[:, None], bits[:, :1], ranks[:, None], top_ids, bits[:, 1:]), -1)


def unpack_logprobs(words: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Unpack `pack_logprobs`' words on the host. `counts` has the number of alternatives that each row asked for."""
    most = (words.shape[1] - 3) // 2
    floats = words.int().view(torch.float32)
    return [
        TokenLogprobs(row[0], values[1], tuple(row[3 : 3 + count]), tuple(values[3 + most : 3 + most + count]), row[2])
        for count, row, values in zip(
            (min(count, most) for count in counts), words.tolist(), floats.tolist(), strict=True
        )
    ]


def read_prompt_logprobs(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    spans: list[PromptSpan],
    vocab_size: int,
    on_slice: Callable[[], object] = lambda: None,
) -> dict[int, list[TokenLogprobs]]:
    """Compute log probabilities of prompt tokens from a prefill's hidden states, by sequence. # hidden [T, H]

    `on_slice` is called after each slice of tokens. It may compute other logits.
    """
    read: dict[int, list[TokenLogprobs]] = {span.seq_id: [] for span in spans}
    for span, start, rows in _slices(hidden, spans, vocab_size):
        logits = compute_logits(rows)
        tokens = torch.tensor(span.token_ids[start : start + len(rows)], device=logits.device)
        read[span.seq_id] += token_logprobs(logits, tokens, [span.num_alternatives] * len(rows))
        on_slice()
    return read


def compute_prompt_logits(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    spans: list[PromptSpan],
    vocab_size: int,
) -> None:
    """On other ranks, take part in the computation of `read_prompt_logprobs` on rank 0. # hidden [T, H]"""
    for _, _, rows in _slices(hidden, spans, vocab_size):
        compute_logits(rows)


def _slices(
    hidden: torch.Tensor, spans: list[PromptSpan], vocab_size: int
) -> Iterator[tuple[PromptSpan, int, torch.Tensor]]:
    """Yield slices of each span: the span, the index of the slice's first token in it, and the tokens' hidden
    states."""
    size = max(1, min(_LOGITS_AT_A_TIME // vocab_size, _TOKENS_AT_A_TIME))
    for span in spans:
        for start in range(0, len(span.token_ids), size):
            count = min(size, len(span.token_ids) - start)
            yield span, start, hidden[span.first + start :][:count]
