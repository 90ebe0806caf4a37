"""`OutputHead`: from a step's hidden states to logits, argmax tokens or log probabilities of prompts.

Each rank holds a shard of the head's rows. Where all rows of a step are greedy, the ranks reduce the argmax tokens of
their shards, a few bytes a row; otherwise they gather the logits. On a CPU the compiled operators compute an argmax
without storing logits.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from engine.batch import PromptSpan
from engine.messages import TokenLogprobs
from engine.runner.input_batch import StepInputs
from engine.runner.loaded_model import LoadedModel
from engine.sampling.logprobs import compute_prompt_logits, read_prompt_logprobs
from engine.sampling.parameters import SamplingRows
from engine.sampling.sampler import LaunchedTokens
from engine.sampling.top_k import argmax
from engine.sampling.torch_ops import Candidates
from engine.speculative.drafts import max_sampled_tokens
from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM
from models.layers.linear import ParallelLMHead
from models.ops.cpu.runtime import Library
from models.ops.cpu.sampling import GreedyHead


class OutputHead:
    """The head of a loaded model on one rank. All ranks make the same calls."""

    def __init__(self, loaded: LoadedModel, operators: Library | None) -> None:
        """`operators` compute argmax tokens, if they support the head; None where torch computes them."""
        self._loaded, self._model, self._parallel = loaded, loaded.model, loaded.parallel
        self.greedy: GreedyHead | None = None
        """Computes argmax tokens of this rank's shard from hidden states without storing logits."""
        if operators is not None and loaded.generates and isinstance(loaded.model_config, ModelConfig):
            most = loaded.config.max_num_seqs
            max_rows = max_sampled_tokens(most) if loaded.config.num_drafts else most
            self.greedy = GreedyHead.of(operators, self._shard_logits, loaded.model_config.hidden_size, max_rows)

    def logits_or_tokens(
        self, hidden: torch.Tensor, inputs: StepInputs, *, by_shard: bool
    ) -> torch.Tensor | LaunchedTokens:
        """Logits, or argmax tokens where all rows are greedy and no logits are needed. # [S, H] -> [S, V] float32

        `by_shard`: whether several ranks reduce argmax tokens; rank 0 then gets the tokens, the others none.
        """
        if not self._loaded.generates:
            return _no_tokens()
        head = self.greedy
        if head is not None and (inputs.adapters is not None or len(hidden) > head.max_rows):
            head = None
        if self._parallel.size > 1:
            return self._argmax_over_ranks(hidden, head) if by_shard else self._model.compute_logits(hidden)
        if head is not None and inputs.sampling is not None and inputs.sampling.is_greedy:
            return LaunchedTokens.of_host(*head.choose(hidden))
        return self._model.compute_logits(hidden)

    def prompt_logprobs(
        self, hidden: torch.Tensor, spans: list[PromptSpan], on_slice: Callable[[], object]
    ) -> dict[int, list[TokenLogprobs]]:
        """The log probabilities of prompt tokens by sequence, on rank 0. `on_slice` as in `read_prompt_logprobs`.
        # hidden [T, H]"""
        vocab_size = self._loaded.model_config.vocab_size
        if self._parallel.rank == 0:
            return read_prompt_logprobs(hidden, self._model.compute_logits, spans, vocab_size, on_slice)
        compute_prompt_logits(hidden, self._model.compute_logits, spans, vocab_size)
        return {}

    def _argmax_over_ranks(self, hidden: torch.Tensor, head: GreedyHead | None) -> LaunchedTokens:
        """The argmax over the ranks' shards, on rank 0; other ranks get no tokens. # [S, H]

        Of equal logits the lowest token id wins; a NaN wins over numbers.
        """
        first_token = self._lm_head.first_row
        # The shards of the last ranks may hold padding only.
        if head is None or first_token >= self._lm_head.vocab_size:
            peaks, token_ids = _argmax_of_shard(self._shard_logits(hidden), first_token)
        else:
            chosen, values = head.choose(hidden)
            peaks, token_ids = torch.from_numpy(values), torch.from_numpy(chosen) + first_token
        mine = torch.stack((peaks.double(), token_ids.double()), -1)  # [S, 2], exact for any id
        gathered = self._parallel.gather(mine)  # [S, 2 * size]
        if self._parallel.rank:
            return _no_tokens()
        pairs = gathered.view(len(mine), self._parallel.size, 2)
        best = argmax(pairs[:, :, 0])
        candidates = Candidates.empty(len(mine), pairs.device)
        candidates.peaks.copy_(pairs[:, :, 0].gather(1, best[:, None])[:, 0])
        candidates.tokens.copy_(pairs[:, :, 1].gather(1, best[:, None])[:, 0])
        return LaunchedTokens(SamplingRows(), candidates)

    def _shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens whose rows of the head are on this rank. # [S, H] -> [S, tokens] float32"""
        if self._parallel.size == 1:
            return self._model.compute_logits(hidden)
        self._lm_head.gives_parts = True
        try:
            return self._model.compute_logits(hidden)
        finally:
            self._lm_head.gives_parts = False

    @property
    def _lm_head(self) -> ParallelLMHead:
        return cast(LlamaForCausalLM, self._model).lm_head


def _argmax_of_shard(logits: torch.Tensor, first_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit in a rank's shard of the vocabulary, and its token. # [S, tokens] -> 2 x [S]"""
    if logits.shape[1] == 0:
        return logits.new_full((len(logits),), -torch.inf), logits.new_zeros(len(logits), dtype=torch.int64)
    best = argmax(logits)
    return logits.gather(-1, best[:, None])[:, 0], best + first_token


def _no_tokens() -> LaunchedTokens:
    return LaunchedTokens.of_host(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
