"""Makes model runners for tests, and runs their steps."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.batch import ScheduledBatch
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.runner.device import Device
from engine.runner.loaded_model import LoadedModel, load_model, start_operators
from engine.runner.model_runner import ModelRunner
from engine.sequence import Sequence
from models.loading.checkpoint import read_checkpoint_config

CPU = torch.device("cpu")


def load(
    checkpoint: Path, config: Config, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **how: Any
) -> LoadedModel:
    """A checkpoint's model; `how` as in `load_model`."""
    model_config = read_checkpoint_config(checkpoint, config.model_impl)
    operators = start_operators(config, device, dtype)
    return load_model(config, checkpoint, model_config, device, dtype, operators=operators, **how)


def rebuilt(
    runner: ModelRunner, device_api: Device | None = None, num_blocks: int | None = None, **changes: Any
) -> ModelRunner:
    """Another runner of the same model: with other caches, on another device, or with other changes."""
    if device_api is not None:
        changes["device_api"] = device_api
    if num_blocks is None:
        num_blocks = runner.config.num_kvcache_blocks
    assert num_blocks is not None
    return ModelRunner(dataclasses.replace(runner.loaded, **changes), num_blocks)


def steps(scheduler: Scheduler, runner: ModelRunner, arrivals: dict[int, list[Sequence]]) -> Iterator[ScheduledBatch]:
    """Compute steps until none is left, and yield each once its tokens are stored.

    `arrivals`: the sequences that are queued before a step, by the step's number.
    """
    step = 0
    while True:
        scheduler.extend(arrivals.pop(step, []))
        if (scheduled := scheduler.schedule()) is None:
            return
        batch, running = scheduled
        scheduler.postprocess(list(running.values()), runner.forward(batch))
        yield batch
        step += 1
