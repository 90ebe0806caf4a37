"""Deferred output over two ranks: rank 1 begins each step with tokens on its device that its host has not read."""

from pathlib import Path
from typing import Any

from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.rank_threads import RankThreads
from tests.parity.test_deferred_output import EOS, matchers, sequences
from tests.parity.test_worker_model_runner import checkpoint, prompts
from tests.sweeps import sweep

__all__ = ["checkpoint", "matchers", "prompts"]

FIELDS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 64, "num_kvcache_blocks": 200, "eos_token_id": EOS}


@sweep(
    fields={
        "mixed": {"scheduling_policy": "mixed", "max_num_batched_tokens": 40},
        "preempted": {"max_num_batched_tokens": 24, "num_kvcache_blocks": 16},
        "drafts": {"speculative_config": {"num_speculative_tokens": 3}},
    },
    structured={"free": False, "by grammars": True},
)
def test_one_step_ahead_on_two_ranks_gives_what_waiting_gives(
    checkpoint: Path, prompts: list[list[int]], matchers: Any, fields: dict[str, Any], structured: bool
) -> None:
    by = matchers if structured else None
    fields = {**FIELDS, **fields}
    expected = RankThreads(checkpoint, **fields).run(
        lambda runner: answers(waiting(runner, sequences(prompts[:12], by)))
    )
    ahead = RankThreads(checkpoint, **fields)
    found = ahead.run(lambda runner: answers(Ahead(runner).run(sequences(prompts[:12], by))))
    assert found == expected
    assert len(found) == 12
    assert all(message.is_deferred for message in ahead.messages)
    if "speculative_config" not in fields:
        # For most decodes the last tokens were only on the device when the step arrived.
        unsent = [
            message
            for message in ahead.messages
            if message.num_decodes and message.number - 1 not in dict(message.sampled)
        ]
        assert len(unsent) > len(ahead.messages) // 2
