"""`compile_layers`: compiles each decoder layer with torch.compile. Used by the model runner at compilation level 3.

Some parts are excluded and run eagerly: attention with its cache write, recurrent layers, mixtures of experts,
products with quantised weights or adapters, and all-reduces. Layers of one kind share the code compiled for the first
one. The number of tokens is dynamic.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from models.layers.attention import Attention
from models.layers.base import CausalLM
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.linear import ParallelLinear, RowParallelLinear
from models.layers.mamba2 import Mamba2Mixer
from models.layers.mla import LightningIndexer, MLAAttention
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.layers.short_conv import ShortConv
from models.ops.stored_weight import stored_of
from models.torch_import import load_meta_kernels

DEFAULT_BACKEND: str | Callable[..., Any] = "inductor"
"""Name of a torch.compile backend, or a callable backend."""
_MAX_LAYER_KINDS = 64
"""Largest number of kinds of layers that are compiled; torch's default limit is 8 recompilations."""


def compile_layers(model: CausalLM, backend: str | Callable[..., Any] | None = None) -> int:
    """Mark each decoder layer for compilation at its first call; return the number of layers.

    One step of one token and one step of several tokens trigger all compilations. `backend`: None for
    `DEFAULT_BACKEND`.
    """
    load_meta_kernels()
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(_MAX_LAYER_KINDS, torch._dynamo.config.recompile_limit)
    layers = [
        layer
        for module in cast(nn.Module, model).modules()
        if isinstance(children := getattr(module, "layers", None), nn.ModuleList)
        for layer in children
    ]
    for layer in layers:
        for module in layer.modules():
            _exclude(module)
        layer.compile(backend=backend or DEFAULT_BACKEND, dynamic=True)
    return len(layers)


@contextmanager
def compile_errors_as_value_errors() -> Iterator[None]:
    """Within the context, a failed compilation raises `ValueError`."""
    import torch._dynamo

    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None) or error
        first = next((line for line in str(inner).splitlines() if line.strip()), type(inner).__name__)
        raise ValueError(
            f"compilation_level is 3, but torch failed to compile the model ({first.strip()}); set it to 0, or "
            "install what torch.compile needs: a C++ compiler on a CPU, Triton on a GPU"
        ) from error


def _exclude(module: nn.Module) -> None:
    """Exclude a module from compilation if torch.compile cannot trace it or would make it slower."""
    if isinstance(module, MLAAttention):
        module._attend = _eager(module._attend)  # type: ignore[method-assign]
    elif isinstance(module, Attention | GatedDeltaNet | Mamba2Mixer | ShortConv | LightningIndexer | FusedMoE):
        module.forward = _eager(module.forward)  # type: ignore[method-assign]
    elif isinstance(module, RMSNorm) and module.sums.size > 1:
        module.add_norm = _eager(module.add_norm)  # type: ignore[method-assign]
    elif isinstance(module, ParallelLinear):
        is_joined = isinstance(module, RowParallelLinear) and module.parallel.size > 1 and module.reduces
        if module.lora is not None or stored_of(module.weight) is not None or is_joined:
            module.forward = _eager(module.forward)


def _eager(call: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Callable[..., Any]", torch.compiler.disable(call))  # type: ignore[no-untyped-call]
