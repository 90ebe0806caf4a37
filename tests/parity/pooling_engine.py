"""Runs prompts that are pooled, and others that generate, through a scheduler and a model runner, step by step."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.messages import PoolingParams
from engine.runner.loaded_model import LoadedModel, load_model, start_operators
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.architectures.pooling import read_pooling
from models.loading.checkpoint import read_checkpoint_config

CPU = torch.device("cpu")


class Ran(NamedTuple):
    """The results of a run."""

    vectors: list[npt.NDArray[np.float32]]
    steps: list[list[int]]
    """Number of tokens of each row of each step."""
    texts: list[list[int]]
    """Tokens of the generating sequences."""


def load_pooling(checkpoint: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> LoadedModel:
    """A checkpoint that pools, loaded as at a start."""
    given = {"model": str(checkpoint), "num_kvcache_blocks": 64, "max_num_batched_tokens": 512, **settings}
    config = Config.model_validate(given)
    pooling = read_pooling(checkpoint, config.task, matryoshka=config.matryoshka)
    assert pooling is not None
    model_config = read_checkpoint_config(checkpoint, config.model_impl, pooling)
    config = config.model_copy(update={"max_model_len": config.max_model_len or model_config.max_model_len})
    operators = start_operators(config, CPU, dtype)
    return load_model(config, checkpoint, model_config, CPU, dtype, operators=operators, pooling=pooling)


class PoolingEngine:
    """A model with its scheduler."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.config.num_kvcache_blocks is not None
        self.runner = ModelRunner(loaded, loaded.config.num_kvcache_blocks)
        self.runner.warm_up()
        self.scheduler = Scheduler(loaded.config, splits_prompts=not loaded.is_encoder)

    def run(
        self,
        prompts: list[list[int]],
        params: PoolingParams = PoolingParams(),  # noqa: B008 - immutable
        *,
        firsts: list[int | None] | None = None,
        generating: list[list[int]] | None = None,
        preempt_after: int | None = None,
    ) -> Ran:
        """Pool `prompts`, while the prompts `generating` are continued greedily by 12 tokens each.

        `firsts`: the number of tokens of the first text of pairs. After `preempt_after` steps all sequences are
        preempted.
        """
        pooled = [
            self._sequence(prompt, PoolingParams(params.dimensions, params.activate, first))
            for prompt, first in zip(prompts, firsts or [None] * len(prompts), strict=True)
        ]
        others = [self._sequence(prompt, None) for prompt in generating or ()]
        self.scheduler.extend([*others[:1], *pooled, *others[1:]])
        vectors: dict[int, bytes] = {}
        steps: list[list[int]] = []
        while (scheduled := self.scheduler.schedule()) is not None:
            batch, seqs = scheduled
            steps.append(batch.num_scheduled_tokens)
            output = self.runner.forward(batch)
            assert not output.errors
            vectors |= output.vectors or {}
            self.scheduler.postprocess(list(seqs.values()), output)
            self.scheduler.check_integrity()
            if len(steps) == preempt_after:
                for seq in list(self.scheduler.running):
                    self.scheduler.preempt(seq)
        found = [np.frombuffer(vectors[seq.id], dtype="<f4") for seq in pooled]
        return Ran(found, steps, [seq.completion_token_ids for seq in others])

    def _sequence(self, prompt: list[int], pooling: PoolingParams | None) -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=12 if pooling is None else 0, ignore_eos=True)
        return Sequence(prompt, self.runner.config.kv_cache_block_size, params, pooling=pooling)
