"""`HookedLinear`: adapters beside a linear layer of transformers' code, on the general route. Made by `weights`."""

from typing import Any

import torch
from torch import nn

from models.lora.layer import LinearLoRA, OutputPart


class HookedLinear:
    """Adds what adapters have for each token to what the layer returns. Stands in for a `ParallelLinear`."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def make_lora(self, dtype: torch.dtype) -> LinearLoRA:
        """Let adapters take part, if they do not yet; the weights of theirs will be of `dtype`."""
        inputs, outputs = self._layer.in_features, self._layer.out_features
        present: LinearLoRA | None = getattr(self._layer, "lora", None)
        if present is not None:
            return present
        lora = LinearLoRA(inputs, slice(0, inputs), {None: OutputPart(outputs, outputs, 0, 0)}, dtype)

        def add(_layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            # [1, tokens, features]
            lora.apply(output.view(-1, outputs), args[0].reshape(-1, inputs))

        self._layer.register_forward_hook(add)
        self._layer.lora = lora  # type: ignore[assignment]
        return lora
