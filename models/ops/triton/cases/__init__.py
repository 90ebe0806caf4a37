"""The self-test of Triton's kernels: for each family its torch references and the cases that are compared with them.

The start of a model compares the cases of its own layers, `kaon doctor` and the tests on GPUs those of common sizes,
the tests in Triton's interpreter small ones. A new family is one module, with `common_cases` and `small_cases`, and a
line here.
"""

import torch

from models.ops.self_test import Case
from models.ops.triton.cases import (
    attention,
    elementwise,
    experts,
    gated_delta,
    latent_attention,
    quantized_products,
    sampling,
    state_space,
    token_scans,
)

FAMILIES = (
    attention,
    latent_attention,
    elementwise,
    experts,
    quantized_products,
    gated_delta,
    state_space,
    token_scans,
    sampling,
)


def common_cases(device: torch.device) -> dict[str, list[Case]]:
    """Cases in sizes of common models, by operator."""
    found: dict[str, list[Case]] = {}
    for family in FAMILIES:
        for case in family.common_cases(device):
            found.setdefault(case.operator, []).append(case)
    return found


def small_cases(device: torch.device) -> dict[str, Case]:
    """Cases of all families in small sizes, by name."""
    return {name: case for family in FAMILIES for name, case in family.small_cases(device).items()}
