"""Where torch compiles the model (`compilation_level`): whether it can, and what is said when it fails.

`models.compilation`, and with it torch's compiler, is imported only where it was asked for.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

from models.base import CausalLM
from models.checkpoint_config import CheckpointConfig
from models.model_config import ModelConfig

_log = logging.getLogger(__name__)


def compile_model(level: int, model: CausalLM, model_config: CheckpointConfig, *, has_operators: bool) -> None:
    """Have the layers compiled by the steps of the start, at level 3. Raises `ValueError` where they cannot be.

    `has_operators`: whether the CPU's compiled operators compute the model.
    """
    if level == 0:
        return
    reason = None
    if has_operators:
        reason = "the CPU's operators compute this model already; set cpu_operators to false"
    elif not isinstance(model_config, ModelConfig):
        reason = f"{model_config.architecture} runs by {model_config.runs_by}, which is not cut at its attention"
    if reason is not None:
        raise ValueError(f"compilation_level is {level}, but {reason}, or set compilation_level to 0")
    from models.compilation import compile_pieces

    num_layers = compile_pieces(model)
    _log.info("torch compiles %d layers, between their calls of attention", num_layers)


def compiling(level: int) -> AbstractContextManager[None]:
    """Around a step of the start. Raises `ValueError`, in words, where torch fails to compile what the step runs."""
    if level == 0:
        return nullcontext()
    from models.compilation import in_words

    return in_words()
