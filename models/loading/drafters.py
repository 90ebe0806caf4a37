"""`load_drafter`: loads the model that drafts for a target. Called by the model runner once the target is loaded.

`DRAFTERS` maps each method to a function of a `DraftedModel` and the directory of `speculative_model` (None if it is
not set). The function returns a `DraftLM`, or raises `CheckpointError` for a checkpoint that is damaged or does not
fit the target.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from models.architectures.config import ModelConfig
from models.architectures.registry import DRAFTERS
from models.errors import CheckpointError
from models.layers.base import CacheSpec, CausalLM, DraftLM, StateCacheSpec
from models.loading.checkpoint import read_checkpoint_config
from models.loading.loader import LoadOptions, load_with


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedModel:
    """The target model, and the options with which its drafter is loaded."""

    model: CausalLM
    config: ModelConfig
    path: Path
    """The target's checkpoint directory."""
    options: LoadOptions
    """How the drafter is loaded."""


def load_drafter(method: str, target: DraftedModel, path: Path | None) -> DraftLM:
    """Load the drafter by a method of `DRAFTERS`. Raises `CheckpointError`."""
    drafter = DRAFTERS[method](target, path)
    assert isinstance(drafter, DraftLM)
    if any(isinstance(spec, StateCacheSpec) for spec in drafter.kv_cache_layers()):
        raise CheckpointError(
            f"speculative_model {path} keeps recurrent states, which cannot take back a draft that is rejected; "
            "choose one of attention layers"
        )
    return drafter


class DraftModel(DraftLM):
    """A smaller language model with the target's vocabulary. It reads no hidden states."""

    def __init__(self, model: CausalLM, hidden_size: int) -> None:
        super().__init__()
        self.model = model
        self.hidden_size = hidden_size

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`."""
        del hidden
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftLM`."""
        return self.model.compute_logits(hidden)

    def kv_cache_layers(self) -> list[CacheSpec]:
        """See `DraftLM`."""
        return self.model.kv_cache_layers()


@DRAFTERS.register("draft")
def load_draft_model(target: DraftedModel, path: Path | None) -> DraftLM:
    """Load a draft model of any architecture that Kaon implements."""
    if path is None:
        raise CheckpointError(
            "speculative_method is draft, which needs a model; set speculative_model to its directory"
        )
    config = read_checkpoint_config(path, "kaon")
    assert isinstance(config, ModelConfig)
    if config.vocab_size != target.config.vocab_size:
        raise CheckpointError(
            f"speculative_model {path} has a vocabulary of {config.vocab_size} tokens, but the model has "
            f"{target.config.vocab_size}; a draft model needs the same tokens"
        )
    if config.max_model_len < target.config.max_model_len:
        raise CheckpointError(
            f"speculative_model {path} has a context of {config.max_model_len} tokens, but sequences may have "
            f"{target.config.max_model_len}; lower max_model_len, or choose another model"
        )
    # Some rope types choose their frequencies by the largest context length, which must be the served one.
    config = dataclasses.replace(config, max_model_len=target.config.max_model_len)
    return DraftModel(load_with(target.options, path, config), config.hidden_size)
