"""Quantised checkpoints on the general route: made dense by our own reading, then handed to transformers' loader."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from models.checkpoint_files import some, tensors_of_file, weight_files
from models.errors import CheckpointError
from models.quantization import QuantizationConfig
from models.quantization.config import Storage
from models.quantization.dequantize import Dequantizer


def load_dequantized(
    path: Path, quantization: QuantizationConfig, *, dtype: torch.dtype, attention: str
) -> tuple[Any, dict[str, Any]]:
    """transformers' model of the checkpoint directory `path` with dense weights, and its report of the load.

    Raises `CheckpointError` for quantised tensors that do not fit one another, and whatever transformers raises.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    with torch.device("meta"):
        empty = model_class(config)
    _refuse_other_orientations(empty, quantization)
    state = _dense_tensors(path, quantization, empty.state_dict().keys(), dtype)
    loaded: tuple[Any, dict[str, Any]] = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    return loaded


class _HandedOver:
    """A tensor that its one reader takes, as it takes a slice of a file.

    transformers keeps what it is given until all is loaded: else each expert would stay beside the stack of them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def __getitem__(self, _all: Any) -> torch.Tensor:
        assert self._tensor is not None
        tensor, self._tensor = self._tensor, None
        return tensor


def _dense_tensors(
    path: Path, quantization: QuantizationConfig, names: Container[str], dtype: torch.dtype
) -> dict[str, _HandedOver]:
    """Each dense tensor by its name in the checkpoint; `names`: the model's own, of which experts' may differ."""
    state: dict[str, _HandedOver] = {}

    def is_wanted(name: str) -> bool:
        return name not in state and (name in names or not name.endswith(".bias"))

    dequantizer = Dequantizer(quantization, dtype, is_wanted)
    seen: dict[str, Path] = {}
    for file in weight_files(path):
        for name, tensor in dequantizer.dense(tensors_of_file(file, seen)):
            is_weight = name in names or name.endswith(".weight")  # And no mask, which old checkpoints carry.
            if is_weight and tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
                raise CheckpointError(f"{name} in {file} is {tensor.dtype}, which the general route cannot make dense")
            state[name] = _HandedOver(tensor)
    if incomplete := dequantizer.lacking(dequantizer.incomplete()):
        raise CheckpointError(f"{path} lacks {some(incomplete)}, without which its weights cannot be read")
    if left_over := dequantizer.left_over():
        raise CheckpointError(f"{path} holds {some(left_over)} beside weights that are dense without them")
    return state


def _refuse_other_orientations(model: torch.nn.Module, quantization: QuantizationConfig) -> None:
    """Raise `CheckpointError` for weights that the model keeps turned, where a square one would be taken unseen."""
    name = type(model).__name__
    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise CheckpointError(f"{name} keeps its weights transposed, so the general route reads it dense only")
    every = quantization.global_quant_config
    if every is not None and every.storage is Storage.MXFP4_EXPERTS and name != "GptOssForCausalLM":
        raise CheckpointError(f"quant_method mxfp4 holds experts as GptOssForCausalLM has them; {name} has others")
