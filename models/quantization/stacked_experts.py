"""All experts' tensors in one, as transformers saves FP8 models, taken apart. Used by the `Dequantizer`.

What transformers writes may even have the weights apart (`experts.3.gate_proj.weight`) and their scales stacked
(`experts.gate_up_proj_scale_inv`).
"""

from collections.abc import Iterator, Mapping

import torch

from models.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"

ExpertNames = Mapping[tuple[int, str], str]
"""By expert and part, in the order of the stack: the name of the weight where each has a tensor of its own."""


def unstacked(name: str, stack: torch.Tensor, names: ExpertNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Each expert's part of a stack of weights or of their scales, by the name that it has alone.

    # [experts, parts * n, m] -> experts * parts of [n, m]

    Raises `CheckpointError` where the stack cannot be shared out evenly: the parts then share a row of blocks.
    """
    ending = SCALE_SUFFIX if name.endswith(SCALE_SUFFIX) else ""
    num_parts = len({part for _, part in names})
    num_experts = len(names) // num_parts
    if stack.ndim != 3 or len(stack) != num_experts or stack.shape[1] % num_parts:
        raise CheckpointError(
            f"{name} has shape {list(stack.shape)}, where the model needs {num_experts} experts, each with rows for "
            f"{num_parts} equal part{'s' if num_parts > 1 else ''}"
        )
    rows = stack.shape[1] // num_parts
    for place, alone in enumerate(names.values()):
        expert, part = divmod(place, num_parts)
        yield f"{alone}{ending}", stack[expert, part * rows : (part + 1) * rows]
