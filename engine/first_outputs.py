"""What the scheduler tells with a sequence's first output, and of its prompt. Called by its `postprocess`."""

import time
from collections.abc import Iterable

from engine.messages import RequestOutput, TokenLogprobs
from engine.sequence import Sequence


def tell_first_token(seq: Sequence, output: RequestOutput) -> None:
    """Add to a sequence's first output what is known only now."""
    seq.first_token_time = time.time()
    output.queue_time = max(0.0, seq.schedule_time - seq.arrive_time)
    output.num_cached_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
    if seq.prompt_logprobs is not None:
        output.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None


def take_token_back(seq: Sequence, output: RequestOutput) -> None:
    """End a sequence that wanted its prompt computed and nothing more: the token sampled behind it is dropped."""
    seq.token_ids.pop()
    output.output_tokens.clear()
    seq.leave_reason = output.finish_reason = "max_tokens"


def keep_prompt_logprobs(seqs: Iterable[Sequence], told: dict[int, list[TokenLogprobs]]) -> None:
    """Add what a step computed of its prompts, until all of it is sent with the first output."""
    for seq in seqs:
        if seq.id in told and seq.prompt_logprobs is not None:
            seq.prompt_logprobs += told[seq.id]
