"""Which operators ROCm's library `aiter` computes. Layers call `runs`, and import its calls only where it is true.

The library is imported by `start`, never before, and only for operators that passed the probe in a process of its own.
"""

import torch

from models.ops.aiter import library

_started: frozenset[str] = frozenset()
_decodes_apart = False


def start(operators: frozenset[str], *, decodes_apart: bool = False) -> None:
    """Have the library compute these operators, which passed the probe, from now on.

    `decodes_apart`: another operator than that of prompts attends for decodes.
    """
    global _started, _decodes_apart
    for operator in operators:
        library.bind(operator)
    _started, _decodes_apart = operators, decodes_apart


def stop() -> None:
    """Stop the library: other backends compute everything."""
    start(frozenset())
    library.forget()


def leave(operator: str) -> None:
    """Have other backends compute an operator from now on."""
    global _started
    _started -= {operator}


def takes(operator: str) -> bool:
    """Whether the library was started for an operator."""
    return operator in _started


def decodes_apart() -> bool:
    """Whether another operator than that of prompts attends for decodes."""
    return _decodes_apart


def runs(operator: str, *tensors: torch.Tensor) -> bool:
    """Whether the library computes an operator of tensors such as these: matrices of 16-bit floats without gaps."""
    # torch.compile fuses these operators itself.
    if operator not in _started or torch.compiler.is_compiling():
        return False
    return all(
        tensor.dim() <= 2 and tensor.is_contiguous() and tensor.dtype in (torch.bfloat16, torch.float16)
        for tensor in tensors
    )
