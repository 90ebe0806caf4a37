"""`compile_pieces`: has torch compile what lies between the calls of attention. Used by the model runner where asked.

Each decoder layer is compiled as such, with calls that stay as they are: attention with its store, recurrent layers,
mixtures of experts, products with quantised weights or adapters, and exchanges between ranks. Layers of one kind share
what is compiled for the first; the number of tokens is open.
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
from models.layers.mla import LightningIndexer, MLAAttention
from models.layers.moe import FusedMoE
from models.ops.stored_weight import stored_of

DEFAULT_BACKEND: str | Callable[..., Any] = "inductor"
"""torch's name of a compiler."""
_KINDS_OF_LAYERS = 64
"""That may share a line of code: torch's own limit of 8 would leave the ninth kind uncompiled."""


def compile_pieces(model: CausalLM, backend: str | Callable[..., Any] | None = None) -> int:
    """Have each decoder layer compiled when it first runs; how many there are. `backend`: None is the default.

    A step of one token and one of several then compile all there is.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(_KINDS_OF_LAYERS, torch._dynamo.config.recompile_limit)
    layers = [
        layer
        for module in cast(nn.Module, model).modules()
        if isinstance(children := getattr(module, "layers", None), nn.ModuleList)
        for layer in children
    ]
    for layer in layers:
        for module in layer.modules():
            _leave_alone(module)
        layer.compile(backend=backend or DEFAULT_BACKEND, dynamic=True)
    return len(layers)


@contextmanager
def in_words() -> Iterator[None]:
    """Raises `ValueError`, a sentence, where torch fails to compile what is run."""
    import torch._dynamo

    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None) or error
        first = next((line for line in str(inner).splitlines() if line.strip()), type(inner).__name__)
        raise ValueError(
            f"compilation_level is 3, but torch failed to compile the model ({first.strip()}); set it to 0, or mend "
            "what torch.compile needs: a C++ compiler on a CPU, Triton on a GPU"
        ) from error


def _leave_alone(module: nn.Module) -> None:
    """Have compiled code call what it cannot look into, or would compute worse."""
    if isinstance(module, MLAAttention):
        module._attend = _as_it_is(module._attend)  # type: ignore[method-assign]
    elif isinstance(module, Attention | GatedDeltaNet | LightningIndexer | FusedMoE):
        module.forward = _as_it_is(module.forward)  # type: ignore[method-assign]
    elif isinstance(module, ParallelLinear):
        is_joined = isinstance(module, RowParallelLinear) and module.parallel.size > 1
        weight = cast(nn.Parameter, module.weight)
        if module.lora is not None or stored_of(weight) is not None or is_joined:
            module.forward = _as_it_is(module.forward)


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Callable[..., Any]", torch.compiler.disable(call))  # type: ignore[no-untyped-call]
