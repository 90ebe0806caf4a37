"""`DraftHead`: a drafter that reads the target's hidden states, and whose embedding and head may be the target's."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM
from models.layers.attention import Attention
from models.layers.base import CacheSpec, DraftLM
from models.layers.linear import ParallelLMHead, VocabParallelEmbedding
from models.layers.mla import LightningIndexer, MLAAttention
from models.layers.rotary import RotaryEmbedding


class TargetWeights(NamedTuple):
    """The target's modules that a drafter uses; None if the drafter's checkpoint has its own."""

    embed_tokens: VocabParallelEmbedding | None
    lm_head: ParallelLMHead | None


class DraftHead(DraftLM):
    """One or a few decoder layers over the target's hidden states."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str | int]]] = LlamaForCausalLM.packed_modules_mapping
    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(self, config: ModelConfig, embed_tokens: VocabParallelEmbedding, lm_head: ParallelLMHead) -> None:
        """`embed_tokens` and `lm_head` belong to the target or to submodules of this model."""
        super().__init__()
        self.hidden_size = config.hidden_size
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        # The tuple keeps torch from registering them as submodules, so that they are not loaded again.
        self._vocabulary = embed_tokens, lm_head

    @property
    def embed_tokens(self) -> VocabParallelEmbedding:
        """The embedding of the drafter's input tokens."""
        return self._vocabulary[0]

    @property
    def lm_head(self) -> ParallelLMHead:
        """The head that computes the drafter's logits."""
        return self._vocabulary[1]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`. On ranks other than 0, the logits of the rank's shard."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def kv_cache_layers(self) -> list[CacheSpec]:
        """See `DraftLM`."""
        kinds = Attention | MLAAttention | LightningIndexer
        return [module.cache_spec for module in self.modules() if isinstance(module, kinds)]
